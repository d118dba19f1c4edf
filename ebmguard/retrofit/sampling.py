"""The sampler: checks, wrappers, and calls on the tempered energy."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from types import MethodType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as uncompiled

from ..energies import Groups, LogQ
from ..errors import SamplerError
from ..ranks import refuse_shards
from ..sampling import Drift, Recording, Substeps, Tempering, find_module, other_networks
from ..trainer import Trainer, find_energy, is_function, lazy_result_problem
from .strength import Strength, StrengthAt

__all__ = [
    "OTHER_THREAD",
    "CallLock",
    "Guarded",
    "GuardedLoss",
    "OneLoss",
    "Sampling",
    "wrap_sampler",
]

T = TypeVar("T")

_log = logging.getLogger("ebmguard")
CAPTURED = (
    "The guard was called inside a sampler that is being captured as a CUDA graph, or in a capture "
    "around it, and would miss every replay: β and the step would stay those of now. Give it the "
    "sampler, guard(loss_fn, sampler, ...), capture and replay inside that, and call the guarded "
    "one at every step."
)
OTHER_THREAD = (
    "The guarded sampler was called while another thread is inside it, or inside `with "
    "g.paused():`, and would run untempered. Let one thread sample at a time (a lock around the "
    "calls), call `sampler.original` for pictures and inside a sampler, or give each thread a "
    "model and a guard of its own."
)


class CallLock:
    """A lock for one call at a time that, unlike a real lock, can be copied.

    An interrupt may come before any line, also while a call or a `with` in it ends. So what ends
    the call stands twice, and gradients are enabled again as they were.
    """

    def __init__(self) -> None:
        self._holder: dict[str, list[int]] = {}  # a list, which is no other call's

    @property
    def thread(self) -> int | None:
        """The thread that has it."""
        return self._holder.get("now", [None])[0]

    def run(self, call: Callable[[bool], T]) -> T:
        """Run ``call(is_free)``: True if this call holds the turn, False while another one does."""
        mine, is_enabled, is_over = [get_ident()], torch.is_grad_enabled(), False
        try:
            try:
                result = call(self._holder.setdefault("now", mine) is mine)
                is_over = True
            finally:
                self._leave(mine)
        finally:
            self._leave(mine)
            if not is_over:
                torch.set_grad_enabled(is_enabled)
        return result

    def _leave(self, mine: list[int]) -> None:
        if self._holder.get("now") is mine:
            del self._holder["now"]


class Sampling:
    """Find the energy module of a sampler call, and run the call on its tempered output."""

    def __init__(self, dims: int) -> None:
        self.calls = 0
        self._dims = dims  # model dimensions of the energies
        self.turn = CallLock()
        self._has_warned = False
        # Kept while their modules live: what a CUDA graph has captured is theirs.
        self.temperings = weakref.WeakKeyDictionary[nn.Module, Tempering]()

    def run(
        self,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        trainer: Trainer,
        strength: Strength,
        now: StrengthAt,
        recording: Recording | None,
        substeps: Substeps | None,
    ) -> tuple[Any, Tempering | None]:
        """Run the sampler on the tempered energy; returns its result, and what tempered it.

        Raises:
            SamplerError: no energy module is known or among the arguments, the sampler never called
                it, its drift is not the tempered one, or its steps are deferred.
            ConfigError: the module has no such method, or holds shards of its parameters.
        """
        module, tempering, factor = trainer.model, None, now.factor_of_samples
        must_temper = now.must_temper
        # What β* = 0 allows and a later step of the schedule does not is logged once.
        later = now.is_off and strength.is_scheduled and strength.tempers
        if module is None:
            try:
                module = find_module(call, args, kwargs)
            except SamplerError:
                if must_temper and not _is_one(factor):
                    raise
        if module is not None and (must_temper or hasattr(module, trainer.energy)):
            find_energy(module, trainer.energy)
            tempering = self.temperings.get(module)
            if tempering is None or tempering.energy != trainer.energy:
                refuse_shards(module.parameters())
                tempering = Tempering(module, trainer.energy, batch_dim=self._dims)
            self.temperings[module] = tempering
        drift = recording if isinstance(recording, Drift) else None
        if drift is not None and module is not None:
            drift.draws.parameters = [*module.parameters()]
        if tempering is None:
            result = call(*args, **kwargs)
        else:
            finer = drift.looking if substeps is None and drift is not None else substeps
            result = tempering.run(call, args, kwargs, factor, recording, finer)
        if drift is not None and tempering is not None:
            drift.is_hidden |= tempering.is_hidden
        wrong = lazy = "" if isinstance(result, Tensor) else lazy_result_problem(result)
        if (must_temper or later) and not lazy and tempering:
            if not tempering.reached:
                wrong = _never_called(tempering, call, args, kwargs)
            elif drift and not tempering.is_hidden and (wrong := drift.untempered(result)):
                energy = f"{type(tempering.module).__name__}.{tempering.energy}"
                wrong = f"{wrong}. {_EXITS}".format(energy)
        if wrong and (must_temper or (lazy and not now.is_off)) and not _is_one(factor):
            raise SamplerError(wrong)
        if wrong and (must_temper or later) and not self._has_warned:
            self._has_warned = True
            _log.warning("At β* = 0 nothing is tempered; above 0 this will end: %s", wrong)
        self.calls += 1
        return result, tempering

    def parameters(self, trainer: Trainer) -> list[Tensor]:
        """Return the energy's parameters; if the energy is unknown, the optimizer's."""
        modules = [*self.temperings, *([] if trainer.model is None else [trainer.model])]
        parameters: list[Tensor] = [p for module in modules for p in module.parameters()]
        groups = [] if trainer.optimizer is None else trainer.optimizer.param_groups
        return parameters or [p for group in groups for p in group["params"]]


_EXITS = (
    "Let {0} return all that the sampler follows, name a method that does with energy=, or use "
    "g.temper(energy) in the sampler and guard(loss_fn, None, ...). Pictures: `sampler.original`."
)


def _is_one(factor: float | Tensor) -> bool:
    """Read the factor on the host, where a call would be refused otherwise."""
    return isinstance(factor, Tensor) and bool((factor == 1).all())


def _never_called(
    tempering: Tempering, call: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> str:
    energy = f"{type(tempering.module).__name__}.{tempering.energy}"
    others = " and ".join(other_networks(tempering.module, call, args, kwargs))
    why = f"it uses another network, {others}; a copy is another one, too"
    if not others:
        why = (
            "it calls another method such as `energy`, a copy, or a CUDA graph that no guarded "
            "call has captured, or takes no step"
        )
    return (
        f"The sampler never called {energy}, so it ran on the untempered energy ({why}). For a "
        "picture use `sampler.original`, or `with g.paused():`. To train, name the network with "
        "model=. Name the method with energy=, or temper inside the sampler with g.temper(energy) "
        "and guard(loss_fn, None, ...)."
    )


# Runs a sampler, given with its arguments, on the tempered energy.
Run: TypeAlias = Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], Any]


class GuardedLoss:
    """The guarded contrastive loss of ``guard``, instead of ``-(fp - fq)``."""

    def __init__(self, guard: Any) -> None:
        self.guard = guard

    def __call__(
        self, f_pos: Tensor, f_neg: Tensor, groups: Groups | None = None, log_q: LogQ | None = None
    ) -> Tensor:
        """See :meth:`ebmguard.Guard.loss`."""
        loss: Tensor = self.guard.loss(f_pos, f_neg, groups, log_q)
        return loss


class OneLoss:
    """Make one loss per guard. The loss holds the guard; the guard does not hold the loss."""

    def __init__(self) -> None:
        self._made = weakref.WeakValueDictionary[int, GuardedLoss]()

    def __get__(self, guard: Any, owner: type | None = None) -> Any:
        if guard is None:
            return self
        return self._made.get(id(guard)) or self._made.setdefault(id(guard), GuardedLoss(guard))


class Guarded:
    """A sampler that runs tempered."""

    original: Any
    _run: Run

    @uncompiled  # a function that is compiled around it runs this one as it is
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        return self._run(self.original, args, kwargs)


class GuardedFunction(Guarded):
    """A sampler function that runs tempered; ``original`` is the untempered function."""

    def __init__(self, run: Run, sampler: Callable[..., Any]) -> None:
        self._run, self.original = run, sampler
        functools.update_wrapper(self, sampler)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        # So that a method can be guarded in the body of its class.
        return self if instance is None else MethodType(self, instance)


class GuardedObject(Guarded):
    """A sampler object with tempered calls and named methods; the rest is ``original``'s."""

    def __init__(self, run: Run, sampler: object, methods: Sequence[str]) -> None:
        vars(self).update(_run=run, original=sampler, _methods=frozenset(methods))

    def __getattr__(self, name: str) -> Any:
        if name in ("original", "_run", "_methods"):  # not set yet: a copy under construction
            raise AttributeError(name)
        value = getattr(self.original, name)
        return GuardedFunction(self._run, value) if name in self._methods else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.original, name, value)


def wrap_sampler(run: Run, sampler: Any, methods: Sequence[str]) -> Guarded:
    """Wrap a sampler that :func:`.argument_checks.check_sampler` has accepted."""
    if is_function(sampler):
        return GuardedFunction(run, sampler)
    return GuardedObject(run, sampler, methods)
