"""One table: what each codebase is to the conformance suite; those without an adapter last."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ebmguard.adapters import hdge, jem, jempp, sadajem, vera
from tests.adapters import ebm_trainers, jem_family, structures
from tests.parts import gradients
from tests.runs import Call, Run

__all__ = ["CODEBASES", "Codebase", "Options"]

Options = dict[str, Any]


@dataclass(frozen=True)
class Codebase:
    """A codebase: its loop, and what its adapter should make of it.

    Attributes:
        train: the codebase's own loop, or the retrofitted one.
        off: options of runs that must not change at β* = 0.
        on: β* and options of runs whose gradients are checked.
        tempered: β*, options, and the factor 1 - β*/o of the sampler; 1 leaves it as it is.
        settings: the adapter's, after changes of the codebase's own; empty where there is none.
        told: changes, and what it says after them.
        refused: changes, and what is said to them.
        sign: -1 where energies are low on data.
        factor: of the guarded loss in the trainer's total; ``terms`` are the rest of it.
    """

    train: Callable[..., Run]
    off: tuple[Options, ...]
    on: tuple[tuple[float, Options], ...]
    tempered: tuple[tuple[float, Options, float], ...]
    settings: Callable[..., Options] = dict
    told: tuple[tuple[Options, Options], ...] = ()
    refused: tuple[tuple[Options, str], ...] = ()
    sign: int = 1
    factor: Callable[[Options], float] = lambda options: 1.0
    terms: Callable[[Tensor, Tensor], Any] = lambda f_pos, f_neg: 0.0

    def expected(self, call: Call, beta_star: float, options: Options) -> tuple[Tensor, ...]:
        """The gradient of the trainer's total with respect to its energies; heads are summed."""
        leaves = [f.detach().clone().requires_grad_() for f in (call.f_pos, call.f_neg)]
        f_pos, f_neg = (self.sign * f.reshape(len(f), -1).sum(1) for f in leaves)
        to_pos, to_neg = gradients(f_pos, f_neg, beta_star, call.groups)
        guarded = (call.weight * to_pos * f_pos).sum() + (call.weight * to_neg * f_neg).sum()
        total = self.factor(options) * guarded + self.terms(*leaves)
        return torch.autograd.grad(total, leaves)


def by_arguments(adapter: Any, defaults: Options) -> Callable[..., Options]:
    """The adapter's function of a script's arguments."""
    return lambda term=(), **changes: adapter.settings(Namespace(**defaults | changes), *term)


def squares(f_pos: Tensor, f_neg: Tensor) -> Tensor:
    """The L2 term on energies."""
    return f_pos.square().mean() + f_neg.square().mean()


LANGEVIN = {"step_size": 1.0, "noise_std": 1e-2}
FOLDER = {"log_dir": "run/ebmguard"}
STEPS = FOLDER | {"sgld_steps": 3, "steps_argument": "n_steps"}
CLAMPED = {"clamp": (-1.0, 1.0)} | STEPS

CODEBASES = {
    "jem": Codebase(
        jem_family.train_jem,
        off=({}, {"class_cond_p_x_sample": True}, {"p_x_y_weight": 0.5}, {"sgld_std": 0.0}),
        on=((2.0, {"sgld_std": 0.5}), (1.0, {"p_x_y_weight": 1.0})),
        # o = 2 · 1 / 0.5² = 8
        tempered=((2.0, {"sgld_std": 0.5}, 0.75), (0.5, {"sgld_std": 0.0}, 1.0)),
        settings=by_arguments(jem, jem_family.JEM),
        told=(({}, LANGEVIN | STEPS), ({"sgld_std": 0.0}, STEPS)),
        refused=(
            (
                {"p_x_y_weight": 1.0},
                r"term=None.*: p_x, p_x_y\. .*settings\(args, 'p_x'\), settings\(args, 'p_x_y'\),",
            ),
            ({"p_x_weight": 0.0, "p_x_y_weight": 1.0}, r"each: settings\(args, 'p_x_y'\),"),
            (
                {"p_x_weight": 0.0},
                r"term=None: of the terms p_x, p_x_y.*: none\. Give one a weight",
            ),
            ({"term": ("p_x_y",)}, r"term='p_x_y'.*: p_x\. .*each: settings\(args, 'p_x'\),"),
            ({"term": ("p_y",)}, "term='p_y': of the terms p_x, p_x_y"),
            ({"save_dir": None}, "save_dir is missing or None"),
            (
                dict.fromkeys(jem_family.JEM),  # another script's
                "p_x_weight, p_x_y_weight, sgld_lr, sgld_std, n_steps, save_dir is",
            ),
        ),
    ),
    "jempp": Codebase(
        jem_family.train_jempp,
        off=(
            {"plc": "alltrain1"},
            {"plc": "alltrain2"},
            {"plc": "eval"},
            {"in_steps": 0, "sgld_lr": 1.0, "sgld_std": 1e-2},
            {"sgld_lr": 0.5, "sgld_std": 1e-2},
        ),
        on=((2.0, {"plc": "alltrain1"}), (2.0, {"plc": "alltrain2"}), (2.0, {"plc": "eval"})),
        tempered=((2.0, {}, 1.0), (1.0, {"sgld_std": 0.5}, 1.0)),  # the first call is measured
        settings=by_arguments(jempp, jem_family.JEMPP),
        told=(({}, CLAMPED), ({"sgld_std": 0.01}, STEPS)),
        refused=(
            ({"p_x_weight": 0.0}, "none. Give one a weight"),
            ({"p_x_y_weight": 1.0}, "term=None.*: p_x, p_x_y. Make"),
            ({"sgld_std": None}, "sgld_std is missing or None"),
        ),
    ),
    "sadajem": Codebase(
        jem_family.train_sadajem,
        off=({}, {"l2_coeff": 0.1}, {"sgld_std": 1e-2}),
        on=((2.0, {}),),
        # o = 2 · 1 / 0.1² = 200
        tempered=((2.0, {}, 1.0), (50.0, {"sgld_std": 0.1}, 0.75)),
        settings=by_arguments(sadajem, jem_family.SADAJEM),
        told=(({}, CLAMPED), ({"sgld_std": 1e-2}, LANGEVIN | STEPS)),
        refused=(
            ({"px": 0.0}, "term=None: of the terms px .*none. Give one"),
            ({"save_dir": None}, "save_dir is missing or None"),
        ),
    ),
    "hdge": Codebase(
        jem_family.train_hdge,
        off=({}, {"pxysgld": 1.0}),
        on=((2.0, {"sgld_std": 0.5}), (2.0, {"pxysgld": 1.0, "pxsgld": 0.5})),
        tempered=((2.0, {"sgld_std": 0.5}, 0.75), (2.0, {"sgld_std": 0.0}, 1.0)),
        settings=by_arguments(hdge, jem_family.HDGE),
        told=(({}, LANGEVIN | STEPS), ({"sgld_std": 0.0}, STEPS)),
        refused=(
            ({"pxsgld": 0.0}, "none. Give one a weight"),
            ({"pxysgld": 1.0}, "term=None.*: pxsgld, pxysgld. Make"),
            ({"log_dir": None}, "log_dir is missing or None"),
            ({"plot_contrast": 1}, r"--plot_contrast.*f\.joint.*Leave it out"),
        ),
        factor=lambda options: options.get("pxsgld", 1.0),
    ),
    "vera": Codebase(
        jem_family.train_vera,
        off=({}, {"jem": False}, {"sgld_std": 0.0}),
        on=((0.5, {"pg_control": 0.0}), (0.5, {"pg_control": 0.0, "jem": False})),
        # The step size is half the squared noise, so that o is 1.
        tempered=((0.5, {}, 0.5), (0.5, {"jem": False}, 0.5), (0.5, {"sgld_std": 0.0}, 1.0)),
        settings=by_arguments(vera, jem_family.VERA),
        told=(({}, {"step_size": 5e-5, "noise_std": 1e-2} | FOLDER),),
        refused=(
            ({"jem_baseline": False}, r"Without --jem_baseline.*generator.*Add --jem_baseline"),
            ({"vat": True}, "--vat trains without contrastive samples"),
            ({"clf_only": True}, "--clf_only trains without"),
            ({"maximum_likelihood": True, "jem_baseline": False}, "--maximum_likelihood"),
            ({"ssm": True}, "--ssm"),
            ({"sgld_lr": None}, "sgld_lr is missing or None"),
        ),
        terms=lambda ld, lg: 0.01 * ld.square().mean(),
    ),
    "ebm_anatomy": Codebase(
        ebm_trainers.train_ebm_anatomy,
        off=({}, {"epsilon": 0}),
        on=((2.0, {"epsilon": 0.1}), (2.0, {"epsilon": 0})),
        # β = β* ε²/2
        tempered=(
            (2.0, {}, 1 - 1e-4),
            (0.5, {"epsilon": 1.0}, 0.75),
            (0.5, {"epsilon": 0}, 1.0),
        ),
        sign=-1,
        factor=lambda options: 2 / options["epsilon"] ** 2 if options["epsilon"] else 1.0,
    ),
    "igebm": Codebase(
        ebm_trainers.train_igebm,
        # The gradient of the one number inside the mean is a sum of B copies of 1/B: 1 in float32
        # where B is a power of two, but not for every B, which is why the docs add it outside.
        off=({}, {"inside": True}),
        on=((2.0, {}), (2.0, {"inside": True})),
        # β = 0.5 / (2 · 10 / 2²) = 0.1, and no entry of the gradient reaches this clip
        tempered=((0.5, {"noise_std": 2.0, "clip": 1e3}, 0.9),),
        sign=-1,
        terms=squares,
    ),
    "improved_cd": Codebase(
        ebm_trainers.train_improved_cd,
        off=({},),
        on=((1.0, {}), (8.0, {})),
        tempered=((0.5, {"noise_std": 1.0}, 0.5),),  # β = 0.5 / (2 · 0.5 / 1²)
        sign=-1,
        factor=lambda options: 1 / 3,  # the trainer's mean over heads
        terms=squares,
    ),
    "recovery": Codebase(
        structures.train_recovery,
        off=({}, {"noise_scale": 0.0}),
        on=((4.0, {}), (200.0, {})),
        tempered=((200.0, {}, 0.5),),  # o = 1 / (0.04 · 0.25²) = 400 at the lowest level
    ),
    "cooperative recovery": Codebase(
        partial(structures.train_recovery, is_cooperative=True),
        off=({},),
        on=((4.0, {}), (200.0, {})),
        tempered=((200.0, {}, 0.5),),
    ),
    "energy matching": Codebase(
        structures.train_energy_matching,
        off=({},),
        on=((0.5, {}),),
        tempered=((0.5, {}, 0.75),),  # o = 1 / 0.5 at the end of all chains
        sign=-1,
        factor=lambda options: 2.0,
    ),
    "ebmkit": Codebase(
        structures.train_ebmkit, off=({},), on=((0.5, {}),), tempered=((0.5, {}, 0.5),), sign=-1
    ),
    "method": Codebase(
        structures.train_method,
        off=({},),
        on=((2.0, {"noise_std": 0.5}),),
        # o = 2 · 1 / 0.5² = 8
        tempered=((2.0, {"noise_std": 0.5}, 0.75),),
        sign=-1,
    ),
    "latent": Codebase(
        structures.train_latent,
        off=({},),
        on=((0.5, {}),),
        tempered=((0.5, {}, 0.5),),
        sign=-1,
    ),
    "gwg": Codebase(
        structures.train_gwg,
        off=({},),
        on=((0.5, {}),),
        tempered=((0.5, {"gain": 10.0}, 0.5),),
        terms=lambda real, fake: 0.01 * squares(real, fake),
    ),
}
