"""A table of JEM and its kin: how their settings become keywords of the guard, or are refused.

``from ebmguard.adapters import jem`` gives a row of it, and ``docs/codebases.md`` the changed
lines of all::

    loss_fn, sample_q = guard(None, get_sample_q(args, device), **jem.settings(args))

Other trainers need no row: the guard measures their samplers, and they have no mode to refuse.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ebmguard.errors import ConfigError

__all__ = ["CODEBASES", "Codebase"]


@dataclass(frozen=True)
class Codebase:
    """A published trainer, whose sampler steps ``x += sgld_lr * gradient + sgld_std * randn``.

    Attributes:
        script: its name in messages.
        terms: the weight's setting of every term with samples, the usual term first.
        refuses: settings with the value that cannot be guarded, and the reason.
        step_size: its setting; empty if no one setting has it, and the guard measures it.
        steps: the setting of the number of steps, which is also the sampler's argument.
        clamp: the ends of the samples, if they get no noise.
        folder: the setting that says where the run is saved. The guard writes to ``ebmguard``
            inside, because TensorBoard reads only the newest of two writers in one folder.
    """

    script: str
    terms: Mapping[str, str] = field(default_factory=dict)
    refuses: Sequence[tuple[str, bool, str]] = ()
    step_size: str = "sgld_lr"
    steps: str = "n_steps"
    clamp: tuple[float, float] | None = None
    folder: str = "save_dir"

    def settings(self, args: Any, term: str | None = None) -> dict[str, Any]:
        """Return keywords of :func:`ebmguard.guard` for the script's arguments.

        Without noise there is no output scale: the sampler stays as it is, and the weights alone
        act.

        Args:
            args: the script's arguments, after it has completed them.
            term: the term of the loss that this guard is for, where several are on.

        Raises:
            ConfigError: settings are missing, the term is off or must be named, or a mode that
                cannot be guarded.
        """
        modes = self._read(args, [name for name, _, _ in self.refuses])
        for name, value, why in self.refuses:
            if bool(modes[name]) is value:
                raise ConfigError(why)
        names = [self.step_size, "sgld_std", self.steps, self.folder]
        values = self._read(args, [*self.terms.values(), *filter(None, names)])
        if self.terms:
            _check_term({name: values[weight] for name, weight in self.terms.items()}, term)
        folder = os.path.join(values[self.folder], "ebmguard", *([] if term is None else [term]))
        keywords: dict[str, Any] = {"log_dir": folder}
        if self.steps:
            keywords |= {"sgld_steps": values[self.steps], "steps_argument": self.steps}
        if not values["sgld_std"] > 0:
            return keywords | ({"clamp": self.clamp} if self.clamp else {})
        if self.step_size:
            keywords |= {"step_size": values[self.step_size], "noise_std": values["sgld_std"]}
        return keywords

    def _read(self, args: Any, names: Sequence[str]) -> dict[str, Any]:
        values = {name: getattr(args, name, None) for name in names}
        missing = [name for name, value in values.items() if value is None]
        if missing:
            raise ConfigError(
                f"{self.script} has the settings {', '.join(names)}; in these args "
                f"{', '.join(missing)} is missing or None. Pass the script's own args, after it "
                "has completed them, or give guard() its keywords by hand."
            )
        return values


def _check_term(weights: Mapping[str, float], term: str | None) -> None:
    """Refuse a guard for a term of the loss that is off, or one that would mix several terms."""
    usual, on = next(iter(weights)), [name for name, weight in weights.items() if weight > 0]
    if term in on or (term is None and on == [usual]):
        return
    fix = "Give one a weight above 0, or leave the guard out."
    if on:
        calls = ", ".join(f"settings(args, {name!r})" for name in on)
        fix = f"Make a guard and a sampler for each: {calls}, as guard(None, sampler, **those)."
    raise ConfigError(
        f"term={term!r}: of the terms {', '.join(weights)} these have a weight above 0, each with "
        f"chains and energies of its own: {', '.join(on) or 'none'}. {fix}"
    )


_JEM = {"p_x": "p_x_weight", "p_x_y": "p_x_y_weight"}
_WITHOUT_SAMPLES = (
    "--{} trains without contrastive samples, also beside --jem_baseline. Leave it out, or leave "
    "the guard out."
)
_OTHER_MODES = ("clf_only", "maximum_likelihood", "ssm", "vat")  # The script checks these first.

CODEBASES: Mapping[str, Codebase] = {
    # wgrathwohl/JEM, train_wrn_ebm.py (3d01161), and forks that kept its arguments
    "jem": Codebase("JEM's train_wrn_ebm.py", _JEM),
    # sndnyang/JEMPP, train_jempp.py (fba6ba5). A PYLD step is sgld_lr + in_steps * pyld_lr: its
    # inner steps climb one slope, since the first layer is linear and the gradient behind it is
    # held fixed. Noise is added after the clamp.
    "jempp": Codebase("JEM++'s train_jempp.py", _JEM, step_size="", clamp=(-1.0, 1.0)),
    # sndnyang/SADAJEM, train_sadajem.py (9d8f3c7). SAM has two losses per step, one row.
    "sadajem": Codebase("SADAJEM's train_sadajem.py", {"px": "px"}, clamp=(-1.0, 1.0)),
    # lhao499/HDGE, train_wrn.py (9f12b3e). It multiplies both terms by the weight of the first;
    # --pxcontrast and --pxycontrast have no samples and stay as they are.
    "hdge": Codebase(
        "HDGE's train_wrn.py",
        {"pxsgld": "pxsgld", "pxysgld": "pxysgld"},
        refuses=[
            (
                "plot_contrast",
                True,
                "--plot_contrast makes the sampler climb f.joint(...), another function than the "
                "guard tempers. Leave it out, and draw these pictures from a checkpoint.",
            )
        ],
        folder="log_dir",
    ),
    # wgrathwohl/VERA, train.py (91ff0dd), --jem_baseline. It passes the number of steps by
    # position, so that nothing can change it.
    "vera": Codebase(
        "VERA's train.py",
        refuses=[
            *((mode, True, _WITHOUT_SAMPLES.format(mode)) for mode in _OTHER_MODES),
            (
                "jem_baseline",
                False,
                "Without --jem_baseline, VERA's negatives come from a generator and not from a "
                "sampler. Add --jem_baseline, or leave the guard out.",
            ),
        ],
        steps="",
    ),
}
