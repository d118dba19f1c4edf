"""The hooks of an attached optimizer: the end of a step, finite gradients or not, the step's size.

A weight of 0 does not stop ``0 * inf`` inside the network's own backward pass, so a step whose
gradients are not finite is skipped: on the device by fused optimizers, which honour ``found_inf``,
else after one read by the host. An AMP GradScaler does so by itself. Ranks skip a step together.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo as uncompiled
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer
from torch.utils.hooks import RemovableHandle

from ..trainer import optimizers_of
from .watches import UnendedSteps

if TYPE_CHECKING:
    from ..recovery.changes import LearningRate

__all__ = ["OptimizerHooks", "total_norm"]


class OptimizerHooks:
    """The hooks on an optimizer, or several of one model, and on their GradScaler if there is one.

    A step is over when all have stepped; one of them skips with any other.

    Args:
        on_step: called after every step, also if the scaler skipped it. First argument: 1.0 if the
            gradients were not finite and the step changed nothing, else 0.0, as a float or, if the
            device decides, a 0-dim tensor. Second argument: whether the scaler decided.
        is_watched: whether to measure the step that comes next.
        on_update: called before `on_step`, unless the scaler skipped the step, with 0-dim norms of
            the gradient (without an AMP scale), of the update, and of the update divided by each
            group's learning rate; NaN if they are unknown, or the step was skipped.
        process_group: ranks that skip a step together. A step that the scaler skipped by itself is
            reported for this rank only.
        rate: scales the learning rate inside a step.
    """

    def __init__(
        self,
        optimizer: Any,
        scaler: torch.amp.GradScaler | None,
        on_step: Callable[[float | Tensor, bool], None],
        is_watched: Callable[[], bool],
        on_update: Callable[[Tensor, Tensor, Tensor], None],
        process_group: dist.ProcessGroup | None = None,
        rate: LearningRate | None = None,
    ) -> None:
        self._on_step, self._process_group = on_step, process_group
        self._is_watched, self._on_update = is_watched, on_update
        self._members, self._rate = optimizers_of(optimizer), rate
        # Outcomes of those that have stepped since the last step was over.
        self._outcomes: dict[int, tuple[float | Tensor, bool]] = {}
        self._norms: list[tuple[Tensor, Tensor, Tensor]] = []
        self._is_off = False
        self._measure: Callable[[float | Tensor], None] | None = None
        self.unended = UnendedSteps(optimizer)  # losses that no step of it ends
        self._has_scaler = scaler is not None and scaler.is_enabled()
        self._skipped: float | Tensor = 0.0
        self._flag: tuple[Optimizer, Tensor] | None = None  # which the optimizer was given
        self._withheld: list[tuple[Tensor, Tensor]] = []
        self._stepped = False  # since the scaler was last asked to
        self._hooks: list[RemovableHandle | _WatchedStep] = []
        for member in self._members:
            for hook in [*member._optimizer_step_post_hooks.values()]:
                old = getattr(hook, "__self__", None)
                if isinstance(old, OptimizerHooks) and old._is_off:
                    old.remove()  # it could not go inside a step
            self._hooks.append(member.register_step_post_hook(self._after))
            self._hooks.append(member.register_step_pre_hook(self._before))
        if scaler is not None and self._has_scaler:
            self._hooks.append(_WatchedStep(self, self._members, scaler))

    def remove(self) -> None:
        """Remove all hooks; inside a step, where none can be removed, disable them."""
        self._is_off = True
        self._take_flag()
        if self._rate is not None:
            self._rate.restore()
        if not any(map(_is_inside_step, self._members)):
            self.unended.forget()
            while self._hooks:
                self._hooks.pop().remove()

    def scaled_step(
        self, step: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        """Call the scaler's ``step``; report to ``on_step`` if the scaler skipped the step."""
        self._stepped = False
        result = step(optimizer, *args, **kwargs)
        if not (self._is_off or self._stepped):
            self._report(optimizer, 1.0, by_scaler=True)
        return result

    def _report(self, optimizer: Optimizer, skipped: float | Tensor, *, by_scaler: bool) -> None:
        self._outcomes[id(optimizer)] = skipped, by_scaler
        if len(self._outcomes) == len(self._members):
            self.finish()

    def finish(self) -> None:
        """End the step, if any has stepped: of several optimizers some may rest."""
        outcomes, norms = [*self._outcomes.values()], self._norms
        self._outcomes, self._norms = {}, []
        if norms:
            self._on_update(*map(_joined, zip(*norms, strict=True)))
        if outcomes:
            skipped, by_scaler = outcomes[0]
            for flag, scaler_decided in outcomes[1:]:
                skipped, by_scaler = max(skipped, flag, key=float), by_scaler or scaler_decided
            self._on_step(skipped, by_scaler)

    @uncompiled
    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._is_off:
            return None
        if self._rate is not None:
            self._rate.scale(optimizer)
        if self._withheld and all(p.grad is None for p, _ in self._withheld):
            return None  # the step of a class calls that of its parent, which has hooks, too
        self._measure, self._skipped = None, 0.0
        self.unended.is_stepping = True
        self._withheld.clear()  # of a step that raised, whose gradients are old by now
        self._take_flag()
        # A scaler that the guard does not know sets the flag of fused optimizers, too.
        self._scaled = self._has_scaler or getattr(optimizer, "found_inf", None) is not None
        arguments = *args, *kwargs.values()
        closure = next(filter(callable, arguments), None)
        # Optimizers of torch call it once, before all else, so that gradients can be looked at when
        # it ends. L-BFGS calls it often, and what others do between its calls is not known.
        is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        if closure is None or not is_torchs or isinstance(optimizer, LBFGS):
            self._look(optimizer, has_gradients=closure is None)
            return None

        def then_look() -> Any:
            loss = closure()
            if not self._is_off:
                self._look(optimizer, has_gradients=True)
            return loss

        wrapped = {name: then_look if x is closure else x for name, x in kwargs.items()}
        return tuple(then_look if x is closure else x for x in args), wrapped

    @torch.no_grad()
    def _look(self, optimizer: Optimizer, *, has_gradients: bool) -> None:
        """Copy what measures the step, and leave it out if a gradient is not finite."""
        if self._is_watched():
            self._measure = self._measuring(optimizer, has_gradients=has_gradients)
        if self._scaled or not has_gradients:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients: list[Tensor] = []
        for group in [group for member in self._members for group in member.param_groups]:
            for p in group["params"]:
                if (x := p.grad) is not None:
                    is_plain = type(x) is Tensor and not x.is_sparse
                    gradients.append(x if is_plain else _dense(x))
        not_finite = _not_finite(gradients, parameters[0].device)
        for flag, _ in self._outcomes.values():  # what another one has skipped
            not_finite = torch.maximum(not_finite, not_finite.new_full((), 1.0) * flag)
        if self._process_group is not None:
            not_finite = self._max_over_ranks(not_finite)
        if _honours_found_inf(optimizer):
            self._skipped, self._flag = not_finite, (optimizer, not_finite)
            optimizer.found_inf = not_finite  # type: ignore[attr-defined]
        elif bool(not_finite):
            self._skipped = 1.0
            # A parameter without a gradient is passed over, moments and all.
            self._withheld = [(p, p.grad) for p in parameters if p.grad is not None]
            for p, _ in self._withheld:
                p.grad = None

    @uncompiled
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._rate is not None:
            self._rate.restore()
        if self._is_off or not self.unended.is_stepping:
            return  # the parent's step, inside this one, has reported it
        self._stepped, self.unended.is_stepping = True, False
        if self._scaled:
            # Fused optimizers leave a step out by themselves; the scaler has set their flag.
            flag = getattr(optimizer, "found_inf", None)
            self._skipped = 0.0 if flag is None else self._max_over_ranks(flag.detach().clone())
        self._take_flag()
        for p, gradient in self._withheld:
            p.grad = gradient
        self._withheld.clear()
        if self._measure is not None:
            self._measure(self._skipped)
            self._measure = None
        self._report(optimizer, self._skipped, by_scaler=self._scaled)

    def _measuring(
        self, optimizer: Optimizer, *, has_gradients: bool
    ) -> Callable[[float | Tensor], None] | None:
        """Return what reports the coming step's sizes to ``on_update``; None if nothing moves."""
        # Per group the parameters, copies of what they are, and the learning rate.
        groups: list[tuple[list[Tensor], list[Tensor], float | Tensor]] = []
        for group in optimizer.param_groups:
            lr = group.get("lr", math.nan)
            lr = lr.detach().clone() if isinstance(lr, Tensor) else float(lr)
            if trained := [p for p in group["params"] if p.requires_grad and p.numel()]:
                groups.append((trained, [p.detach().clone() for p in trained], lr))
        if not groups:
            return None
        every = [p for parameters, *_ in groups for p in parameters]
        gradient_norm = torch.full((), torch.nan, device=every[0].device)
        gradients = [_dense(p.grad) for p in every if p.grad is not None]
        if has_gradients and gradients:
            gradient_norm = total_norm(gradients)
            # Fused optimizers divide by the scale themselves.
            if (scale := getattr(optimizer, "grad_scale", None)) is not None:
                gradient_norm = gradient_norm / scale.to(gradient_norm.device)

        @torch.no_grad()
        def finish(skipped: float | Tensor) -> None:
            norms = [total_norm(torch._foreach_sub(after, before)) for after, before, _ in groups]
            device = norms[0].device
            table = torch.stack([x.to(device) for x in (gradient_norm, *norms)])
            lrs = [lr.to(device) if isinstance(lr, Tensor) else lr for *_, lr in groups]
            relative = torch.stack([x / lr for x, lr in zip(table[1:], lrs, strict=True)])
            if isinstance(skipped, Tensor):
                relative = torch.where(skipped.to(device) > 0, torch.nan, relative)
            elif skipped:
                relative = relative * torch.nan
            norm, relative_norm = map(torch.linalg.vector_norm, (table[1:], relative))
            self._norms.append((table[0], norm, relative_norm))

        return finish

    def _take_flag(self) -> None:
        """Take back what the optimizer was given, never what a scaler has given it."""
        optimizer, flag = self._flag or (None, None)
        if optimizer is not None and vars(optimizer).get("found_inf") is flag:
            del optimizer.found_inf  # type: ignore[attr-defined]
        self._flag = None

    def _max_over_ranks(self, flag: Tensor) -> Tensor:
        if self._process_group is not None:
            dist.all_reduce(flag, dist.ReduceOp.MAX, self._process_group)
        return flag


class _WatchedStep:
    """A ``scaler.step`` that sees whether it stepped; copied or pickled, it is the step as it was.

    GradScaler has no hooks, and a step that it leaves out never reaches the optimizer's.
    """

    def __init__(
        self, hooks: OptimizerHooks, attached: Sequence[Optimizer], scaler: torch.amp.GradScaler
    ) -> None:
        self._hooks, self._attached, self._scaler = hooks, attached, scaler
        self._before = vars(scaler).get("step")  # another library's, say
        self._step = scaler.step
        vars(scaler)["step"] = self

    def __call__(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not any(optimizer is member for member in self._attached):
            return self._step(optimizer, *args, **kwargs)
        return self._hooks.scaled_step(self._step, optimizer, *args, **kwargs)

    def remove(self) -> None:
        attributes = vars(self._scaler)
        if attributes.get("step") is self:
            del attributes["step"]
            attributes.update({} if self._before is None else {"step": self._before})

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._scaler, "step")


def _is_inside_step(optimizer: Optimizer) -> bool:
    """Return whether a thread is in a step; garbage collection, too, may come amid its hooks."""
    code = getattr(type(optimizer).step, "__code__", None)
    stacks = map(walk_stack, sys._current_frames().values())
    return any(frame.f_code is code for stack in stacks for frame, _ in stack)


def _joined(norms: Sequence[Tensor]) -> Tensor:
    """Return the norm of all from the norms of parts, on the device of the first."""
    return norms[0] if len(norms) == 1 else total_norm([x.to(norms[0]) for x in norms])


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of all entries of dense tensors, 0-dim, on the first's device."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for x in tensors:
        x = torch.view_as_real(x) if x.is_complex() else x
        # In float32 at least: the squares of half precision overflow.
        by_dtype.setdefault(torch.promote_types(x.dtype, torch.float32), []).append(x)
    norms = [
        norm.to(tensors[0].device, max(by_dtype, key=lambda dtype: dtype.itemsize))
        for dtype, group in by_dtype.items()
        for norm in torch._foreach_norm(group, 2, dtype=dtype)
    ]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _dense(gradient: Tensor) -> Tensor:
    """Return the entries of a gradient that are stored, detached."""
    gradient = gradient.detach()
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _honours_found_inf(optimizer: Optimizer) -> bool:
    """Return whether the optimizer leaves out a step by itself where its ``found_inf`` is 1."""
    if not isinstance(optimizer, (Adam, AdamW, SGD, Adagrad)):
        return False
    for group in optimizer.param_groups:
        if not group.get("fused"):
            return False
        # Not SGD's first step with momentum: its buffer would stay as it was allocated, unwritten.
        for p in group["params"] if group.get("momentum") else ():
            state = optimizer.state.get(p, {})
            if p.grad is not None and state.get("momentum_buffer") is None:
                return False
    return True


def _not_finite(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return 1 if an entry of any gradient is not finite, else 0; 0-dim, float32.

    It runs one kernel, a GradScaler's, which multiplies by 1: every bit stays as it is, and
    ``.data`` keeps the tensor's version.
    """
    by_kind: dict[object, list[Tensor]] = {}
    for x in gradients:
        x = torch.view_as_real(x.data) if x.is_complex() else x.data
        # Entries that share their memory cannot be written.
        x = x.contiguous() if torch._debug_has_internal_overlap(x) == 1 else x
        by_kind.setdefault((x.device, x.dtype), []).append(x)
    bad = torch.zeros((), dtype=torch.float32, device=device)
    for group in by_kind.values():
        flag = bad if group[0].device == device else torch.zeros_like(bad, device=group[0].device)
        torch._amp_foreach_non_finite_check_and_unscale_(group, flag, torch.ones_like(flag))
        bad = bad if flag is bad else torch.maximum(bad, flag.to(device))
    return bad
