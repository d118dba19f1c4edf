"""torchebm: contrastive divergence whose loss class owns the sampler, guarded in one changed line.

    -cd = ContrastiveDivergence(model=energy, sampler=sampler, k_steps=10)
    +cd = GuardedContrastiveDivergence(model=energy, sampler=sampler, k_steps=10)

LangevinDynamics has the output scale 1 / noise_scale², both HMCs 1. What has no noise, or none on
one scale, is tempered only with ``output_scale=`` or ``sampler_scale=``.
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
    from torchebm.samplers import HamiltonianMonteCarlo, LangevinDynamics, RiemannianManifoldHMC

__all__ = ["GuardedContrastiveDivergence"]

# Keywords of the guard, but for those that this class passes itself.
_GUARDS = (
    inspect.signature(guard).parameters.keys()
    - {"loss_fn", "methods", "convention"}
    - inspect.signature(ContrastiveDivergence).parameters.keys()
)


class GuardedContrastiveDivergence(ContrastiveDivergence):
    """``torchebm.losses.ContrastiveDivergence`` with the guard's loss, sampler and alarm.

    Calls, results, replay buffer and ``state_dict`` are those of the class that it replaces; at
    β* = 0 so is every bit. The L2 term on the energies stays outside the guarded loss. A loss that
    is not finite is still returned as torchebm's constant 0.1, but the guard has seen the energies
    before: ``nonfinite`` fires, ``action="raise"`` raises, and the row has the true ``loss``.

    Integer class labels, ``cd(x, y=labels)``, become groups: every positive is set against the
    negatives of its class.

    Args:
        *args, **kwargs: those of ``ContrastiveDivergence``, and those of :func:`ebmguard.guard`
            (``beta_star``, ``log_dir``, ``action``, ...) except its loss, sampler, model and
            convention. Unless given, the output scale is read from the sampler.

    Attributes:
        guard: the guard. ``cd.guard.attach(optimizer=...)`` makes a step the optimizer's.
        sampler: the sampler as the loss uses it, tempered; ``cd.sampler.original`` is the plain
            one.

    Raises:
        ConfigError: a model with a ``gradient()`` that the tempering would not reach.
    """

    guard: Guard

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = {name: kwargs.pop(name) for name in _GUARDS & kwargs.keys()}
        super().__init__(*args, **kwargs)
        sampler: Any = self._modules["sampler"]
        model = getattr(sampler, "model", self.model)
        self._is_standard = settings.get("beta_star") == 0
        settings = _sampler_settings(sampler) | settings
        is_tempered = settings.keys() & {"output_scale", "step_size", "sampler_scale"}
        # A Riemannian sampler differentiates the energy itself.
        by_model = is_tempered and not isinstance(sampler, RiemannianManifoldHMC)
        gradient = getattr(model, "gradient", None)
        overrides = getattr(gradient, "__func__", gradient) not in (None, BaseModel.gradient)
        if by_model and overrides and not self._is_standard:
            raise ConfigError(
                f"{type(model).__name__} has a gradient() of its own, which the sampler follows "
                "and a factor on forward() does not reach: the sampler would run on the untempered "
                "energy. Remove that method, and torchebm differentiates forward(); or pass "
                "beta_star=0."
            )
        self.guard = guard(
            None, sampler, methods=("sample",), model=model, convention="energy", **settings
        )

    @property
    def sampler(self) -> Any:
        """The guarded sampler. The module behind it stays registered under this name."""
        return self.guard.sampler

    def initialize_buffer(self, *args: Any, **kwargs: Any) -> Any:
        """Fill the buffer as torchebm does, without tempering and records: it is no training."""
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
        """Compute the guarded loss of both batches, with torchebm's noise, L2 term and fallback.

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
        labels: Any = conditions.get("y")
        if not conditions:
            return None
        is_one = len(conditions) == 1 and isinstance(labels, Tensor) and labels.ndim == 1
        if is_one and not (labels.is_floating_point() or labels.is_complex()):
            return labels, labels
        if self._is_standard:
            return None
        raise ConfigError(
            f"The energies are conditional on {', '.join(conditions)}, and not on integer class "
            "labels alone. Each condition has a normaliser of its own, so that energies of "
            "different ones cannot be weighed against each other. Pass y= with one integer label "
            "per sample, or beta_star=0."
        )


def _sampler_settings(sampler: Any) -> dict[str, Any]:
    """Return the sampler's constant settings; the guard measures the rest, such as a schedule."""
    if isinstance(sampler, HamiltonianMonteCarlo | RiemannianManifoldHMC):
        return {"output_scale": 1.0}
    if not isinstance(sampler, LangevinDynamics):
        return {}
    known: dict[str, Any] = {"clamp": sampler.clamp}
    schedules = [sampler.schedulers[name] for name in ("step_size", "noise_scale")]
    if not all(isinstance(scheduler, ConstantScheduler) for scheduler in schedules):
        return known
    step, noise = (float(scheduler.get_value()) for scheduler in schedules)
    if not isinstance(sampler.integrator, EulerMaruyamaIntegrator):
        return known | {"output_scale": 1 / noise**2}
    return known | {"step_size": step, "noise_std": noise * (2 * step) ** 0.5}
