"""The function ``guard``, which checks its arguments and wires a Guard."""

from __future__ import annotations

import locale
import logging
import sys
from collections.abc import Callable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch.distributed as dist
from torch import Tensor

from ..alerts import DEFAULT_RULES, Alert, Judge, Rule
from ..energies import Variant
from ..errors import ConfigError, folder_path, spelled, typed
from ..recovery import Recovery
from ..sinks import Writer, as_sink
from ..tags import why_not_logged
from ..trainer import Trainer, TrainerParts, finite_number
from .actions import Actions
from .argument_checks import check_loss, check_sampler
from .caller_loss import CallerLoss, Convention, LossFn
from .ensemble import check_variants
from .finer_steps import FinerSteps, Times
from .guard import Guard
from .loop import Loop
from .rows import BLOCK
from .strength import Action, Schedulable, Settings, Strength, checked_trainer

if TYPE_CHECKING:
    from ..recovery import Recoverer

__all__ = ["announce", "guard"]

_log = logging.getLogger("ebmguard")


@typed
def guard(
    loss_fn: LossFn | object | None = None,
    sampler: Callable[..., Any] | object | None = None,
    *,
    beta_star: Schedulable | None = None,
    beta: Schedulable | None = None,
    output_scale: float | None = None,
    sampler_scale: Schedulable | None = None,
    substeps: Times = "auto",
    methods: Sequence[str] = (),
    convention: Convention = "log_density",
    variant: Variant | Sequence[Variant] = "default",
    log_dir: str | PathLike[str] | None = None,
    sinks: Sequence[object] = (),
    flush_every: int = 50,
    thin_log: bool | None = True,
    rules: Sequence[Rule] | None = None,
    action: Action = "auto",
    recovery: Recovery | None = None,
    on_alert: Callable[[Alert], object] | None = None,
    skill: str | None = None,
    judge_in_loss: bool | None = None,
    reference_beta_star: float = 0.5,
    process_group: dist.ProcessGroup | None = None,
    compile: bool | None = False,
    **parts: Unpack[TrainerParts],
) -> Guard:
    """Retrofit a trainer: ``loss_fn, sample_q = guard(None, sample_q)``.

    Loss and sampler:
        loss_fn: None (the usual case), or the trainer's contrastive part, a function of
            ``(f_pos, f_neg)`` that is affine in both; its weight is read by autograd at every call.
        sampler: the function, closure, bound method or object that draws negatives, or None.
        beta_star: exponent β* on raw outputs; 0, the standard trainer's, where none is given. A
            number, a tensor (0-dim, or over leading model dimensions), or a function of the step.
        output_scale: the factor o for which the sampler's update is a correct Langevin step for
            exp(o f): ``2 * step_size / noise_std**2`` for ``x += step_size * df/dx + noise_std *
            randn``. If you give these two, the guard computes o from them. None: the guard measures
            the sampler at its first calls, which run on f itself. With o known, the sampler runs on
            (1 - β*/o) f. If o cannot be measured, the log says why (:attr:`Guard.measured`), and
            the sampler stays as it is.
        beta: β = β*/o instead of ``beta_star``. If the first sampler call does not reveal o,
            ``loss()`` raises a ConfigError.
        sampler_scale: the sampler's factor, set apart from β (Appendix G.1). 1.0: none.
        substeps: "auto": the guard leaves the sampler's steps as they are until they are too long
            for f (``sampler/sharpness`` over 1, median of five rows); then it takes every one as
            4 or 16 finer ones, inside the unchanged sampler. A number: always, once a call has
            shown how the sampler moves. 1: never. Where it cannot, a line says why.
        methods: methods of a sampler object that run tempered.
        convention: "log_density" (f is high on data) or "energy" (low on data).
        variant: "default", "no_pos", "batch" or "true", or one for every entry of the first model
            dimension; see :func:`ebmguard.objective.contrastive_loss`.

    The rest of the trainer, all optional; :meth:`Guard.attach` takes parts that are made later:
        model: the energy module. Needed if it is not among the sampler's arguments.
        energy: its method that returns the energies, if the sampler calls ``model.energy(x)``.
        optimizer: a step then ends at its ``step()``. Steps with gradients that are not finite are
            skipped, on the device by fused optimizers that can, else by one host read per step. If
            several train the model, a list of all: the step ends when all have stepped.
        scaler: the AMP GradScaler around that optimizer; the steps it skips are reported as INFO.
        scheduler, ema, buffer: the rest of the training state. A buffer is a tensor of rows, a
            list of tensors, or an object with ``state_dict`` and ``load_state_dict``.
        step_size, noise_std, clamp: the sampler's settings, for its diagnostics.
        generators: sources of random numbers besides the global ones, for rollbacks.
        sgld_steps: the usual number of steps of a sampler call. A rollback may change it. The
            sampler asks :meth:`Guard.next_steps` for the number to run now.
        steps_argument: instead, the guard passes that number as this argument of the sampler.

    Watching and acting:
        log_dir: folder for TensorBoard events and JSON lines. Needs the extra ``tensorboard``.
        sinks: further sinks, or loggers with ``add_scalar(tag, value, step)``. With several ranks,
            only the first one writes, to ``log_dir`` and to these.
        flush_every: steps between flushes of the sinks.
        thin_log: from the 20,000th step on write one row in ten to ``log_dir``, from the millionth
            one in a hundred, and every row near an alert. False writes all; ``sinks`` get all.
        rules: the rules that raise alerts (:mod:`ebmguard.alerts`): change a threshold by
            ``dataclasses.replace``, leave a rule out, or add one of yours.
        action: on an alert of level ERROR, "warn", "raise" (at the next safe point: after an
            optimizer step, or before the next sampler call), or "rollback" (after an optimizer
            step; needs ``model``, ``optimizer`` and all other parts with a state). "auto":
            "rollback" where these two are attached, as long as it works, else "warn".
        recovery: settings of "rollback": snapshots, changes to the run, the budget.
        on_alert: a function that is called with every alert at once, on every rank.
        skill: a number that you log by :meth:`Guard.log`, such as "accuracy", higher is better. If
            the median of its latest values falls under 0.8 of the best, the verdict is "look".
        judge_in_loss: judge a step inside ``loss()``, before its gradient exists. Unless the action
            is "warn", an ERROR then removes the contrastive term at once. None: yes on a CPU, no on
            a GPU, where decisions come two steps later and training never waits.
        reference_beta_star: exponent of the diagnostics under ``guard/ref/``, also at β* = 0.
        process_group: loss and rows then cover the samples of all ranks, and all ranks skip a
            step, stop and roll back together. See ``docs/frameworks.md``.
        compile: compute loss and diagnostics by ``torch.compile``: fewer kernels, for GPUs.

    Raises:
        ConfigError, SamplerError: arguments that make no sense. Nothing has been changed then.
    """
    if skill is not None and (why := why_not_logged(skill)):
        raise ConfigError(
            f"skill={skill!r} is no name of a number that g.log takes: {why}. Expected the name of "
            'one of yours, such as "accuracy", or None.'
        )
    if loss_fn is not None:
        check_loss(loss_fn)
    folder = None if log_dir is None else folder_path("log_dir", log_dir)
    for name, count in (("flush_every", flush_every), ("substeps", substeps)):
        if count != "auto" and count < 1:
            raise ConfigError(f"{name}={count!r}; expected a whole number, 1 or more.")
    if finite_number("reference_beta_star", reference_beta_star) == 0:
        raise ConfigError("reference_beta_star=0 has uniform weights, which say nothing.")
    if sampler is None and methods:
        raise ConfigError("methods= names methods of a sampler; pass the sampler too.")
    trainer = checked_trainer(Trainer(), parts, sampler)
    if sampler is not None:
        check_sampler(sampler, methods, trainer)
    strength = Strength.of(
        beta_star=beta_star,
        beta=beta,
        output_scale=output_scale,
        sampler_scale=sampler_scale,
        step_size=trainer.step_size,
        noise_std=trainer.noise_std,
        has_sampler=sampler is not None,
    )
    check_variants(variant, strength.models)
    if sampler is None and substeps not in ("auto", 1):
        raise ConfigError(
            f"substeps={substeps} divides the steps of a sampler; pass that one, guard(loss_fn, "
            "sampler, ...). Inline chains, with g.temper(energy), keep their own steps."
        )
    if action == "auto" and recovery is not None:
        action = "rollback"
    if action != "rollback" and recovery is not None:
        raise ConfigError('recovery= are the settings of action="rollback"; add that.')
    if action == "rollback" and strength.models:
        raise ConfigError(
            'action="rollback" takes a whole run back, and one member of an ensemble is no reason '
            'for that. Use action="warn", and alert.member in on_alert.'
        )
    # A sink of the caller gets every row at its step, beside what they log there themselves.
    alone = not sinks and not strength.models and process_group is None
    block = max(1, min(BLOCK, flush_every // 3)) if alone else 1
    settings = Settings(
        sign=1 if convention == "log_density" else -1,
        variant=variant if isinstance(variant, str) else tuple(variant),
        models=strength.models,
        reference_beta_star=float(reference_beta_star),
        action=action,
        judge_in_loss=judge_in_loss,
        process_group=process_group,
        has_sampler=sampler is not None,
        compiles=bool(compile),
        block=block,
        skill=skill,
    )
    members = strength.models.numel() if strength.models else 0
    judge = Judge(DEFAULT_RULES if rules is None else rules, members=members)
    ranks = settings.ranks
    opened = [as_sink(sink) for sink in sinks]
    if not ranks.is_first:
        opened, folder = [], None  # all ranks have the same rows
    # Rows that wait are lost with those that were not flushed.
    options: dict[str, Any] = {"flush_every": flush_every - block + 1, "thins": bool(thin_log)}
    writer = Writer(opened, folder=folder, **options)

    def made() -> Recoverer:
        from ..recovery import Recoverer

        return Recoverer(recovery or Recovery(), ranks, writer)

    may = action == "auto" and not (strength.models or ranks.are_unknown)
    actions = Actions(
        on_alert,
        acts=action in ("raise", "rollback"),
        could_roll_back=not strength.models,
        is_logging=ranks.is_first,
        recoverer=made() if action == "rollback" else None,
        offer=made if may else None,
    )
    if ranks.is_first:
        announce(sampler, strength, 1 if settings.models else substeps, log_dir)
    fineness = FinerSteps(1 if settings.models else substeps, settings)
    loop = Loop(settings, strength, judge, actions, writer, fineness)
    caller_loss = CallerLoss(cast("LossFn | None", loss_fn), convention)
    return Guard(loop, caller_loss, sampler, methods).attach(**parts)


class _Terminal(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # A program that has set up logging shows this as it shows everything.
        if _log.handlers == [self] and not logging.getLogger().handlers:
            print(f"ebmguard: {self.format(record)}", file=sys.stderr)


def _spelled(record: logging.LogRecord) -> bool:
    """Pass a line on, in characters that the files of all handlers have."""
    logger, text = cast("logging.Logger | None", _log), record.getMessage()
    while logger is not None:
        for handler in logger.handlers:
            # A file that is not open yet has the name that it will be opened with.
            encoding = (
                getattr(getattr(handler, "stream", None) or handler, "encoding", None) or "utf-8"
            )
            text = spelled(text, locale.getencoding() if encoding == "locale" else encoding)
        logger = logger.parent if logger.propagate else None
    if text != record.getMessage():
        record.msg, record.args = text, ()
    return True


_log.addFilter(_spelled)


def announce(
    sampler: object, strength: Strength, times: Times, folder: str | PathLike[str] | None
) -> None:
    """Log the guarded parts, the strength, and how to watch the run."""
    if not _log.handlers and not logging.getLogger().handlers:
        _log.addHandler(_Terminal())
        _log.setLevel(_log.level or logging.INFO)
    named = getattr(sampler, "__name__", type(sampler).__name__)
    what = "The loss is" if sampler is None else f"The loss and {named} are"
    scale, settings = strength.output_scale, f"{strength.name}={_shown(strength.given)}"
    settings += f", substeps={times}"
    effects: dict[Times, str] = {
        "auto": "Nothing changes until the sampler's steps are too long",
        1: "Nothing changes",
    }
    effect = effects.get(times, f"The sampler's steps are taken {times} times finer")
    if _shown(strength.given) != "0":
        effect = "The loss weights the negatives"
        shown = f"{scale:g}" if scale else "to be measured" if strength.awaits_scale else "unknown"
        settings += f", output_scale={shown}"
    watch = (
        "Pass log_dir= to watch it" if folder is None else f"To watch it: ebmguard watch {folder}"
    )
    _log.info("%s guarded. %s (%s). %s", what, effect, settings, watch)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return _shown(value.tolist())
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return "a schedule" if callable(value) else f"{value:g}"
