"""``guard``, the one function of the retrofit: checks its arguments and wires a Guard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, get_args

import torch.distributed as dist
from torch import nn

from ..alerts import Alert
from ..energies import Reduce, Variants, check_variants
from ..errors import ConfigError
from ..ranks import Ranks
from ..recovery import Recovery
from ..sinks import as_sink, open_log_dir
from ..steering import AdaptiveSteps, SteerBeta
from .alarm import Action
from .callables import GuardedLoss, check_sampler
from .guard import Guard, Options
from .loss_fn import Convention, Difference, LossFn
from .measure import Meter
from .rows import Monitor
from .strength import Schedulable, Strength, number

__all__ = ["guard"]


def guard(
    loss_fn: LossFn | None = None,
    sampler: Callable[..., Any] | object | None = None,
    *,
    beta_star: Schedulable | None = None,
    beta: Schedulable | None = None,
    beta_stars: Sequence[Schedulable] | None = None,
    output_scale: float | None = None,
    step_size: float | None = None,
    noise_std: float | None = None,
    sampler_scale: Schedulable | None = None,
    model: nn.Module | None = None,
    methods: Sequence[str] = (),
    convention: Convention = "log_density",
    variant: Variants = "default",
    reduce: Reduce = "sum",
    log_dir: str | PathLike[str] | None = None,
    sinks: Sequence[object] = (),
    flush_every: int = 50,
    action: Action = "warn",
    recovery: Recovery | None = None,
    adapt: AdaptiveSteps | None = None,
    steer: SteerBeta | None = None,
    on_alert: Callable[[Alert], object] | None = None,
    hold: bool | None = None,
    reference_beta_star: float = 0.5,
    process_group: dist.ProcessGroup | None = None,
) -> Guard:
    """Retrofit a trainer: ``loss_fn, sample_q = guard(None, sample_q, beta_star=0.5, ...)``.

    Main arguments:
        loss_fn: None (the usual case), or the trainer's own contrastive part, a function of
            ``(f_pos, f_neg)`` that is affine in both; its weight is read by autograd at every call.
        sampler: the function, closure, bound method or object that draws negatives, or None.
        beta_star: exponent β* on raw outputs: 0 is the standard trainer, 0.5 to 4 are common for
            JEM. A number, a tensor (0-dim, or over leading model dimensions), or a function of the
            step. Alone, it leaves the sampler as it is.
        output_scale: the factor o for which the sampler's update is a correct Langevin step for
            exp(o f): ``2 * step_size / noise_std**2`` for ``x += step_size * df/dx + noise_std *
            randn``. The sampler then runs on (1 - β*/o) f.
        log_dir: folder for TensorBoard events and JSON lines. Needs ``ebmguard[tensorboard]``.

    Other arguments:
        beta: β = β*/o in the place of ``beta_star``; needs the output scale.
        beta_stars: several exponents whose losses are averaged, each as ``beta_star``; needs
            ``sampler_scale``.
        step_size, noise_std: the sampler's, in the place of ``output_scale``.
        sampler_scale: the sampler's factor, set apart from β (Appendix G.1).
        model: the energy module, where it is not among the sampler's arguments.
        methods: methods of a sampler object that run tempered.
        convention: "log_density" (f is high on data) or "energy" (low on data).
        variant: "default", "no_pos", "batch" or "true"; see
            :func:`ebmguard.objective.contrastive_loss`. Or a sequence of these, one for each entry
            of the first model dimension.
        reduce: "sum" or "mean": how heads ``(B, K)`` become one energy.
        sinks: further sinks, or loggers with ``add_scalar(tag, value, step)``. Of several ranks the
            first one alone writes, to ``log_dir`` and to these.
        flush_every: steps between flushes of the sinks.
        action: on an alert of level ERROR, "warn", "raise" (at the next safe point: after an
            optimizer step, or before the next sampler call), or "rollback" (after an optimizer
            step; needs ``g.attach(model=..., optimizer=..., ...)``).
        recovery: settings of "rollback": snapshots, what is changed, the budget.
        adapt: more SGLD steps while GradScale is too low; needs ``g.attach(sgld_steps=...)``.
        steer: move β*, a number, so that the effective sample size stays inside a band.
        on_alert: called with every alert, as soon as it is known; on every rank.
        hold: decide on a step inside ``loss()``, before its gradient exists; with "raise" the
            contrastive term is then withheld from an ERROR on. None: on a CPU yes, on a GPU no,
            where decisions come two steps later and nothing waits.
        reference_beta_star: exponent of the diagnostics under ``guard/ref/``, which say something
            at β* = 0 too.
        process_group: the loss and the rows are those of all ranks' samples (see
            :func:`ebmguard.objective.contrastive_loss`), and all ranks skip a step, stop and roll
            back together. Sharded parameters (FSDP2) need it. See ``docs/ranks.md``.

    Returns:
        the guard, which unpacks into the two callables.

    Raises:
        ConfigError, SamplerError: arguments that cannot be meant; nothing has been changed then.
    """
    strength = Strength.of(
        beta_star=beta_star,
        beta=beta,
        beta_stars=beta_stars,
        output_scale=output_scale,
        step_size=step_size,
        noise_std=noise_std,
        sampler_scale=sampler_scale,
    )
    for name, value, choices in (
        ("convention", convention, get_args(Convention)),
        ("reduce", reduce, get_args(Reduce)),
        ("action", action, get_args(Action)),
    ):
        if value not in choices:
            raise ConfigError(f"{name}={value!r}; expected one of {', '.join(choices)}.")
    check_variants(variant, strength.models)
    if action == "rollback":
        if strength.models:
            raise ConfigError(
                'action="rollback" takes a whole run back, and one member of an ensemble is no '
                'reason for that. Use action="warn", and alert.member in on_alert.'
            )
        recovery = recovery or Recovery()
    elif recovery is not None:
        raise ConfigError('recovery= are the settings of action="rollback"; add that.')
    if recovery is not None and not isinstance(recovery, Recovery):
        raise ConfigError(
            f"recovery= is a {type(recovery).__name__}; expected ebmguard.recovery.Recovery(...)."
        )
    for name, setting, kind in (("adapt", adapt, AdaptiveSteps), ("steer", steer, SteerBeta)):
        if setting is not None and not isinstance(setting, kind):
            raise ConfigError(
                f"{name}= is a {type(setting).__name__}; expected ebmguard.steering."
                f"{kind.__name__}(...)."
            )
    controller = None
    if steer is not None:
        first = strength.at(0).beta_star
        if not isinstance(first, float):
            raise ConfigError(
                f"steer= moves one number β*, but beta_star is {first!r} at step 0; an ensemble's, "
                "and the average over several exponents, are not steered."
            )
        controller = steer.start(first)
    if isinstance(loss_fn, GuardedLoss):
        raise ConfigError("loss_fn is guarded already; use one guard, or pass loss_fn=None.")
    for name, given, wanted in (
        (
            "loss_fn",
            loss_fn,
            "a function of (f_pos, f_neg) that returns the contrastive difference",
        ),
        ("on_alert", on_alert, "a function of the alert"),
    ):
        if given is not None and not callable(given):
            raise ConfigError(f"{name} is a {type(given).__name__}; expected {wanted}, or None.")
    if model is not None and not isinstance(model, nn.Module):
        raise ConfigError(
            f"model= is a {type(model).__name__}; expected the torch.nn.Module that the sampler "
            "calls."
        )
    if hold is not None and not isinstance(hold, bool):
        raise ConfigError(f"hold={hold!r}; expected True, False or None (True on a CPU).")
    if log_dir is not None and not isinstance(log_dir, str | PathLike):
        raise ConfigError(f"log_dir is a {type(log_dir).__name__}; expected the path of a folder.")
    if isinstance(flush_every, bool) or not isinstance(flush_every, int) or flush_every < 1:
        raise ConfigError(f"flush_every={flush_every!r}; expected a number of steps, 1 or more.")
    if number("reference_beta_star", reference_beta_star) == 0:
        raise ConfigError("reference_beta_star=0 has uniform weights, which say nothing.")
    if not isinstance(sinks, list | tuple):
        raise ConfigError(f"sinks= takes a list of sinks; got a {type(sinks).__name__}.")
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise ConfigError(
            f"process_group= is a {type(process_group).__name__}; expected the ProcessGroup of the "
            "ranks that train together, this one among them, such as torch.distributed.group.WORLD "
            "after init_process_group()."
        )
    if sampler is None and methods:
        raise ConfigError("methods= names methods of a sampler; pass the sampler too.")
    if sampler is not None:
        check_sampler(sampler, methods)
    opened = [as_sink(sink) for sink in sinks]
    if not Ranks(process_group).is_first:
        opened = []  # all ranks have the same rows
    elif log_dir is not None:
        opened = [*open_log_dir(log_dir), *opened]
    return Guard(
        strength=strength,
        difference=Difference(loss_fn, convention, reduce),
        sampler=sampler,
        methods=methods,
        model=model,
        sign=1 if convention == "log_density" else -1,
        options=Options(
            variant if isinstance(variant, str) else tuple(variant), reduce, process_group
        ),
        meter=Meter(
            reduce,
            float(reference_beta_star),
            strength.output_scale,
            strength.models,
            process_group,
            sign=1 if convention == "log_density" else -1,
            variant=variant,
        ),
        # The lag is settled by the first energies, which show the device.
        monitor=Monitor(opened, flush_every=flush_every, lag=0),
        action=action,
        recovery=recovery,
        adapt=adapt,
        steer=controller,
        on_alert=on_alert,
        hold=hold,
    )
