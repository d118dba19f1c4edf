"""Record a sampler call: its draws and its differentiated energies, in copies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ..energies import wraps

__all__ = ["Draw", "Draws", "Evaluation", "Log", "Recording", "is_capturing", "is_opaque"]

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
    """A copy of Gaussian numbers that Python code has drawn."""

    values: Tensor
    std: float | None  # nominal; None where the entries have several
    number: int = 0  # draws before it


Log: TypeAlias = Sequence[Draw | None]
"""Draws, oldest first; None in the place of what was dropped."""


class Draws(TorchFunctionMode):
    """A mode that copies the Gaussian draws of this thread into ``log``."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Draw | None] = []
        self.uniform = 0  # uniform draws so far
        self.reached = 0  # how often an energy was differentiated: who sees its calls counts it
        self.strays: list[Evaluation] = []  # the first gradients that came through no energy
        self.parameters, self.is_inside = list[Tensor](), False  # the energy's; inside its calls
        # Since a gradient, layers of it or of a copy ran outside of its calls; and were weighed, as
        # by JEM++ with the tempered gradient there.
        self.is_bypassed = self.is_weighted = False

    def take(self, values: Tensor, std: float | None) -> None:
        """Keep a copy of a draw."""
        self.log.append(Draw(values.detach().clone(), std, len(self.log)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _GRADIENTS and len(self.strays) < _STRAYS:
            return self._differentiate(func, args, kwargs)
        out = func(*args, **kwargs)
        is_outside = not (self.is_inside or self.is_bypassed) and isinstance(out, Tensor)
        if is_outside and out.requires_grad:
            inputs = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, nn.Parameter)]
            self.is_bypassed = any(_is_copy(x, p) for x in inputs for p in self.parameters)
        name = getattr(func, "__name__", "")
        if self.is_bypassed and name == "mul":
            factors = (x for x in args if isinstance(x, Tensor) and not x.requires_grad)
            self.is_weighted |= any(x.ndim for x in factors)
        self.uniform += name in _UNIFORM
        if name in _GAUSSIAN and isinstance(out, Tensor) and out.numel() > 1 and _is_plain(out):
            std = kwargs.get("std", next(iter(args[_GAUSSIAN[name]]), 1.0))
            if isinstance(std, Tensor):
                first = std.flatten()[0]
                std = float(first) if bool((std == first).all()) else None
            self.take(out, std)
        return out

    def _differentiate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make the call, and keep its gradients where it passes through no energy."""
        reached, pairs = self.reached, list[Any]()
        with ExitStack() as hooks:
            if func is not torch.autograd.grad:
                roots = next(iter(args or kwargs.values()))
                roots = [roots] if isinstance(roots, Tensor) else roots
                leaves = {id(x): x for root in roots for x in _leaves_behind(root.grad_fn)}.values()
                for x in [x for x in leaves if not isinstance(x, nn.Parameter)][:_STRAYS]:
                    hook = x.register_hook(lambda g, x=x: pairs.append((x, g)))  # type: ignore[no-untyped-call]
                    hooks.enter_context(hook)
            out = func(*args, **kwargs)
        if self.reached == reached and not (reached and self.is_weighted):
            if func is torch.autograd.grad:
                inputs = args[1] if len(args) > 1 else kwargs["inputs"]
                inputs = [inputs] if isinstance(inputs, Tensor) else inputs
                pairs = list(zip(inputs, out, strict=True))
            copies = [
                (x.detach().clone(), g.detach().clone())
                for x, g in pairs
                if all(isinstance(y, Tensor) and _is_plain(y) for y in (x, g))
            ] or [(torch.empty(0), torch.empty(0))]
            for x, g in copies[: _STRAYS - len(self.strays)]:
                stray = Evaluation(None, x, len(self.log), x, gradient=g, note=self.is_bypassed)
                self.strays.append(stray)
        self.is_bypassed = self.is_weighted = False
        return out


def _is_copy(x: Tensor, parameter: Tensor) -> bool:
    """Return whether x is the parameter, or a matrix with the same numbers, not all alike."""
    kinds = [(type(y), y.shape, y.dtype, y.device) for y in (x, parameter)]
    is_like = kinds[0] == kinds[1] and type(x) is nn.Parameter
    if x is parameter or x.ndim < 2 or not is_like or x.is_meta:
        return x is parameter
    return torch.equal(x, parameter) and bool((x != x.flatten()[0]).any())


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
    note: Any = None  # what the recording's on_call has returned for it
    input_id: int = 0  # the id that x had

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of the output; empty where that is not one tensor."""
        return () if self.output is None else tuple(self.output.shape)

    @property
    def point(self) -> tuple[Tensor, Tensor]:
        """The leaf that the sampler moves, and the gradient there."""
        if self.leaf_gradient is not None:
            return self.leaf, self.leaf_gradient
        assert self.gradient is not None, "it is kept once it has been differentiated"
        return self.x, self.gradient


class Recording:
    """A record of energies while it is active: ``with Recording() as recording: sample_q(f)``.

    It then sees calls of all modules, but for those inside of a recorded one. Inside of
    :meth:`listening` it sees only those that are handed to :meth:`call`, and patches nothing.

    Args:
        on_evaluation: called with every evaluation, once it has been differentiated.
        on_call: called with ``(energy, args, kwargs, output)``; returns the evaluation's ``note``.
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
        """Copy draws inside the block; after it no gradient is looked at any longer."""
        try:
            with self.draws if self._has_draws else nullcontext():
                yield
        finally:
            self._unhook(list(self._hooks))

    def call(
        self, energy: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Call ``function``, and record it as a call of the energy unless inside of one."""
        if self._is_inside:
            return function(*args, **kwargs)
        inputs = (*args, *kwargs.values())
        evaluation = self._begin(energy, inputs) if torch.is_grad_enabled() else None
        # What is no energy, such as a loss that is a module, may call one.
        self._is_inside = id(energy) in self._known
        before, self.draws.is_inside = self.draws.is_inside, True
        try:
            output = function(*args, **kwargs)
        finally:
            self._is_inside, self.draws.is_inside = False, before
        is_node = isinstance(output, Tensor) and output.grad_fn is not None
        if evaluation is not None and is_node and not is_opaque(output):
            evaluation.output = output.detach().clone()  # compiled networks may reuse its memory
            self._hook(evaluation, output, "cotangent")
        note = self._on_call and self._on_call(energy, args, kwargs, output)
        if evaluation is not None:
            evaluation.note = note
        return output

    def _begin(self, energy: Any, inputs: Sequence[Any]) -> Evaluation | None:
        """Hook the first input that moves, and the leaf behind it."""
        for x in inputs:
            moving = isinstance(x, Tensor) and x.requires_grad and x.is_floating_point() and x.ndim
            leaf = _leaf_behind(x) if moving and _is_plain(x) else None
            if leaf is not None:
                # A sampler may move one leaf in place: hooks must not pile up on it.
                self._unhook([hook for hook in self._hooks if hook[0].gradient is not None])
                self._known.add(id(energy))
                copy = x.detach().clone()
                leaf_copy = copy if leaf is x else leaf.detach().clone()
                rest = len(self.draws.log), leaf_copy, self.draws.uniform
                evaluation = Evaluation(energy, copy, *rest, input_id=id(x))
                self._hook(evaluation, x, "gradient")
                if leaf is not x:
                    self._hook(evaluation, leaf, "leaf_gradient")
                return evaluation
        return None

    def _hook(self, evaluation: Evaluation, x: Tensor, name: str) -> None:
        """Keep the gradient by x, once it comes, under this name."""

        def keep(gradient: Tensor) -> None:
            # What comes by another way than through the output is that of another call.
            is_input = name == "gradient"
            has_output = evaluation.output is not None and evaluation.cotangent is None
            is_kept = getattr(evaluation, name) is not None
            if (is_input and has_output) or is_kept or not _is_plain(gradient):
                return
            reached = {e for e, _ in self._hooks if e.cotangent is not None} if is_input else set()
            waiting = [e for e in reached if e.gradient is None and not e.is_joint]
            for other in waiting if len(waiting) > 1 else ():
                other.is_joint = True
            setattr(evaluation, name, gradient.detach().clone())
            if is_input:
                self._keep(evaluation)

        self._hooks.append((evaluation, x.register_hook(keep)))  # type: ignore[no-untyped-call]

    def _unhook(self, hooks: list[tuple[Evaluation, RemovableHandle]]) -> None:
        for hook in hooks:
            hook[1].remove()
            self._hooks.remove(hook)

    def _keep(self, evaluation: Evaluation) -> None:
        kept, ends = self.evaluations, self._ends
        kept.append(evaluation)
        if ends is not None and len(kept) > 2 * ends:
            # Draws from before the first evaluation stay: they may be those of all steps.
            first, last = kept[ends - 1].draws_before, kept.pop(ends).draws_before
            self.draws.log[first:last] = [None] * (last - first)
            kept[ends].follows_gap = True
        if self._on_evaluation is not None:
            self._on_evaluation(evaluation)


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured on the current stream."""
    # Without a GPU the question raises an error; a capture has initialised CUDA.
    initialised = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(initialised) and torch.cuda.is_current_stream_capturing()


def is_opaque(x: Tensor) -> bool:
    """Return whether numbers cannot be seen: in a transform, batched, nested, sparse or wrapped."""
    is_wrapped = is_functorch_wrapped_tensor(x) or is_legacy_batchedtensor(x)
    is_wrapped = is_wrapped or (type(x) is not Tensor and wraps(x))
    return bool(is_wrapped or x.is_nested or x.layout is not torch.strided)


def _is_plain(x: Tensor) -> bool:
    return not (is_opaque(x) or is_capturing() or torch.compiler.is_compiling())


def _leaf_behind(x: Tensor) -> Tensor | None:
    """The one leaf that x was computed from, else x itself; None where parameters are behind x."""
    leaves = {id(leaf): leaf for leaf in _leaves_behind(x.grad_fn)}
    if any(isinstance(leaf, nn.Parameter) for leaf in leaves.values()):
        return None
    return leaves.popitem()[1] if len(leaves) == 1 else x


def _leaves_behind(root: Any) -> Iterator[Tensor]:
    """The leaves of a graph, but for those of an encoder's condition beside what moves."""
    visited: set[Any] = {None}
    todo: list[Any] = [root]
    while todo and len(visited) <= _MOST_NODES:
        if (node := todo.pop()) in visited:
            continue
        visited.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        parts = [following for following, _ in node.next_functions]
        if node.name().startswith(("Cat", "Stack")):
            leaves = [[*_leaves_behind(part)] for part in parts]
            moving = [x and not any(isinstance(y, nn.Parameter) for y in x) for x in leaves]
            parts = [part for part, moves in zip(parts, moving, strict=True) if moves] or parts
        todo += parts
