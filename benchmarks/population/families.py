"""The population: small training runs of many families, half of which die.

A family fixes data, task, network and sampler; its runs differ in what people tune. The draws are a
function of the family's name and the run's number alone, so that adding a run changes no other.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

RUNS, NEW_RUNS, LONG_RUNS = 16, 18, 8
"""Runs of each family."""
GROUPS = ("first", "new", "last look", "long")


@dataclass(frozen=True)
class Run:
    """The settings of one run.

    Attributes:
        family, number: which run it is.
        data: name of the data, see :mod:`.data`.
        task: "jem" (cross entropy and log p(x)), "ebm" (log p(x)), "joint" (log p(x, y)).
        network, width, activation, norm: see :mod:`.networks`.
        optimizer, lr, warm_up: see :mod:`.trainer`; warm_up in steps.
        sampler: "persistent", "short" (from noise), "annealed", "mala", "data" (from data).
        sgld_steps, step_size, noise_std, clamp: of the sampler.
        beta_star: exponent of the guard, 0 for the standard trainer.
        l2: weight of the mean squared energy in the loss.
        penalty: weight of the mean squared gradient of f between data and negatives.
        prior: whether samples are of exp(f) times a normal density, as of a prior of latents.
        levels: noise levels that f knows of, each three times the one before; of "joint".
        scale: of f, in units of which step sizes and beta_star are.
        schedule: "constant", "cyclic" (four times up and down) or "late" (a thirtieth until 60% of
            the run).
        batch: data and negatives a step.
        steps: length of the run.
    """

    family: str
    number: int
    data: str
    lr: float
    optimizer: str = "adam"
    task: Literal["jem", "ebm", "joint"] = "jem"
    network: str = "mlp"
    width: int = 64
    activation: str = "leaky_relu"
    norm: str = "none"
    warm_up: int = 0
    sampler: str = "persistent"
    sgld_steps: int = 5
    step_size: float = 1.0
    noise_std: float = 0.01
    clamp: float = 0.0
    beta_star: float = 0.0
    l2: float = 0.0
    penalty: float = 0.0
    prior: bool = False
    levels: int = 0
    scale: float = 1.0
    schedule: Literal["constant", "cyclic", "late"] = "constant"
    batch: int = 64
    steps: int = 1000

    @property
    def name(self) -> str:
        return f"{self.family}-{self.number:02d}"

    @property
    def seed(self) -> int:
        return random.Random(self.name).getrandbits(31)

    @property
    def output_scale(self) -> float | None:
        """o of the sampler; None where it draws no noise."""
        return 2 * self.step_size / self.scale / self.noise_std**2 if self.noise_std else None


_LEAKY, _SMOOTH = "leaky_relu", ("silu", "gelu")
_MOSTLY_ZERO = (0.0, 0.0, 0.0, 0.0, 0.5, 2.0)
_ANY = (0.0, 0.0, 0.1, 0.5, 2.0, 10.0)

# A tuple is what a run draws from; anything else holds for the whole family.
FAMILIES: dict[str, dict[str, Any]] = {
    "digits-jem-mlp": {
        "data": "digits", "width": (64, 128), "activation": (_LEAKY, *_SMOOTH),
        "optimizer": ("adam", "adamw"), "lr": (3e-4, 1e-3, 3e-3, 1e-2), "sgld_steps": (2, 5, 10),
        "batch": (16, 64, 128), "beta_star": _MOSTLY_ZERO, "steps": 1200,
    },
    "digits-jem-cnn-sgd": {
        "data": "digits", "network": "cnn", "width": (8, 16), "activation": (_LEAKY, "silu"),
        "optimizer": ("sgd", "momentum"), "lr": (0.03, 0.1, 0.3, 1.0), "sgld_steps": (3, 5, 10),
        "warm_up": (0, 100), "beta_star": _MOSTLY_ZERO,
    },
    "digits-joint-cnn": {
        "data": "digits", "task": "joint", "network": "cnn", "width": (8, 16),
        "activation": (_LEAKY, "gelu"), "lr": (1e-3, 3e-3, 1e-2, 3e-2), "sgld_steps": (2, 5),
        "beta_star": _MOSTLY_ZERO, "batch": (32, 64),
    },
    "digits-noiseless": {
        "data": "digits", "task": ("jem", "ebm"), "network": ("mlp", "cnn"), "width": (16, 64),
        "noise_std": 0.0, "step_size": (0.1, 0.5, 1.0), "lr": (3e-4, 1e-3, 3e-3, 1e-2),
        "sgld_steps": (1, 5, 10), "clamp": (0.0, 1.0), "batch": (32, 64),
    },
    "mnist14-jem-cnn": {
        "data": "mnist14", "network": "cnn", "width": 8, "activation": (_LEAKY, *_SMOOTH),
        "warm_up": (0, 200), "lr": (1e-3, 3e-3, 1e-2, 3e-2), "sgld_steps": (3, 5),
        "batch": (16, 32), "beta_star": _MOSTLY_ZERO, "steps": 800,
    },
    "mnist14-ebm-short": {
        "data": "mnist14", "task": "ebm", "network": "cnn", "width": 8,
        "activation": (_LEAKY, "gelu"), "sampler": "short", "sgld_steps": (10, 20),
        "step_size": (1.0, 3.0), "optimizer": ("adam", "adamw"), "lr": (1e-4, 3e-4, 1e-3, 3e-3),
        "beta_star": (0.0, 0.0, 0.0, 0.5, 2.0), "batch": 16, "steps": 500,
    },
    "mnist28-jem-mlp": {
        "data": "mnist28", "width": (128, 256), "activation": (_LEAKY, "silu"),
        "optimizer": ("adam", "momentum"), "lr": (1e-3, 3e-3, 1e-2, 3e-2),
        "sgld_steps": (3, 10), "beta_star": _MOSTLY_ZERO,
    },
    "mnist28-ebm-norm": {
        "data": "mnist28", "task": "ebm", "network": "cnn", "width": (4, 8),
        "norm": ("spectral", "layer"), "activation": (_LEAKY, "silu"), "l2": (0.0, 0.01, 0.1),
        "step_size": (1.0, 10.0), "lr": (1e-3, 3e-3, 1e-2, 3e-2), "sgld_steps": (3, 5),
        "batch": 16, "clamp": 1.0, "beta_star": _MOSTLY_ZERO, "steps": 500,
    },
    "cifar16-jem-wrn": {
        "data": "cifar16", "network": "wrn", "width": 1, "activation": (_LEAKY, "silu"),
        "warm_up": (0, 100), "optimizer": ("adam", "momentum"), "lr": (1e-3, 3e-3, 1e-2, 3e-2),
        "sgld_steps": (3, 5), "batch": (8, 16), "beta_star": _MOSTLY_ZERO, "steps": 400,
    },
    "cifar16-ebm-cnn": {
        "data": "cifar16", "task": "ebm", "network": "cnn", "width": (8, 16),
        "activation": (_LEAKY, *_SMOOTH), "step_size": (1.0, 10.0), "noise_std": (0.005, 0.001),
        "l2": (0.0, 0.1), "lr": (3e-4, 1e-3, 3e-3, 1e-2), "sgld_steps": (5, 10), "batch": 16,
        "clamp": 1.0, "beta_star": (0.0, 0.0, 0.0, 0.5, 2.0), "steps": 600,
    },
    "toy-langevin": {
        "data": ("gaussians", "circles", "moons"), "task": "ebm", "width": (64, 128),
        "activation": (_LEAKY, "silu"), "step_size": 0.02, "noise_std": 0.2,
        "sgld_steps": (1, 5, 10), "lr": (1e-3, 1e-2, 3e-2, 0.1), "batch": (64, 256),
        "beta_star": (0.0, 0.0, 0.2, 0.5, 0.9), "l2": (0.0, 0.0, 0.01), "steps": 1500,
    },
    "toy-mala": {
        "data": ("gaussians", "circles", "moons"), "task": "ebm", "width": (32, 128),
        "sampler": "mala", "step_size": (0.02, 0.125), "noise_std": (0.2, 0.5),
        "sgld_steps": (2, 10), "optimizer": ("adam", "momentum"), "lr": (1e-3, 1e-2, 3e-2, 0.1),
        "activation": (_LEAKY, "silu"), "batch": 128, "steps": 1500,
    },
    "tabular-jem": {
        "data": ("wine", "breast_cancer", "iris"), "width": (32, 64), "clamp": (0.0, 4.0),
        "activation": (_LEAKY, *_SMOOTH), "norm": ("none", "layer"), "optimizer": ("adam", "sgd"),
        "step_size": (0.1, 1.0), "lr": (1e-3, 1e-2, 3e-2, 0.1), "sgld_steps": (1, 3, 10),
        "batch": (8, 32), "beta_star": _ANY, "steps": 1500,
    },
    "tabular-ebm-cd": {
        "data": ("wine", "breast_cancer", "iris"), "task": "ebm", "width": (32, 64),
        "sampler": "data", "activation": (_LEAKY, "gelu"), "step_size": (0.01, 0.1),
        "noise_std": (0.03, 0.1), "optimizer": ("adam", "momentum"), "sgld_steps": (1, 5, 20),
        "lr": (3e-3, 1e-2, 3e-2, 0.1), "batch": 32, "beta_star": (0.0, 0.0, 0.5, 2.0),
        "steps": 1500,
    },
}  # fmt: skip

# What the later runs of a family draw from instead: more of them die.
MILD_RUNS = 4
HARSHER: dict[str, dict[str, Any]] = {
    "digits-jem-cnn-sgd": {"lr": (0.1, 0.3, 0.6, 1.0), "sgld_steps": (2, 3, 5)},
    "digits-joint-cnn": {
        "lr": (3e-3, 1e-2, 3e-2, 0.1), "optimizer": ("adam", "momentum"), "sgld_steps": (1, 2),
        "beta_star": (0.0, 0.0, 0.0, 0.5),
    },
    "digits-noiseless": {"lr": (1e-3, 3e-3, 1e-2, 3e-2), "clamp": 0.0, "step_size": (0.5, 1.0)},
    "mnist14-ebm-short": {"lr": (1e-3, 3e-3, 1e-2, 3e-2), "beta_star": (0.0, 0.0, 0.0, 0.5)},
    "mnist28-ebm-norm": {
        "norm": ("none", "layer", "spectral"), "l2": (0.0, 0.0, 0.01), "clamp": (0.0, 1.0),
    },
    "cifar16-ebm-cnn": {"lr": (1e-3, 3e-3, 1e-2, 3e-2), "l2": 0.0, "clamp": 0.0},
    "toy-langevin": {
        "optimizer": ("adam", "momentum"), "lr": (0.01, 0.03, 0.1, 0.3), "l2": 0.0,
        "beta_star": (0.0, 0.0, 0.0, 0.5), "sgld_steps": (1, 5),
    },
    "toy-mala": {"lr": (1e-2, 3e-2, 0.1, 0.3)},
    "tabular-jem": {
        "norm": "none", "step_size": 1.0, "lr": (3e-3, 1e-2, 3e-2, 0.1), "clamp": 0.0,
        "sgld_steps": (1, 3), "beta_star": (0.0, 0.0, 0.0, 0.5, 2.0),
    },
    "tabular-ebm-cd": {
        "step_size": (0.1, 1.0), "lr": (0.01, 0.03, 0.1, 0.3), "sgld_steps": (1, 5),
        "beta_star": (0.0, 0.0, 0.0, 0.5),
    },
}  # fmt: skip

# Made and looked at when all choices had been made on the families above.
LAST_FAMILIES: dict[str, dict[str, Any]] = {
    "cifar12-joint-residual": {
        "data": "cifar12", "task": "joint", "network": "residual", "width": (64, 128),
        "activation": ("elu", "softplus", "relu"), "norm": ("none", "layer"),
        "optimizer": ("rmsprop", "adamw"), "lr": (3e-4, 1e-3, 3e-3, 1e-2), "warm_up": (0, 50),
        "step_size": (1.0, 4.0), "noise_std": (0.01, 0.03), "sgld_steps": (2, 5, 10),
        "batch": (16, 64), "beta_star": (0.0, 0.0, 0.0, 0.5, 2.0), "steps": 800,
    },
    "mnist14-ebm-annealed": {
        "data": "mnist14", "task": "ebm", "network": "cnn", "width": (4, 8), "sampler": "annealed",
        "activation": ("elu", "softplus", "silu"), "optimizer": ("momentum", "adam", "rmsprop"),
        "lr": (3e-4, 1e-3, 3e-3, 1e-2), "step_size": (1.0, 5.0), "l2": (0.0, 0.0, 0.001),
        "noise_std": (0.005, 0.02), "sgld_steps": (5, 10), "batch": (16, 32),
        "beta_star": (0.0, 0.0, 0.0, 0.5, 2.0), "steps": 600,
    },
}  # fmt: skip


# Of other kinds, recorded when the definitions of fates.py stood and before rules were changed for
# them; the rules of a run's day judged them once unseen.
NEW_FAMILIES: dict[str, dict[str, Any]] = {
    "waves-gru": {
        "data": "waves", "task": ("ebm", "jem"), "network": "gru", "width": (16, 32),
        "activation": ("relu", "silu"), "optimizer": ("adam", "rmsprop"),
        "lr": (1e-3, 3e-3, 1e-2, 3e-2), "sgld_steps": (2, 4), "batch": 32,
        "beta_star": (0.0, 0.0, 0.0, 0.5), "steps": 450,
    },
    "digits-tiny-batch": {
        "data": "digits", "task": ("ebm", "jem"), "network": ("mlp", "cnn"), "width": (16, 32),
        "activation": ("relu", _LEAKY, "elu"), "optimizer": ("momentum", "sgd"),
        "lr": (1e-2, 3e-2, 0.1, 0.3), "batch": (2, 3, 4), "sgld_steps": (2, 5),
        "beta_star": (0.0, 0.0, 0.0, 0.5), "steps": 1000,
    },
    "noise-levels": {
        "data": "mnist14", "task": "joint", "network": "cnn", "width": 4, "levels": 4,
        "sampler": ("persistent", "annealed"), "noise_std": (0.0, 0.01), "sgld_steps": (3, 6),
        "activation": ("elu", "silu", "relu"), "optimizer": ("adam", "adamw"),
        "lr": (1e-3, 3e-3, 1e-2, 3e-2), "batch": (16, 32), "steps": 450,
    },
    "latent-prior": {
        "data": "mnist-latents", "task": "ebm", "prior": True, "width": (32, 128),
        "sampler": ("short", "persistent"), "step_size": (0.02, 0.08), "noise_std": 0.2,
        "sgld_steps": (2, 5, 10), "activation": ("relu", "softplus", "gelu"),
        "optimizer": ("adam", "momentum"), "lr": (1e-3, 1e-2, 3e-2, 0.1), "batch": 64,
        "beta_star": (0.0, 0.0, 0.0, 0.5), "l2": (0.0, 0.0, 0.1), "steps": 700,
    },
    "energy-scales": {
        "data": ("digits", "wine", "circles"), "task": "ebm", "scale": (1e-3, 1e3),
        "activation": ("relu", "silu"), "sampler": ("persistent", "data"), "width": (32, 64),
        "step_size": (0.02, 0.2), "noise_std": (0.0, 0.1), "sgld_steps": (3, 10),
        "lr": (1e-3, 3e-3, 1e-2, 3e-2), "batch": 32, "steps": 800,
    },
    "cyclic-rates": {
        "data": ("digits", "mnist14"), "task": ("ebm", "jem"), "network": "cnn", "width": 8,
        "schedule": ("cyclic", "late"), "optimizer": ("adam", "momentum"), "sgld_steps": (3, 5),
        "activation": ("relu", "gelu"), "lr": (1e-3, 3e-3, 1e-2, 3e-2), "batch": 32,
        "beta_star": (0.0, 0.0, 0.0, 2.0), "steps": 600,
    },
}  # fmt: skip

# Drawn and recorded with these, and judged once, when the rules were done.
LAST_LOOK: dict[str, dict[str, Any]] = {
    "sets-lion": {
        "data": "sets", "task": ("ebm", "jem"), "network": "set", "width": (32, 64),
        "activation": ("relu", "silu"), "optimizer": ("lion", "sign"), "sgld_steps": (3, 8),
        "lr": (3e-4, 1e-3, 3e-3, 1e-2), "batch": (16, 64), "step_size": (0.5, 1.0),
        "beta_star": (0.0, 0.0, 0.0, 0.5), "steps": 800,
    },
    "penalised-mala": {
        "data": ("breast_cancer", "moons", "digits"), "task": "ebm", "penalty": (1e-3, 0.03, 1.0),
        "l2": (0.0, 0.0, 0.1), "activation": ("softplus", "silu"), "sampler": ("mala", "annealed"),
        "step_size": (0.02, 0.08), "noise_std": 0.2, "sgld_steps": (2, 5), "width": (32, 64),
        "optimizer": ("adam", "momentum"), "lr": (1e-3, 1e-2, 3e-2, 0.1), "batch": (8, 64),
        "steps": 800,
    },
}  # fmt: skip

# As HARSHER, from the run NEW_MILD on.
NEW_MILD = 12
NEW_HARSHER: dict[str, dict[str, Any]] = {
    "waves-gru": {
        "lr": (1e-2, 3e-2, 0.1), "sgld_steps": (1, 2), "step_size": (1.0, 3.0), "beta_star": 0.0,
    },
    "digits-tiny-batch": {"lr": (1e-2, 3e-2, 0.1), "sgld_steps": (1, 2), "beta_star": 0.0},
    "noise-levels": {"lr": (3e-3, 1e-2, 3e-2), "sgld_steps": (1, 3), "step_size": (1.0, 3.0)},
    "latent-prior": {"lr": (3e-2, 0.1, 0.3), "sgld_steps": 2, "l2": 0.0, "beta_star": 0.0},
    "energy-scales": {
        "lr": (1e-2, 3e-2, 0.1), "step_size": 1.0, "noise_std": (0.0, 0.01), "sgld_steps": (1, 3),
        "sampler": "persistent",
    },
    "cyclic-rates": {"lr": (1e-2, 3e-2, 0.1), "sgld_steps": (1, 3), "beta_star": 0.0},
    "sets-lion": {"lr": (1e-3, 3e-3, 1e-2), "sgld_steps": (1, 3), "beta_star": 0.0},
    "penalised-mala": {
        "lr": (1e-2, 3e-2, 0.1, 0.3), "penalty": (0.0, 1e-3), "l2": 0.0, "sgld_steps": (1, 2),
    },
}  # fmt: skip

# A small network at beta* 0.5 and o = 1, long enough to limp along.
LONG: dict[str, dict[str, Any]] = {
    "long-beta": {
        "data": ("digits", "breast_cancer", "mnist-latents"), "task": "ebm", "width": 32,
        "activation": (_LEAKY, "silu"), "step_size": 0.02, "noise_std": 0.2,
        "sgld_steps": (2, 5), "lr": (1e-3, 3e-3), "batch": 32, "beta_star": 0.5, "steps": 4000,
    },
}  # fmt: skip


KINDS = FAMILIES | LAST_FAMILIES | NEW_FAMILIES | LAST_LOOK | LONG


def group_of(name: str) -> list[Run]:
    """The runs of one of :data:`GROUPS`."""
    families, runs = {
        "first": (FAMILIES | LAST_FAMILIES, RUNS),
        "new": (NEW_FAMILIES, NEW_RUNS),
        "last look": (LAST_LOOK, NEW_RUNS),
        "long": (LONG, LONG_RUNS),
    }[name]
    return population(families, runs)


def population(families: dict[str, dict[str, Any]] = FAMILIES, runs: int = RUNS) -> list[Run]:
    """All runs, family by family."""
    found = []
    for family, axes in families.items():
        for number in range(runs):
            draw = random.Random(f"{family} {number}")
            if number >= (NEW_MILD if family in NEW_HARSHER else MILD_RUNS):
                axes = axes | (HARSHER | NEW_HARSHER).get(family, {})
            drawn = {
                name: draw.choice(each) if isinstance(each, tuple) else each
                for name, each in axes.items()
            }
            found.append(Run(family=family, number=number, **drawn))
    return found
