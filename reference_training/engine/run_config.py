"""What the settings of every reference trainer share: a run folder, and how a run is resumed."""

from __future__ import annotations

import abc
import dataclasses
import math
import os
import shlex
import typing
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from ebmguard.errors import ConfigError

from ..device import find_device
from .ranks import ONE_RANK, RESTART_COUNT, Ranks

if TYPE_CHECKING:
    from .run_folder import RunFolder

S = TypeVar("S")

DEVICE_KIND = "device_kind"
"""Entry of config.json: the kind of device that the run began on."""

RESTARTS = (RESTART_COUNT, "SLURM_RESTART_COUNT")
"""How often torchrun, or Slurm's requeue, has started the same command again (environment)."""


@dataclass(frozen=True)
class RunConfig(abc.ABC):
    """Settings of one run; a trainer's are a subclass, which is also its command line."""

    out: Path
    """Run folder. A folder that already holds a run is refused, unless it is resumed."""
    resume: bool = False
    """Go on with the run in the folder, from its last checkpoint and with its settings. A command
    that torchrun or Slurm has started again does so by itself."""
    seed: int = 0
    """Seed of everything random in the run."""
    device: str = "auto"
    """auto takes a GPU where there is one; or a name that PyTorch knows, such as cpu or cuda:1."""
    checkpoint_every: int = 500
    """Steps between checkpoints; evaluations and Ctrl-C write one too."""
    threads: int = 1
    """CPU threads of PyTorch: one is fastest for small networks, 0 is its own choice."""

    words: ClassVar[tuple[str, ...]]
    """The command that takes these settings."""
    shown: ClassVar[tuple[str, ...]]
    """Settings that :meth:`command` names even where they have their default."""
    may_change: ClassVar[tuple[str, ...]] = ("iterations", "device", "threads")
    """Settings that a resumed run may have another value of."""

    @property
    def total_steps(self) -> int:
        """Steps that the run is to have: `iterations` of its `settings`, else its own."""
        settings: Any = getattr(self, "settings", self)
        return int(settings.iterations)

    @abc.abstractmethod
    def check(self, ranks: Ranks = ONE_RANK) -> None:
        """Refuse settings that cannot be meant by these ranks, all of them in one ConfigError."""

    def to_json(self) -> dict[str, Any]:
        """The settings of the run as plain JSON values, but for where it and its data come from."""
        values = dataclasses.asdict(self)
        for name in ("out", "resume", "download"):
            values.pop(name, None)
        return {name: _plain(value) for name, value in values.items()}

    def over(self, base: S) -> S:
        """The values of a dataclass, but for those that are set here under the same name."""
        names = {f.name for f in dataclasses.fields(base)}  # type: ignore[arg-type]
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name in names}
        set_here = {name: value for name, value in given.items() if value is not None}
        return dataclasses.replace(base, **set_here)  # type: ignore[type-var]

    def problems(self) -> list[str]:
        """What is wrong with the settings that all trainers share, and with choices among names."""
        return no_choices(self) + below(self, checkpoint_every=1, threads=0)

    def command(self) -> str:
        """The command line that makes this run again, defaults left out."""
        return shlex.join(command_words(self, *self.words, shown=self.shown, hidden=("resume",)))

    def resumed(self, stored: Mapping[str, Any]) -> Self:
        """These settings over those of the run that is resumed.

        A setting left at its default is the stored one; more iterations, another device or number
        of threads may be asked for.

        Args:
            stored: the settings of the run, as :meth:`to_json` gave them.

        Raises:
            ConfigError: names the settings that contradict the run's.
        """
        known = {f.name: f for f in dataclasses.fields(self) if f.name in stored}
        changed = {
            name: value
            for name, value in RunConfig.to_json(self).items()  # as given: nothing resolved
            if name in known and value != _plain(known[name].default)
        }
        self._refuse_clashes(changed, stored)
        values: dict[str, Any] = {name: stored[name] for name in known} | changed
        for name, value in values.items():
            values[name] = tuple(value) if isinstance(value, list) else value
        return dataclasses.replace(self, **values)

    def _refuse_clashes(self, wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
        clashes = [
            f"{name} is {value}, the run has {stored[name]}"
            for name, value in wanted.items()
            if name not in self.may_change and value != stored[name]
        ]
        if clashes:
            raise ConfigError(
                f"{self.out} cannot be resumed with other settings; leave them out, or start a run "
                "in another folder:\n  " + "\n  ".join(clashes)
            )

    def open(self, ranks: Ranks = ONE_RANK) -> tuple[Self, RunFolder]:
        """The settings that count, and the folder to write into.

        A command that was started again by a launcher (`RESTARTS`) resumes the run that it began.
        Of several ranks the first one settles both, and the others follow it.

        Raises:
            ConfigError: the settings do not make a run, the folder is not theirs, or there is no
                such device. The folder is as it was then. Raised on every rank.
        """
        from .checkpoints import restoring
        from .run_folder import RunFolder

        found: Any = None
        if ranks.is_first:
            try:
                # Settings that a damaged config.json holds may be of any type.
                with restoring(self.out) if self.resume else nullcontext():
                    found, folder = self._open(ranks)
            except ConfigError as error:
                found = error
        found = ranks.from_first(found)
        if isinstance(found, ConfigError):
            raise found
        return found, folder if ranks.is_first else RunFolder.resume(found.out, ranks)

    def _open(self, ranks: Ranks) -> tuple[Self, RunFolder]:
        from .run_folder import CONFIG, RunFolder, read_config

        was_restarted = any(os.environ.get(name, "0") != "0" for name in RESTARTS)
        if not self.resume and was_restarted and (self.out / CONFIG).is_file():
            stored = read_config(self.out)
            # Nothing is left out of a command that is repeated: a default that differs is another
            # run's, which was refused the first time.
            given = RunConfig.to_json(self)
            self._refuse_clashes({name: given[name] for name in given if name in stored}, stored)
            return dataclasses.replace(self, resume=True)._open(ranks)
        folder = RunFolder.resume(self.out, ranks) if self.resume else None
        config = self.resumed(folder.config) if folder else self
        config.check(ranks)
        settings = {**config.to_json(), DEVICE_KIND: find_device(config.device).type}
        if not folder:
            return config, RunFolder.create(config.out, settings, ranks)
        began_on = folder.config.get(DEVICE_KIND, settings[DEVICE_KIND])
        if began_on != settings[DEVICE_KIND]:
            raise ConfigError(
                f"{self.out} began on a device of the kind {began_on!r}, whose random numbers "
                f"cannot go on here; resume it with --device {began_on}, where there is one"
            )
        done = max(folder.checkpoints.steps(), default=0)
        if done > config.total_steps:
            raise ConfigError(
                f"{self.out} has {done} steps already, iterations is {config.total_steps}; give "
                "--iterations that many or more"
            )
        folder.write_config({**folder.config, **settings})
        return config, folder


def command_words(
    settings: Any, *words: str, shown: Sequence[str] = (), hidden: Sequence[str] = ()
) -> list[str]:
    """The words of the command line that makes settings again, defaults left out.

    Args:
        settings: a dataclass that is a command line.
        *words: of the command.
        shown: settings that are named even where they have their default.
        hidden: settings that are not.
    """
    found = [*words]
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), field.name.replace("_", "-")
        is_default = value == field.default and field.name not in shown
        if value is None or is_default or field.name in hidden:
            continue
        if isinstance(value, bool):
            found.append(f"--{name}" if value else f"--no-{name}")
        else:
            found += [f"--{name}", *map(short, value if isinstance(value, tuple) else (value,))]
    return found


def short(value: object) -> str:
    """All digits of a number, without those of a whole number's fraction."""
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def refuse(problems: Sequence[str], what: str = "a run") -> None:
    """Raise a ConfigError of all problems, where there are some."""
    if problems:
        lines = "\n  ".join(problems)
        raise ConfigError(f"the settings do not make {what}:\n  {lines}")


def no_choices(settings: object) -> list[str]:
    """What is wrong with settings that are one of a `Literal`'s names; None is none of them."""
    wrong = []
    for name, kind in typing.get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        for own in (kind, *typing.get_args(kind)):  # such as X | None
            if typing.get_origin(own) is Literal and value not in (None, *typing.get_args(own)):
                known = ", ".join(typing.get_args(own))
                wrong.append(f"{name} is {value!r}, expected one of {known}")
    return wrong


def below(settings: object, **least: int) -> list[str]:
    """What is wrong with counts that are less than so many; None is no count."""
    values = {name: getattr(settings, name) for name in least}
    return [
        f"{name} is {value}, expected {least[name]} or more"
        for name, value in values.items()
        if value is not None and value < least[name]
    ]


def counts(settings: Any, **others: int) -> dict[str, int]:
    """1 for each setting that is a whole number, or what is said: the least of them."""
    fields = dataclasses.fields(settings)
    return {f.name: 1 for f in fields if f.type in ("int", "int | None")} | others


def not_positive(settings: object, *names: str, or_0: bool = False) -> list[str]:
    """What is wrong with numbers that have to be finite and more than 0, or 0 too."""
    values = {name: getattr(settings, name) for name in names}
    expected = "a finite number, 0 or more" if or_0 else "a positive number"
    return [
        f"{name} is {x}, expected {expected}"
        for name, x in values.items()
        if x is not None and not (math.isfinite(x) and (x > 0 or (or_0 and x == 0)))
    ]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
