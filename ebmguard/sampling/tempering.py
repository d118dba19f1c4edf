"""Run a callable while an energy module, by ``forward`` or another method, gives ``factor * f``.

The sampler of the robust objective targets exp((1 - β) f) (Eq. 7): noise and step size stay, and
the drift alone is scaled. The method is overridden on the instance for the time of the call, since
a wrapper module would break closures, hooks, ``state_dict`` and compiled modules. Copies and files
of the module that the sampler makes are those of the plain one. Limits: another thread that calls
the module meanwhile sees the tempered energy, and ``torch.nn.DataParallel`` must be the module that
the sampler is given, not one inside it.

CUDA graphs that a sampler replays later do not call the module: they read the factor from one
tensor, refilled at every call, and write gradient norms to others. Limit: a capture is not noticed
inside a function that ``torch.compile`` has compiled around the module.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _global_forward_hooks

from ..errors import SamplerError
from .gradients import Gradients
from .recording import Recording, is_capturing
from .substeps import Substeps

__all__ = ["Tempering", "changes", "scale"]


_ONE = 1.0  # a factor that leaves outputs as they are


def changes(factor: float | Tensor) -> bool:
    """Return whether a factor may change energies: the values of a tensor are never looked at."""
    return isinstance(factor, Tensor) or factor != 1.0


def scale(output: object, factor: float | Tensor, batch_dim: int = 0) -> Tensor:
    """Return ``factor * output`` in the output's dtype; the same tensor where the factor is 1.0.

    A factor that is a tensor broadcasts against the output. Several numbers a sample keep their
    values where they are differentiated, and what flows back to them is scaled: a sampler may
    follow any function of them, such as the logsumexp of logits. Elsewhere each of them is scaled.
    ``batch_dim`` counts samples.

    Raises:
        SamplerError: the output is not a tensor (a tuple, say).
    """
    if not isinstance(output, Tensor):
        raise SamplerError(
            f"The energy module returned a {type(output).__name__} while it was sampled; tempering "
            "needs one tensor of energies. Return only the energy there, or use g.temper(energy) "
            "inside the sampler and guard(loss_fn, None, ...)."
        )
    if not changes(factor):
        return output
    factor = factor.to(output) if isinstance(factor, Tensor) and factor.ndim else factor
    is_differentiated = output.requires_grad or forward_ad._current_level >= 0
    if not is_differentiated or math.prod(output.shape[batch_dim + 1 :]) == 1:
        return output * factor
    values = output.detach()
    # Not the difference of infinities, which is NaN.
    return torch.where(values.isfinite(), values + (output - values) * factor, output)


def _device_of(module: nn.Module) -> torch.device | None:
    """The first parameter's device; ``module.parameters()`` takes ten times as long to find it."""
    here = (p.device for p in module._parameters.values() if p is not None)
    below = (_device_of(child) for child in module._modules.values() if child is not None)
    return next(here, None) or next(filter(None, below), None)


class Tempering:
    """An override of one energy module's ``forward``, or another method, during sampler calls.

    One object serves all calls on a module, which it does not keep alive: ``torch.compile`` then
    recompiles for neither a call nor a new β, and CUDA graphs read its factor, which is 1 outside
    of :meth:`active`.

    Attributes:
        energy: the method that returns the energies; ``batch_dim`` of these counts samples.
        factor: that of the latest :meth:`active` block.
        gradients: those of the tempered f in that block, which drive the sampler.
        reached: whether that method was called there, or has been captured in a CUDA graph whose
            replays cannot be seen.
        is_hidden: whether it was called there inside of compiled code, or has been so captured.
    """

    _function: Callable[..., Any]  # the module's method, unbound, and what it is bound to
    _owner: tuple[Any, ...]
    _state_of: Callable[[], Any]  # the module's __getstate__
    _replaced: Mapping[str, tuple[Any, Any]] = {}  # by attribute: ours, and the module's or None

    def __init__(self, module: nn.Module, energy: str = "forward", *, batch_dim: int = 0) -> None:
        self.reached = self.is_hidden = False
        self.energy = energy
        self.gradients, self._batch_dim = Gradients(batch_dim), batch_dim
        self._module = weakref.ref(module)
        self.factor: float | Tensor = _ONE
        self._applied: float | Tensor = _ONE  # the factor on the module's device
        self._recording: Recording | None = None
        self._substeps: Substeps | None = None
        self._is_open = self._is_active = self._is_inside = False
        self._one: Tensor | None = None  # what a CUDA graph captures where the factor is 1.0
        self._captured: Tensor | None = None  # the factor that CUDA graphs read

    @property
    def module(self) -> nn.Module:
        """The energy module."""
        module = self._module()
        assert module is not None, "its sampler holds it"
        return module

    @property
    def evaluations(self) -> int | None:
        """The number of differentiated calls in the latest block; None if 0, or after a capture."""
        return self.gradients.count or None if self._captured is None else None

    def run(
        self,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        factor: float | Tensor,
        recording: Recording | None = None,
        substeps: Substeps | None = None,
    ) -> Any:
        """Return ``call(*args, **kwargs)``, made inside :meth:`active`.

        An argument such as ``module.forward`` was bound before the override, and is bound anew.
        """
        inner = getattr(self.module, self.energy)

        def rebound(value: Any) -> Any:
            return self._forward if callable(value) and value == inner else value

        is_outer = not self._is_open
        try:
            with self.active(factor, recording, substeps):
                return call(*map(rebound, args), **{name: rebound(x) for name, x in kwargs.items()})
        finally:
            if is_outer:
                self._end()  # an interrupt may have come while it ended

    @contextmanager
    def active(
        self,
        factor: float | Tensor,
        recording: Recording | None = None,
        substeps: Substeps | None = None,
    ) -> Iterator[None]:
        """Temper the module by ``factor`` inside the block; nested blocks do not multiply.

        The factor broadcasts against the energies; `recording` gets the module's calls, and
        `substeps` makes the steps between them finer.

        Raises:
            SamplerError: another guard is sampling from the same module, and one of the two
                tempers it; or a CUDA graph has captured a factor of another shape.
        """
        module, name = self.module, self.energy
        attributes = vars(module)
        outer = getattr(attributes.get(name), "__self__", None)
        if isinstance(outer, Tempering):
            if not changes(factor) and not changes(outer.factor):
                self.factor, self.reached = factor, False
                self.gradients.start()
                yield
                return
            raise SamplerError(
                "Two guards sample from the same module at once, which would temper it twice. "
                "Give the inner one the plain sampler (`sampler.original`)."
            )
        compiled = attributes.get("_compiled_call_impl") if name == "forward" else None
        hooks = *module._forward_hooks.values(), *_global_forward_hooks.values()
        bends = name == "forward" and any(not getattr(x, "only_looks", False) for x in hooks)
        self._is_open = True
        self._set(factor, is_compiled=compiled is not None)
        inner = getattr(module, name)
        # Compiled code is kept while what it calls lives; a bound method is always a new object.
        self._owner = (inner.__self__,) if inspect.ismethod(inner) else ()
        self._function = inner.__func__ if self._owner else inner
        self._recording, self._substeps = recording, substeps
        self.gradients.has_drifts = substeps is not None and substeps.moves is not None
        if substeps is not None:
            substeps.follow = self.gradients.follow
        self.reached = self.is_hidden = self._captured is not None
        self.gradients.start()
        ours: dict[str, Any] = {name: self._forward, "__getstate__": self._state}
        self._state_of = module.__getstate__
        if bends or compiled is not None:
            # After `module.compile()` calls go to a function inside which nothing is watched. A
            # forward hook may return another energy than ``forward``: it is tempered behind it.
            whole = compiled or module._call_impl
            whole = partial(self._hooked, whole) if bends else whole
            ours["_compiled_call_impl"] = lambda *a, **k: self._watched(whole, a, k)
        self._replaced = {key: (x, attributes.get(key)) for key, x in ours.items()}
        try:
            self._is_active = True
            attributes.update(ours)
            with (
                nullcontext() if recording is None else recording.listening(),
                nullcontext() if substeps is None else substeps,
            ):
                yield
        finally:
            self._end()

    def _end(self) -> None:
        """End the block, unless it has ended; if this is interrupted, the next call does all."""
        if not self._is_open:
            return
        self._is_active = False
        self._restore(vars(self.module))
        ours = self._substeps, self._recording and self._recording.draws
        modes: Any = torch.overrides
        while (stack := modes._get_current_function_mode_stack()) and stack[-1] in ours:
            modes._pop_mode()  # an interrupt has kept its `with` from it
        for name in ("_function", "_owner", "_state_of", "_replaced"):
            vars(self).pop(name, None)
        self._recording = self._substeps = None
        self.gradients.stop()
        if self._captured is not None:
            self._captured.fill_(1.0)
        self._is_open = False

    def _restore(self, attributes: dict[str, Any]) -> None:
        for key, (ours, before) in self._replaced.items():
            if attributes.get(key) is ours and before is not None:
                attributes[key] = before
            elif attributes.get(key) is ours:
                del attributes[key]

    def _state(self) -> Any:
        """The state that a copy or a file of the module holds: it outlives the block."""
        state = self._state_of()
        if isinstance(state, dict):
            self._restore(state := {**state})
        return state

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse a copy, where the module makes it in a way of its class, or of a method alone."""
        if self._is_active and changes(self.factor):
            raise SamplerError(
                f"{type(self.module).__name__}, or its method {self.energy}, is copied inside the "
                "sampler, in a way that would keep the tempered energy. Copy it before the call."
            )
        return super().__reduce_ex__(protocol)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_active:  # the sampler has kept this method
            return getattr(self.module, self.energy)(*args, **kwargs)
        if self._is_inside:
            return self._function(*self._owner, *args, **kwargs)
        if not torch.compiler.is_compiling():
            return self._watched(self._scaled, args, kwargs)
        self.reached = self.is_hidden = True
        return self._scaled(*args, **kwargs)

    def _hooked(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the module with its hooks."""
        before, self._is_inside = self._is_inside, True
        try:
            output = call(*args, **kwargs)
        finally:
            self._is_inside = before
        return output if before else self._tempered(output)

    def _scaled(self, *args: Any, **kwargs: Any) -> Any:
        output = self._function(*self._owner, *args, **kwargs)
        return output if self._applied is _ONE else self._tempered(output)

    def _tempered(self, output: Any) -> Any:
        is_energy = isinstance(output, Tensor) or changes(self.factor)
        if not (isinstance(self._applied, Tensor) and is_energy):
            return output  # as it is
        return scale(output, self._applied, self._batch_dim)

    def _watched(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.reached, gradients = True, self.gradients
        gradients.is_capturing = is_capturing()
        if gradients.is_capturing:
            if self._captured is None:
                self._captured = self._applied if isinstance(self._applied, Tensor) else self._one
            assert self._captured is not None
            # Also at 1.0, where nothing else is multiplied: the graph will serve other factors.
            self._applied = self._captured
        gradients.enter(args, kwargs)
        if self._substeps is not None and not gradients.is_capturing and torch.is_grad_enabled():
            call = partial(self._substeps.call, self.module, call)
        if self._recording is None:
            output = call(*args, **kwargs)
        else:
            output = self._recording.call(self.module, call, args, kwargs)
        gradients.output_shape = getattr(output, "shape", torch.Size())
        return output

    def _set(self, factor: float | Tensor, *, is_compiled: bool) -> None:
        before, self.factor = self.factor, factor
        is_plain = not isinstance(factor, Tensor) and factor == 1.0 and not is_compiled
        if is_plain and self._one is not None and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._applied = _ONE  # no CUDA graph needs the factor where the module is now
            return
        device = _device_of(self.module) or torch.device("cpu")
        # Double precision, since 1 - β is close to 1; a 0-dim factor does not promote outputs. One
        # that changes is a new tensor: graphs of earlier calls have saved theirs.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        if isinstance(factor, Tensor):
            self._applied = factor.detach().to(device, dtype, copy=True)
        elif factor != 1.0:
            applied = self._applied
            is_same = self._captured is None and not isinstance(before, Tensor) and before == factor
            if not (is_same and isinstance(applied, Tensor) and applied.device == device):
                self._applied = torch.full((), factor, dtype=dtype, device=device)
        else:
            if self._one is None or self._one.device != device:
                # Now, since memory that is allocated during a capture belongs to the graph.
                self._one = torch.ones((), dtype=dtype, device=device)
            # A compiled module multiplies by 1 as well: a capture must not compile anew.
            self._applied = self._one if is_compiled else _ONE
        if (captured := self._captured) is None:
            return
        if isinstance(factor, Tensor) and factor.ndim and factor.shape != captured.shape:
            raise SamplerError(
                f"The energy was captured in a CUDA graph with a factor of shape "
                f"{tuple(captured.shape)}, and now that of β* has the shape {tuple(factor.shape)}. "
                "Capture the graph under a new guard whose β* is of this shape from the first step."
            )
        if isinstance(self._applied, Tensor):  # else it is the 1 that the latest block has left
            captured.copy_(self._applied)
