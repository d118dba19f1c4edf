"""One table: what the settings of published trainers say to the guard.

``from ebmguard.adapters import jem`` gives a row of it; :class:`Codebase` has its two methods, and
``docs/your-trainer.md`` the changed lines of each::

    loss_fn, sample_q = guard(None, get_sample_q(args, device), **jem.settings(args))
    loss_fn.guard.attach(model=f, optimizer=optim, **jem.sampler_settings(args))
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ebmguard.errors import ConfigError

__all__ = ["CODEBASES", "Codebase"]

Found = Mapping[str, Any]


def _sgld(found: Found) -> tuple[float, float]:
    return found["sgld_lr"], found["sgld_std"]


def _difference(energy_pos: Tensor, energy_neg: Tensor) -> Tensor:
    return energy_pos.mean() - energy_neg.mean()


@dataclass(frozen=True)
class Codebase:
    """A published trainer, whose sampler steps ``x += step_size * gradient + noise_std * randn``.

    Attributes:
        script: its name in messages.
        numbers: step size and standard deviation of the noise, from what was read.
        reads: the settings that are read; ``modes`` of them first, for what ``refuses`` says.
        terms: the weight's setting of each term that has samples of its own, the usual one first.
        folder: the setting that says where the run is saved. The guard writes to ``ebmguard``
            inside, because TensorBoard reads only the newest of two writers in one folder.
        convention: of its energies; empty where nothing is said.
        literals: numbers that stand in the published code, and may be given.
        steps: the setting of the number of steps, which is also the sampler's argument.
        tells: settings behind :meth:`sampler_settings`, and what they say beside the steps.
        difference: the trainer's own loss, where it is not mean minus mean.
    """

    script: str
    numbers: Callable[[Found], tuple[float, float]] = _sgld
    reads: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    refuses: Callable[[Found], str | bool] | None = None
    terms: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    convention: str = ""
    literals: Mapping[str, float] = field(default_factory=dict)
    steps: str = ""
    tells: tuple[tuple[str, ...], Callable[[Found], Mapping[str, Any]]] = ((), dict)
    difference: Callable[[Tensor, Tensor], Tensor] = _difference

    def settings(self, given: Any, of: Any = None, **literals: float) -> dict[str, Any]:
        """Keywords of :func:`ebmguard.guard`, from the trainer's own settings.

        Without noise there is no output scale: the sampler stays as it is, and the weights alone
        act.

        Args:
            given: the script's arguments after it has completed them, its configuration, its
                network, or the step size, as on its page.
            of: the term of the loss that this guard is for, where several are on; or the network.
            literals: numbers that differ from those in the published code, by name.

        Raises:
            ConfigError: settings are missing, the term is off or must be named, the sampler's step
                size is 0, or a mode that cannot be guarded.
        """
        found = {"given": given, **self.literals, **literals} | self._read(given, self.modes)
        if self.refuses is not None and (wrong := self.refuses(found)):
            raise ConfigError(wrong)
        found |= self._read(given, self.reads)
        if self.terms:
            _check_term({term: found[name] for term, name in self.terms.items()}, of)
        step, noise = self.numbers(found)
        keywords: dict[str, Any] = {"convention": self.convention} if self.convention else {}
        model = next((each for each in (given, of) if isinstance(each, nn.Module)), None)
        if model is not None:
            keywords["model"] = model
        if self.folder:
            if not step > 0:
                raise ConfigError(
                    f"The sampler's step size is {step:g}: its chains do not climb f, and the "
                    "samples are where they started. Set a step size above 0."
                )
            names = [] if of is None else [of]
            keywords["log_dir"] = os.path.join(found[self.folder], "ebmguard", *names)
        return keywords | _langevin(step, noise)

    def sampler_settings(self, given: Any) -> dict[str, Any]:
        """Keywords of :meth:`ebmguard.Guard.attach` about the sampler, from the script's arguments.

        Diagnostics of the Langevin step need them, and so does whatever changes the number of steps
        (rollbacks, ``adapt=``). ConfigError where settings are missing.
        """
        names, tells = self.tells
        found = self._read(given, (*names, *([self.steps] if self.steps else [])))
        steps = (
            {"sgld_steps": found[self.steps], "steps_argument": self.steps} if self.steps else {}
        )
        return {**tells(found), **steps}

    def _read(self, given: Any, names: tuple[str, ...]) -> dict[str, Any]:
        found = {name: getattr(given, name, None) for name in names}
        missing = [name for name, value in found.items() if value is None]
        if missing:
            raise ConfigError(
                f"{self.script} has the settings {', '.join(names)}; in these args "
                f"{', '.join(missing)} is missing or None. Pass the script's own args, after it "
                "has completed them, or give guard() its keywords by hand."
            )
        return found


def _langevin(step_size: float, noise_std: float) -> dict[str, float]:
    return {"step_size": step_size, "noise_std": noise_std} if noise_std > 0 else {}


def _check_term(weights: Mapping[str, float], term: str | None) -> None:
    """Refuse a guard for a term of the loss that is off, or one that would mix several terms."""
    usual = next(iter(weights))
    others = [name for name, weight in weights.items() if weight > 0 and name != usual]
    if term is None and others:
        each = ", ".join(f"settings(args, {name!r})" for name in weights if weights[name] > 0)
        raise ConfigError(
            f"The term {', '.join(others)} is on, with chains and energies of its own. Make a "
            f"guard for each term, each with a sampler of its own: {each}, passed on as "
            "guard(None, sampler, **those)."
        )
    chosen = usual if term is None else term
    if chosen not in weights:
        raise ConfigError(f"term={chosen!r}; expected one of {', '.join(map(repr, weights))}.")
    if not weights[chosen] > 0:
        raise ConfigError(
            f"The weight of the term {chosen} is {weights[chosen]:g}: there is no such loss to "
            "guard. Give it a weight above 0, or leave the guard out."
        )


def _refuses_hdge(found: Found) -> str | bool:
    return found["plot_contrast"] and (
        "--plot_contrast makes the sampler climb f.joint(...), another function than the guard "
        "tempers. Leave it out, and draw these pictures from a checkpoint."
    )


_OTHER_MODES = ("clf_only", "maximum_likelihood", "ssm", "vat")  # The script checks these first.


def _refuses_vera(found: Found) -> str | bool:
    mode = next((mode for mode in _OTHER_MODES if found[mode]), "")
    if mode:
        what = f"--{mode} trains without contrastive samples, also beside --jem_baseline."
        return f"{what} Leave it out, or leave the guard out."
    return not found["jem_baseline"] and (
        "Without --jem_baseline, VERA's negatives come from a generator and not from a sampler. "
        "Add --jem_baseline, or leave the guard out."
    )


def _refuses_anatomy(found: Found) -> str | bool:
    config = found["given"]
    return "epsilon" not in config and (
        f"The configuration has no 'epsilon'; it has {', '.join(sorted(config)) or 'no entry'}. "
        "Pass the dict that train_data.py or train_toy.py reads from its config_locker file."
    )


def _refuses_improved(found: Found) -> str | bool:
    return found["hmc"] and (
        "FLAGS.hmc draws with gen_hmc_image, leapfrog steps without a Metropolis test, which have "
        "no output scale. Turn hmc off and guard gen_image; or guard gen_hmc_image with beta_star "
        'and convention="energy" alone, which leaves the sampler as it is.'
    )


def _refuses_nae(found: Found) -> str:
    own = vars(found["given"])
    if "step_size" not in own or "noise_std" not in own:
        return (
            f"{type(found['given']).__name__} has no step_size and noise_std; expected "
            "EnergyBasedModel of models/energybased.py. The autoencoders of models/nae.py, which "
            "divide the energy by a trained temperature, are not covered."
        )
    is_unset = own["step_size"] is None and own["noise_std"] is None
    return "step_size and noise_std are both None; set one." if is_unset else ""


def _nae(found: Found) -> tuple[float, float]:
    """As its sampler has it: None stands for the other number, so that the scale is 1."""
    step, noise = found["given"].step_size, found["given"].noise_std
    noise = math.sqrt(2 * step) if noise is None else noise
    return (noise**2 / 2 if step is None else step), noise


_JEM = {"p_x": "p_x_weight", "p_x_y": "p_x_y_weight"}
_SGLD = ("sgld_lr", "sgld_std")
_STEP = (_SGLD, lambda found: _langevin(*_sgld(found)))
_CLAMP = {"clamp": (-1.0, 1.0)}

CODEBASES: Mapping[str, Codebase] = {
    # wgrathwohl/JEM, train_wrn_ebm.py (3d01161), and forks that kept its arguments
    "jem": Codebase(
        "JEM's train_wrn_ebm.py",
        reads=(*_JEM.values(), *_SGLD, "save_dir"),
        terms=_JEM,
        folder="save_dir",
        convention="log_density",
        steps="n_steps",
        tells=_STEP,
    ),
    # sndnyang/JEMPP, train_jempp.py (fba6ba5). The step size is that of a whole PYLD step: its
    # inner steps climb one slope, since the first layer is linear and the gradient behind it is
    # held fixed. Not told to the diagnostics, which assume that no gradient is clipped.
    "jempp": Codebase(
        "JEM++'s train_jempp.py",
        lambda s: (max(s["sgld_lr"], 0) + s["in_steps"] * max(s["pyld_lr"], 0), s["sgld_std"]),
        reads=(*_JEM.values(), "sgld_std", "save_dir", "sgld_lr", "pyld_lr", "in_steps"),
        terms=_JEM,
        folder="save_dir",
        convention="log_density",
        steps="n_steps",
        # Noise is added after the clamp.
        tells=(("sgld_std",), lambda found: {} if found["sgld_std"] > 0 else _CLAMP),
    ),
    # sndnyang/SADAJEM, train_sadajem.py (9d8f3c7). SAM has two losses per step, one row.
    "sadajem": Codebase(
        "SADAJEM's train_sadajem.py",
        reads=("px", *_SGLD, "save_dir"),
        terms={"px": "px"},
        folder="save_dir",
        convention="log_density",
        steps="n_steps",
        tells=((), lambda _: _CLAMP),
    ),
    # lhao499/HDGE, train_wrn.py (9f12b3e). It multiplies both terms by the weight of the first;
    # --pxcontrast and --pxycontrast have no samples and stay as they are.
    "hdge": Codebase(
        "HDGE's train_wrn.py",
        reads=(*_SGLD, "log_dir"),
        modes=("pxsgld", "pxysgld", "plot_contrast"),
        refuses=_refuses_hdge,
        terms={"pxsgld": "pxsgld", "pxysgld": "pxysgld"},
        folder="log_dir",
        convention="log_density",
        steps="n_steps",
        tells=_STEP,
    ),
    # wgrathwohl/VERA, train.py (91ff0dd), --jem_baseline. It passes the number of steps by
    # position, so that nothing can change it.
    "vera": Codebase(
        "VERA's train.py",
        reads=(*_SGLD, "save_dir"),
        modes=("jem_baseline", *_OTHER_MODES),
        refuses=_refuses_vera,
        folder="save_dir",
        convention="log_density",
        tells=_STEP,
    ),
    # enijkamp/short_run, train_cifar10_minimal.py (d779e9a): settings(f)
    "short_run": Codebase(
        "short_run's train_cifar10_minimal.py",
        lambda found: (found["step_size"], found["noise_std"]),
        literals={"step_size": 1.0, "noise_std": 1e-2},
    ),
    # point0bar1/ebm-anatomy, train_data.py and train_toy.py (24c819b): settings(config, f). The
    # step ε²/2 is part of the energy.
    "ebm_anatomy": Codebase(
        "ebm-anatomy's trainers",
        lambda found: (1.0, found["given"]["epsilon"]),
        refuses=_refuses_anatomy,
        convention="energy",
    ),
    # rosinality/igebm-pytorch, train.py (3c4f104): settings(step_size)
    "igebm": Codebase(
        "igebm-pytorch's train.py",
        lambda found: (found["given"], found["noise_std"]),
        convention="energy",
        literals={"noise_std": 0.005},
    ),
    # yilundu/improved_contrastive_divergence, train.py (7d3d4ee): settings(FLAGS), and its own
    # difference, a mean over heads. Annealed noise has no one output scale.
    "improved_cd": Codebase(
        "train.py of improved contrastive divergence",
        lambda found: (found["step_lr"], 0.0 if found["anneal"] else found["noise_std"]),
        reads=("hmc", "anneal", "step_lr"),
        modes=("hmc",),
        refuses=_refuses_improved,
        convention="energy",
        literals={"noise_std": 0.001},
    ),
    # swyoon/normalized-autoencoders, models/energybased.py (77e1987): settings(model)
    "nae": Codebase(
        "EnergyBasedModel of normalized autoencoders",
        _nae,
        refuses=_refuses_nae,
        convention="energy",
    ),
}
