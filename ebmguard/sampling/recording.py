"""What a sampler uses: its network, and copies of its draws and of its differentiated energies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ..energies import wraps
from ..errors import SamplerError

__all__ = [
    *("Draw", "Draws", "Evaluation", "Recording"),
    *("find_module", "is_capturing", "is_opaque", "other_networks", "variables_of"),
]

_NONE = slice(0)
# Functions of normal numbers, and where their positional arguments have the standard deviation.
_GAUSSIAN = {"randn": _NONE, "randn_like": _NONE, "normal": slice(1, 2), "normal_": slice(2, 3)}
# What a Metropolis test may draw.
_UNIFORM = {"rand", "rand_like", "uniform_", "bernoulli", "bernoulli_", "exponential_"}
_UNIFORM |= {"multinomial", "binomial"}
_GRADIENTS = torch.autograd.grad, torch.autograd.backward, Tensor.backward
_STRAYS = 4  # that are kept
_MOST_NODES = 300  # of the graph behind an input, when its leaf is looked for


class Draw(NamedTuple):
    """Gaussian numbers that Python code has drawn, in a copy."""

    values: Tensor
    std: float | None  # nominal; None where the entries have several
    number: int = 0  # draws before it


class Draws(TorchFunctionMode):
    """While active, copies the Gaussian draws of this thread into ``log``, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Draw | None] = []  # None in the place of what was dropped
        self.uniform = 0  # uniform draws so far
        self.reached = 0  # how often an energy was differentiated: who sees its calls counts it
        self.strays: list[Evaluation] = []  # the first gradients that are those of no energy
        self.own, self.is_inside = list[Tensor](), False  # its parameters; a call of it
        self.is_past = False  # since a gradient, layers of it or of a copy ran outside of its calls
        self.is_weighed = False  # and were weighed, as by JEM++ with the tempered gradient there

    def take(self, values: Tensor, std: float | None) -> None:
        """Keep a copy of a draw."""
        self.log.append(Draw(values.detach().clone(), std, len(self.log)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _GRADIENTS and len(self.strays) < _STRAYS:
            return self._differentiated(func, args, kwargs)
        out = func(*args, **kwargs)
        is_outside = not (self.is_inside or self.is_past) and isinstance(out, Tensor)
        if is_outside and out.requires_grad:
            given = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, nn.Parameter)]
            self.is_past = any(_is_copy(x, p) for x in given for p in self.own)
        name = getattr(func, "__name__", "")
        if self.is_past and name == "mul":
            others = (x for x in args if isinstance(x, Tensor) and not x.requires_grad)
            self.is_weighed |= any(x.ndim for x in others)
        self.uniform += name in _UNIFORM
        if name in _GAUSSIAN and isinstance(out, Tensor) and out.numel() > 1 and _is_plain(out):
            std = kwargs.get("std", next(iter(args[_GAUSSIAN[name]]), 1.0))
            if isinstance(std, Tensor):
                first = std.flatten()[0]
                std = float(first) if bool((std == first).all()) else None
            self.take(out, std)
        return out

    def _differentiated(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The call, of which the gradients are kept where it passes through no energy."""
        reached, handles, came = self.reached, list[RemovableHandle](), list[Any]()
        if func is not torch.autograd.grad:
            ends = next(iter(args or kwargs.values()))
            ends = [ends] if isinstance(ends, Tensor) else ends
            leaves = {id(x): x for end in ends for x in _leaves_behind(end.grad_fn)}.values()
            for x in [x for x in leaves if not isinstance(x, nn.Parameter)][:_STRAYS]:
                look = x.register_hook(lambda g, x=x: came.append((x, g)))  # type: ignore[no-untyped-call]
                handles.append(look)
        try:
            out = func(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        if self.reached == reached and not (reached and self.is_weighed):
            if func is torch.autograd.grad:
                given = args[1] if len(args) > 1 else kwargs["inputs"]
                came = list(zip([given] if isinstance(given, Tensor) else given, out, strict=True))
            at, none = len(self.log), torch.empty(0)
            plain = [(x.detach().clone(), g.detach().clone()) for x, g in came if _is_pair(x, g)]
            for x, g in (plain or [(none, none)])[: _STRAYS - len(self.strays)]:
                self.strays.append(Evaluation(None, x, at, x, gradient=g, noted=self.is_past))
        self.is_past = self.is_weighed = False
        return out


def _is_copy(x: Tensor, own: Tensor) -> bool:
    """Whether a parameter is another one, or a matrix with the same numbers, not all alike."""
    kinds = [(type(each), each.shape, each.dtype, each.device) for each in (x, own)]
    if x is own or x.ndim < 2 or kinds[0] != kinds[1] or type(x) is not nn.Parameter or x.is_meta:
        return x is own
    return torch.equal(x, own) and bool((x != x.flatten()[0]).any())


def _is_pair(x: Any, gradient: Any) -> bool:
    return all(isinstance(each, Tensor) and _is_plain(each) for each in (x, gradient))


@dataclass(eq=False)
class Evaluation:
    """One differentiated call of an energy, in copies."""

    energy: Any  # the module, or the callable
    x: Tensor  # the input, (B, ...)
    draws_before: int  # that the recording had when the call began
    leaf: Tensor  # the one that x was computed from; x itself where there is none, or several
    uniform_before: int = 0  # uniform draws, likewise
    output: Tensor | None = None  # as the sampler saw it; None where it is not one tensor
    gradient: Tensor | None = None  # by x, other terms included
    cotangent: Tensor | None = None  # by the output: 1 for a sum over samples, 1/B for their mean
    leaf_gradient: Tensor | None = None
    inner_gradient: Tensor | None = None  # by x, of what came through the module alone
    is_joint: bool = False  # the gradient has come through several calls: it is that of no one
    follows_gap: bool = False  # evaluations before it were dropped
    noted: Any = None  # what the recording's on_call has returned for it
    of: int = 0  # the id that x had

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Of the output; empty where that is not one tensor."""
        return () if self.output is None else tuple(self.output.shape)

    @property
    def point(self) -> tuple[Tensor, Tensor]:
        """What the sampler moves, and the gradient there."""
        if self.leaf_gradient is not None:
            return self.leaf, self.leaf_gradient
        assert self.gradient is not None, "it is kept once it has been differentiated"
        return self.x, self.gradient


class Recording:
    """Records energies while it is active: ``with Recording() as seen: sample_q(f)``.

    It then sees calls of all modules, but for those inside of a recorded one. Inside of
    :meth:`listening` it sees only those that are handed to :meth:`call`, and patches nothing.

    Args:
        on_evaluation: called with each evaluation, once it has been differentiated.
        on_call: called with ``(energy, args, kwargs, output)``; what it returns is ``noted``.
        ends: keep only so many evaluations, two or more, at either end, and the draws around them.
        has_draws: whether draws are copied, into ``draws``.
    """

    def __init__(
        self,
        *,
        on_evaluation: Callable[[Evaluation], object] | None = None,
        on_call: Callable[[Any, Any, Any, Any], object] | None = None,
        ends: int | None = None,
        has_draws: bool = True,
    ) -> None:
        self.draws = Draws()
        self.evaluations: list[Evaluation] = []  # in the order in which they were differentiated
        self._on_evaluation, self._on_call = on_evaluation, on_call
        self._ends, self._has_draws = ends, has_draws
        self._is_inside, self._known = False, set[int]()  # ids of energies
        self._patched = ExitStack()
        self._hooks: list[tuple[Evaluation, RemovableHandle]] = []

    def __enter__(self) -> Recording:
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.call(module, functools.partial(original, module), args, kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        self._patched.callback(setattr, nn.Module, "__call__", original)
        self._patched.enter_context(self.listening())
        return self

    def __exit__(self, *error: Any) -> None:
        self._patched.close()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside the block draws are copied; after it no gradient is looked at any longer."""
        try:
            with self.draws if self._has_draws else nullcontext():
                yield
        finally:
            self._unhook(list(self._hooks))

    def call(
        self, energy: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """``function(*args, **kwargs)``, recorded as a call of the energy unless inside of one."""
        if self._is_inside:
            return function(*args, **kwargs)
        seen = self._begin(energy, (*args, *kwargs.values())) if torch.is_grad_enabled() else None
        # What is no energy, such as a loss that is a module, may call one.
        self._is_inside = id(energy) in self._known
        before, self.draws.is_inside = self.draws.is_inside, True
        try:
            output = function(*args, **kwargs)
        finally:
            self._is_inside, self.draws.is_inside = False, before
        is_node = isinstance(output, Tensor) and output.grad_fn is not None
        if seen is not None and is_node and not is_opaque(output):
            seen.output = output.detach().clone()  # compiled networks may reuse its memory
            self._hook(seen, output, "cotangent")
        noted = self._on_call and self._on_call(energy, args, kwargs, output)
        if seen is not None:
            seen.noted = noted
        return output

    def _begin(self, energy: Any, given: Sequence[Any]) -> Evaluation | None:
        for x in given:
            moving = isinstance(x, Tensor) and x.requires_grad and x.is_floating_point() and x.ndim
            leaf = _leaf_behind(x) if moving and _is_plain(x) else None
            if leaf is not None:
                # A sampler may move one leaf in place: hooks must not pile up on it.
                self._unhook([each for each in self._hooks if each[0].gradient is not None])
                self._known.add(id(energy))
                copy = x.detach().clone()
                kept = copy if leaf is x else leaf.detach().clone()
                counts = len(self.draws.log), kept, self.draws.uniform
                seen = Evaluation(energy, copy, *counts, of=id(x))
                self._hook(seen, x, "gradient")
                if leaf is not x:
                    self._hook(seen, leaf, "leaf_gradient")
                return seen
        return None

    def _hook(self, seen: Evaluation, x: Tensor, name: str) -> None:
        def look(gradient: Tensor) -> None:
            # What comes by another way than through the output is that of another call.
            is_input = name == "gradient"
            is_others = is_input and seen.cotangent is None and seen.output is not None
            if is_others or getattr(seen, name) is not None or not _is_plain(gradient):
                return
            reached = {e for e, _ in self._hooks if e.cotangent is not None} if is_input else set()
            waiting = [e for e in reached if e.gradient is None and not e.is_joint]
            for each in waiting if len(waiting) > 1 else ():
                each.is_joint = True
            setattr(seen, name, gradient.detach().clone())
            if is_input:
                self._keep(seen)

        self._hooks.append((seen, x.register_hook(look)))  # type: ignore[no-untyped-call]

    def _unhook(self, hooks: list[tuple[Evaluation, RemovableHandle]]) -> None:
        for each in hooks:
            each[1].remove()
            self._hooks.remove(each)

    def _keep(self, seen: Evaluation) -> None:
        kept, ends = self.evaluations, self._ends
        kept.append(seen)
        if ends is not None and len(kept) > 2 * ends:
            # Draws from before the first evaluation stay: they may be those of all steps.
            first, last = kept[ends - 1].draws_before, kept.pop(ends).draws_before
            self.draws.log[first:last] = [None] * (last - first)
            kept[ends].follows_gap = True
        if self._on_evaluation is not None:
            self._on_evaluation(seen)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    # Without a GPU the question raises an error; a capture has initialised CUDA.
    initialised = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(initialised) and torch.cuda.is_current_stream_capturing()


def is_opaque(x: Tensor) -> bool:
    """Whether no sample's numbers can be seen: in a transform, batched, nested, sparse, wrapped."""
    is_wrapped = is_functorch_wrapped_tensor(x) or is_legacy_batchedtensor(x)
    return bool(is_wrapped or wraps(x) or x.is_nested or x.layout is not torch.strided)


def _is_plain(x: Tensor) -> bool:
    return not (is_opaque(x) or is_capturing() or torch.compiler.is_compiling())


def _leaf_behind(x: Tensor) -> Tensor | None:
    """The one leaf that x was computed from, else x itself; None where parameters are behind x."""
    found = {id(leaf): leaf for leaf in _leaves_behind(x.grad_fn)}
    if any(isinstance(leaf, nn.Parameter) for leaf in found.values()):
        return None
    return found.popitem()[1] if len(found) == 1 else x


def _leaves_behind(root: Any) -> Iterator[Tensor]:
    """The leaves of a graph, but for those of an encoder's condition beside what moves."""
    seen: set[Any] = {None}
    todo: list[Any] = [root]
    while todo and len(seen) <= _MOST_NODES:
        if (node := todo.pop()) in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        parts = [following for following, _ in node.next_functions]
        if node.name().startswith(("Cat", "Stack")):
            leaves = [[*_leaves_behind(part)] for part in parts]
            moving = [own and not any(isinstance(x, nn.Parameter) for x in own) for own in leaves]
            parts = [part for part, moves in zip(parts, moving, strict=True) if moves] or parts
        todo += parts


def find_module(sampler: object, args: Sequence[object], kwargs: Mapping[str, object]) -> nn.Module:
    """The only module among a sampler's arguments, bound ones included.

    ``f.forward`` counts as f; else it is the one among a sampler object's attributes, or an error.
    """
    found = _modules(sampler, args, kwargs)
    if not found:
        kept = getattr(getattr(sampler, "__self__", sampler), "__dict__", {}).values()
        found = [*dict.fromkeys(x for x in kept if isinstance(x, nn.Module))]
    if len(found) == 1:
        return found[0]
    what = "No energy module among the sampler's arguments; it is probably a closure or a global."
    if isinstance(sampler, nn.Module):
        what = f"The sampler is a network itself, {type(sampler).__name__}, and gets no other one."
    if found:
        names = ", ".join(type(module).__name__ for module in found)
        what = f"{len(found)} modules among the arguments ({names}); which one is the energy?"
    raise SamplerError(f"{what} Name the one that the sampler calls: guard(..., model=f).")


def _modules(
    sampler: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[nn.Module]:
    if isinstance(sampler, functools.partial):
        args, kwargs = (*sampler.args, *args), {**sampler.keywords, **kwargs}
        sampler = sampler.func
    found: dict[nn.Module, None] = {}
    for value in (*args, *kwargs.values(), getattr(sampler, "__self__", None)):
        module = value if isinstance(value, nn.Module) else getattr(value, "__self__", None)
        if isinstance(module, nn.Module):
            found[module] = None
    return [*found]


def variables_of(sampler: object) -> dict[str, object]:
    """Global and closed-over variables that a sampler's code names, as far as they have a value."""
    function = sampler.func if isinstance(sampler, functools.partial) else sampler
    function = getattr(function, "__func__", function)
    code, values = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    found = {name: values[name] for name in getattr(code, "co_names", ()) if name in values}
    cells = getattr(function, "__closure__", None) or ()
    for name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=False):
        with suppress(ValueError):  # it is empty still
            found[name] = cell.cell_contents
    return found


def other_networks(
    energy: nn.Module, sampler: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[str]:
    """How a sampler names the networks that it uses beside this one, as far as can be told."""
    found = dict.fromkeys(_modules(sampler, args, kwargs), "an argument")
    named = variables_of(sampler).items()
    found |= {x: f"`{name}`" for name, x in named if isinstance(x, nn.Module)}
    own = {*energy.modules()}
    return [name for x, name in found.items() if x not in own and energy not in {*x.modules()}]
