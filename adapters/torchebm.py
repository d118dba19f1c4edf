"""torchebm: contrastive divergence whose loss class owns the sampler, guarded in one changed line.

    -cd = ContrastiveDivergence(model=energy, sampler=sampler, k_steps=10)
    +cd = GuardedContrastiveDivergence(model=energy, sampler=sampler, k_steps=10)

LangevinDynamics has the output scale 1 / noise_scale², both HMCs 1. What has no noise, or is not
known, is tempered only with ``output_scale=`` or ``sampler_scale=``.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ebmguard import Guard, guard
from ebmguard.adapters._requires import requires
from ebmguard.errors import ConfigError

with requires("torchebm", extra="torchebm"):
    from torchebm.core import BaseModel, ConstantScheduler
    from torchebm.integrators import EulerMaruyamaIntegrator
    from torchebm.losses import ContrastiveDivergence
    from torchebm.samplers import (
        FlowSampler,
        HamiltonianMonteCarlo,
        LangevinDynamics,
        RiemannianManifoldHMC,
    )

__all__ = ["GuardedContrastiveDivergence"]

# What this class knows of torchebm, and says to the guard itself.
_KNOWN = {"loss_fn", "sampler", "model", "methods", "convention", "reduce"}
_GUARDS = (
    inspect.signature(guard).parameters.keys()
    - _KNOWN
    - inspect.signature(ContrastiveDivergence).parameters.keys()
)


class GuardedContrastiveDivergence(ContrastiveDivergence):
    """``torchebm.losses.ContrastiveDivergence`` with the guard's loss, sampler and alarm.

    Calls, results, replay buffer and ``state_dict`` are those of the class that it replaces; at
    β* = 0 so is every bit. The L2 term on the energies stays outside the guarded loss. A loss that
    is not finite is still returned as torchebm's constant 0.1, but the guard has seen the energies
    before: ``nonfinite`` fires, ``action="raise"`` raises, and the row has the true ``loss``.

    Integer class labels, ``cd(x, y=labels)``, become groups: every positive is set against the
    negatives of its own class.

    Args:
        *args, **kwargs: those of ``ContrastiveDivergence``, and those of :func:`ebmguard.guard`
            (``beta_star``, ``log_dir``, ``action``, ...) except its loss, sampler, model and
            convention. Unless given, the output scale is read from the sampler.

    Attributes:
        guard: the guard. ``cd.guard.attach(optimizer=...)`` makes a step the optimizer's.
        sampler: the sampler as the loss uses it, tempered; ``cd.sampler.original`` is the plain
            one.

    Raises:
        ConfigError: a sampler without an energy, a noise scale on a schedule without
            ``output_scale=``, or a model whose own ``gradient()`` the tempering would not reach.
    """

    guard: Guard

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = {name: kwargs.pop(name) for name in _GUARDS & kwargs.keys()}
        super().__init__(*args, **kwargs)
        sampler: Any = self._modules["sampler"]
        model = getattr(sampler, "model", self.model)
        self._is_standard = settings.get("beta_star") == 0
        self.guard = guard(
            None,
            sampler,
            methods=("sample",),
            model=model,
            convention="energy",
            **_with_output_scale(settings, sampler, model, is_standard=self._is_standard),
        )
        known = _steps(sampler)
        self.guard.attach(**{name: known[name] for name in known.keys() - settings.keys()})

    @property
    def sampler(self) -> Any:
        """The guarded sampler. The module behind it stays registered under this name."""
        return self.guard.sampler

    def initialize_buffer(self, *args: Any, **kwargs: Any) -> Any:
        """As in torchebm: fills the buffer. No training step, so untempered and not recorded."""
        with self.guard.paused():
            return super().initialize_buffer(*args, **kwargs)

    def compute_loss(
        self,
        x: Tensor,
        pred_x: Tensor,
        *args: Any,
        model_kwargs: dict[str, Any] | None = None,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The guarded loss of both batches, with torchebm's noise, L2 term and fallback around it.

        Raises:
            ConfigError: conditions that are no class labels, with β* other than 0.
            EbmguardError: as :meth:`ebmguard.Guard.loss`.
        """
        options = {name: kwargs.get(name, getattr(self, name)) for name in self._CD_OPTION_KEYS}
        conditions = model_kwargs or {}
        groups = self._groups(conditions)
        x, pred_x = x.to(self.device, self.dtype), pred_x.to(self.device, self.dtype)
        with torch.enable_grad():
            if options["add_noise_to_real"]:
                x = x + options["noise_scale"] * torch.randn_like(x, generator=generator)
            energy, pred_energy = self.model(x, **conditions), self.model(pred_x, **conditions)
        loss = self.guard.loss(energy, pred_energy, groups)
        if options["energy_reg_weight"] > 0:
            size = torch.mean(energy**2) + torch.mean(pred_energy**2)
            loss = loss + options["energy_reg_weight"] * size
        return torch.where(torch.isfinite(loss), loss, torch.full_like(loss, 0.1))

    def _groups(self, conditions: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
        labels = conditions.get("y")
        if not conditions:
            return None
        if len(conditions) == 1 and isinstance(labels, Tensor) and _are_labels(labels):
            return labels, labels
        if self._is_standard:
            return None
        raise ConfigError(
            f"The energies are conditional on {', '.join(conditions)}, and not on integer class "
            "labels alone. Each condition has a normaliser of its own, so that energies of "
            "different ones cannot be weighed against each other. Pass y= with one integer label "
            "per sample, or beta_star=0."
        )


def _with_output_scale(
    settings: dict[str, Any], sampler: Any, model: Any, *, is_standard: bool
) -> dict[str, Any]:
    """The guard's settings with the sampler's output scale, where they do not say it."""
    if isinstance(sampler, FlowSampler):
        raise ConfigError(
            "A FlowSampler follows a velocity field and knows no energy that could be tempered or "
            "weighed. Use LangevinDynamics or HamiltonianMonteCarlo."
        )
    if not {"output_scale", "step_size", "noise_std"} & settings.keys():
        settings = {**settings, "output_scale": _output_scale(sampler)}
    is_tempered = any(
        settings.get(name) is not None for name in ("output_scale", "step_size", "sampler_scale")
    )
    # A Riemannian sampler differentiates the energy itself.
    by_model = not isinstance(sampler, RiemannianManifoldHMC)
    if is_tempered and by_model and _has_own_gradient(model):
        if is_standard:
            return {**settings, "output_scale": None}
        raise ConfigError(
            f"{type(model).__name__} has a gradient() of its own, which the sampler follows and a "
            "factor on forward() does not reach: the sampler would run on the untempered energy. "
            "Remove that method, and torchebm differentiates forward(); or pass beta_star=0."
        )
    return settings


def _output_scale(sampler: Any) -> float | None:
    if isinstance(sampler, HamiltonianMonteCarlo | RiemannianManifoldHMC):
        return 1.0
    if not isinstance(sampler, LangevinDynamics):
        return None
    noise_scale = _constant(sampler, "noise_scale")
    if noise_scale is None:
        raise ConfigError(
            "The sampler's noise_scale is on a schedule, so that the output scale 1 / noise_scale² "
            "changes from one Langevin step to the next. Pass output_scale=, that of the last "
            "steps of a call, or give the sampler one noise_scale."
        )
    return 1 / noise_scale**2


def _steps(sampler: Any) -> dict[str, Any]:
    """What the guard can be told of a Langevin sampler's steps."""
    if not isinstance(sampler, LangevinDynamics):
        return {}
    known: dict[str, Any] = {"clamp": sampler.clamp}
    step_size, noise_scale = _constant(sampler, "step_size"), _constant(sampler, "noise_scale")
    is_plain = isinstance(sampler.integrator, EulerMaruyamaIntegrator)
    if is_plain and step_size is not None and noise_scale is not None:
        known |= {"step_size": step_size, "noise_std": noise_scale * (2 * step_size) ** 0.5}
    return known


def _constant(sampler: Any, name: str) -> float | None:
    """The value of a sampler's setting; None where it is on a schedule."""
    schedule = sampler.schedulers[name]
    return float(schedule.get_value()) if isinstance(schedule, ConstantScheduler) else None


def _has_own_gradient(model: Any) -> bool:
    gradient = getattr(model, "gradient", None)
    return gradient is not None and getattr(gradient, "__func__", None) is not BaseModel.gradient


def _are_labels(y: Tensor) -> bool:
    return y.ndim == 1 and not (y.is_floating_point() or y.is_complex())
