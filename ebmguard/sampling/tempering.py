"""Run a callable while an energy module, by ``forward`` or another method, returns ``factor * f``.

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
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.hooks import RemovableHandle

from ..errors import SamplerError
from .recording import Recording, is_capturing

__all__ = ["Tempering", "changes", "scale"]


def changes(factor: float | Tensor) -> bool:
    """Whether energies with this factor may be others: a tensor's are never looked at."""
    return isinstance(factor, Tensor) or factor != 1.0


def scale(output: object, factor: float | Tensor) -> Tensor:
    """``factor * output`` in the output's dtype; the very same tensor where the factor is 1.0.

    A factor that is a tensor broadcasts against the output.

    Raises:
        SamplerError: the output is not a tensor (a tuple, say).
    """
    if not isinstance(output, Tensor):
        raise SamplerError(
            f"The energy module returned a {type(output).__name__} while it was sampled; tempering "
            "needs one tensor of energies. Return only the energy there, or use g.temper(energy) "
            "inside the sampler and guard(loss_fn, None, ...)."
        )
    if isinstance(factor, Tensor):
        return output * (factor.to(output) if factor.ndim else factor)
    return output if factor == 1.0 else output * factor


def _device_of(module: nn.Module) -> torch.device | None:
    """That of the first parameter; ``module.parameters()`` takes ten times as long to find it."""
    own = (p.device for p in module._parameters.values() if p is not None)
    below = (_device_of(child) for child in module._modules.values() if child is not None)
    return next(own, None) or next(filter(None, below), None)


class _Gradients:
    """Norms of the gradients that a sampler computes of one module, by a hook without a pass.

    They are taken inside the hook, since samplers clip and zero gradients in place, by ``.data``.
    A replayed CUDA graph runs none of this. Each one writes its norm and its number on the device,
    where the norm of the call that came last is chosen without waiting for it.

    Attributes:
        norm: gradient norm per sample, of the shape of the output up to ``batch_dim``, of the
            latest differentiated call, or None where it cannot be told. From the sampler call after
            the first capture on, replays count as calls (but for what ``torch.func`` computes), and
            NaN means that the norm cannot be told. Where graphs differ in batch size, smaller ones
            are filled up with their mean, which changes neither mean nor maximum.
    """

    def __init__(self, batch_dim: int) -> None:
        self.norm: Tensor | None = None
        self.count = 0  # of the differentiated calls, without replays
        self.output_shape = torch.Size()  # of the latest call: who makes it writes this
        self.is_capturing = False  # as a CUDA graph: likewise
        self._batch_dim = batch_dim
        self._shape: tuple[int, ...] = ()  # of the samples whose norm it is
        self._graphs: dict[tuple[int, ...], Tensor] = {}  # norms, by the shape of the samples
        self._ran: Tensor | None = None  # the number of the one replayed last; 0 is none of them
        self._chooses = False
        self._is_new = False  # the latest call has not been differentiated yet
        self._handle: RemovableHandle | None = None
        self._leaf: Tensor | None = None

    @property
    def entries(self) -> int:
        """The number of entries of one sample; 0 where it is unknown, or graphs differ in it."""
        shapes = {*self._graphs, self._shape} if self._chooses else {self._shape}
        found = {math.prod(each[self._batch_dim + 1 :]) for each in shapes if each}
        return found.pop() if len(found) == 1 else 0

    def start(self) -> None:
        self.norm, self._shape, self.count = None, (), 0
        self._chooses = self._ran is not None
        self._mark(0)

    def stop(self) -> None:
        """The sampler call is over: the norm becomes that of the eager call or graph run last."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._leaf = None
        if self._ran is None or not self._chooses:  # before the first replay nothing is written
            return
        ran = list(enumerate(self._graphs.values(), 1))
        if self.norm is not None:
            ran.append((0, self.norm.to(self._ran.device)))
        width = max(norm.shape[-1] for _, norm in ran)
        chosen = torch.full((), torch.nan, device=self._ran.device)
        for number, norm in ran:
            if short := width - norm.shape[-1]:
                rest = norm.mean(-1, keepdim=True).expand(*norm.shape[:-1], short)
                norm = torch.cat([norm, rest], -1)
            chosen = torch.where(self._ran == number, norm, chosen)
        self.norm = chosen

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module is called: the first argument that may be differentiated is watched."""
        if not torch.is_grad_enabled():
            return
        for x in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(x, Tensor) and x.requires_grad and x.ndim:
                self._is_new = True
                # A sampler may move one leaf in place: its hook stays, and must not pile up.
                if x is not self._leaf:
                    if self._handle is not None:
                        self._handle.remove()
                    self._leaf = x if x.is_leaf else None
                    self._handle = x.register_hook(self._record)  # type: ignore[no-untyped-call]
                return

    def _record(self, grad: Tensor) -> None:
        if self._is_new:
            self._is_new = False
            self.count += 1
        if is_functorch_wrapped_tensor(grad):
            # One sample inside vmap: no norm can be told, nor marked from inside a transform.
            self.norm, self._chooses = None, False
            return
        if grad.requires_grad:
            grad = grad.detach()
        norm, shape, at = None, grad.shape, self._batch_dim
        # Otherwise the members of an ensemble share their samples.
        if not at or (len(shape) > at and shape[:at] == self.output_shape[:at]):
            inner = tuple(range(at + 1, len(shape)))
            norm = torch.linalg.vector_norm(grad, 2, inner) if inner else grad.abs()
        number = 0
        if not self.is_capturing:
            self.norm, self._shape = norm, shape
        elif norm is None:
            number = -1
        else:
            graph = self._graphs.setdefault(shape, norm)
            if graph is not norm:
                graph.copy_(norm)
            if self._ran is None:
                self._ran = torch.empty((), dtype=torch.int64, device=norm.device)
            number = 1 + list(self._graphs).index(shape)
        self._mark(number)

    def _mark(self, number: int) -> None:
        if self._ran is not None:
            self._ran.fill_(number)


class Tempering:
    """Overrides one energy module's ``forward``, or another method, during sampler calls.

    One object serves all calls on a module, which it does not keep alive: ``torch.compile`` then
    recompiles for neither a call nor a new β, and CUDA graphs read its factor, which is 1 outside
    of :meth:`active`.

    Attributes:
        energy: the method that returns the energies; ``batch_dim`` of these counts samples.
        given: the factor of the latest :meth:`active` block.
        seen: the gradients of the tempered f, which drive the sampler, in that block.
        reached: whether that method was called there, or has been captured in a CUDA graph whose
            replays cannot be seen.
    """

    _function: Callable[..., Any]  # the module's own method, unbound, and what it is bound to
    _owner: tuple[Any, ...]
    _state_of: Callable[[], Any]  # the module's own __getstate__
    _replaced: dict[str, tuple[Any, Any]]  # by attribute: ours, and the module's own or None

    def __init__(self, module: nn.Module, energy: str = "forward", *, batch_dim: int = 0) -> None:
        self.reached = False
        self.energy = energy
        self.seen = _Gradients(batch_dim)
        self._module = weakref.ref(module)
        self.given: float | Tensor = 1.0
        self._factor: float | Tensor = 1.0
        self._recording: Recording | None = None
        self._is_active = False
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
        """How many calls the latest block differentiated; None if none, or after a capture."""
        return self.seen.count if self.seen.count and self._captured is None else None

    def run(
        self,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        factor: float | Tensor,
        recording: Recording | None = None,
    ) -> Any:
        """``call(*args, **kwargs)`` inside :meth:`active`.

        An argument such as ``module.forward`` was bound before the override, and is bound anew.
        """
        inner = getattr(self.module, self.energy)

        def rebound(value: Any) -> Any:
            return self._forward if callable(value) and value == inner else value

        with self.active(factor, recording):
            return call(*map(rebound, args), **{name: rebound(x) for name, x in kwargs.items()})

    @contextmanager
    def active(self, factor: float | Tensor, recording: Recording | None = None) -> Iterator[None]:
        """Temper the module by ``factor`` inside the block; nested blocks do not multiply.

        The factor broadcasts against the energies; `recording` gets the module's calls.

        Raises:
            SamplerError: another guard is sampling from the same module, and one of the two
                tempers it; or a CUDA graph has captured a factor of another shape.
        """
        module, name = self.module, self.energy
        attributes = vars(module)
        outer = getattr(attributes.get(name), "__self__", None)
        if isinstance(outer, Tempering):
            if not changes(factor) and not changes(outer.given):
                self.given, self.reached = factor, False
                self.seen.start()
                yield
                return
            raise SamplerError(
                "Two guards sample from the same module at once, which would temper it twice. "
                "Give the inner one the plain sampler (`sampler.original`)."
            )
        compiled = attributes.get("_compiled_call_impl") if name == "forward" else None
        self._set(factor, is_compiled=compiled is not None)
        inner = getattr(module, name)
        # Compiled code is kept while what it calls lives; a bound method is a new object each time.
        self._owner = (inner.__self__,) if inspect.ismethod(inner) else ()
        self._function = inner.__func__ if self._owner else inner
        self._recording = recording
        self.reached = self._captured is not None
        self.seen.start()
        own: dict[str, Any] = {name: self._forward, "__getstate__": self._state}
        self._state_of = module.__getstate__
        if compiled is not None:
            # `module.compile()`: calls go to a compiled function, inside which nothing is watched.
            own["_compiled_call_impl"] = lambda *a, **k: self._watched(compiled, a, k)
        self._replaced = {key: (x, attributes.get(key)) for key, x in own.items()}
        attributes.update(own)
        self._is_active = True
        try:
            with nullcontext() if recording is None else recording.listening():
                yield
        finally:
            self._is_active = False
            self._restore(attributes)
            del self._function, self._owner, self._state_of, self._replaced
            self._recording = None
            self.seen.stop()
            if self._captured is not None:
                self._captured.fill_(1.0)

    def _restore(self, attributes: dict[str, Any]) -> None:
        for key, (own, before) in self._replaced.items():
            if attributes.get(key) is own:
                attributes[key] = before
                if before is None:
                    del attributes[key]

    def _state(self) -> Any:
        """What a copy or a file of the module holds: it outlives the block."""
        state = self._state_of()
        if isinstance(state, dict):
            self._restore(state := {**state})
        return state

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Where the module is copied by its own way, or a method of it alone."""
        if self._is_active and changes(self.given):
            raise SamplerError(
                f"{type(self.module).__name__}, or its method {self.energy}, is copied inside the "
                "sampler, in a way that would keep the tempered energy. Copy it before the call."
            )
        return super().__reduce_ex__(protocol)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_active:  # the sampler has kept this method
            return getattr(self.module, self.energy)(*args, **kwargs)
        if not torch.compiler.is_compiling():
            return self._watched(self._scaled, args, kwargs)
        self.reached = True
        return self._scaled(*args, **kwargs)

    def _scaled(self, *args: Any, **kwargs: Any) -> Any:
        output = self._function(*self._owner, *args, **kwargs)
        if not isinstance(output, Tensor) and not changes(self.given):
            return output
        return scale(output, self._factor)

    def _watched(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.reached, seen = True, self.seen
        seen.is_capturing = is_capturing()
        if seen.is_capturing:
            if self._captured is None:
                self._captured = self._factor if isinstance(self._factor, Tensor) else self._one
            assert self._captured is not None
            # Also at 1.0, where nothing else is multiplied: the graph will serve other factors.
            self._factor = self._captured
        seen.enter(args, kwargs)
        if self._recording is None:
            output = call(*args, **kwargs)
        else:
            output = self._recording.call(self.module, call, args, kwargs)
        seen.output_shape = getattr(output, "shape", torch.Size())
        return output

    def _set(self, factor: float | Tensor, *, is_compiled: bool) -> None:
        self.given = factor
        device = _device_of(self.module) or torch.device("cpu")
        # Double precision, since 1 - β is close to 1; a 0-dim factor does not promote outputs. A
        # tensor of its own for every call: graphs of earlier calls have saved theirs.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        if isinstance(factor, Tensor):
            self._factor = factor.detach().to(device, dtype, copy=True)
        elif factor != 1.0:
            self._factor = torch.full((), factor, dtype=dtype, device=device)
        else:
            if self._one is None or self._one.device != device:
                # Now, since memory that is allocated during a capture belongs to the graph.
                self._one = torch.ones((), dtype=dtype, device=device)
            # A compiled module multiplies by 1 as well: a capture must not compile anew.
            self._factor = self._one if is_compiled else 1.0
        if (captured := self._captured) is None:
            return
        if isinstance(factor, Tensor) and factor.ndim and factor.shape != captured.shape:
            raise SamplerError(
                f"The energy was captured in a CUDA graph with a factor of shape "
                f"{tuple(captured.shape)}, and now that of β* has the shape {tuple(factor.shape)}. "
                "Capture the graph under a new guard whose β* is of this shape from the first step."
            )
        if isinstance(self._factor, Tensor):  # else it is the 1 that the latest block has left
            captured.copy_(self._factor)
