"""What a running trainer shows: its samplers, and the expression in which its energies meet."""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ..sampling import Evaluation, Recording
from .chains import Chain, Chains, Sampler
from .graph import Output, Rows, behind, edges, kinds, meetings, remember
from .script import Place, Stack, run, stack, user_frame

__all__ = ["Difference", "Guarded", "Side", "Trace", "trace_script"]

_PATIENCE = 10  # times as many steps are waited for a difference
_SURE = 1e-4


class Guarded(BaseException):
    """The script makes a guard, at this place: it would write into the folder of a real run."""


@dataclass(eq=False)
class Side:
    """One side of a difference."""

    expression: str = ""  # the user's, one energy for each sample, high where the output is
    site: Place | None = None  # where the module was called that has made them
    energy: tuple[object, str] = (None, "")  # that module, and its method: "" for its own call
    shape: tuple[int, ...] = ()
    weight: float = math.nan  # slope of the difference in their mean; NaN: they enter unequally
    cotangent: float = math.nan  # the sum of the loss's gradient by the outputs


@dataclass(eq=False)
class Difference:
    """Where energies of samples and of data meet: sides by "data", or the sampler's name."""

    place: Place
    sides: dict[str, Side]
    times: int = 0  # it was met


@dataclass(eq=False)
class Trace:
    """What was seen, in the order in which it was met."""

    samplers: list[Sampler]
    differences: list[Difference]
    optimizers: list[str]  # classes of those that train
    steps: int  # of these
    seconds: float
    state: str  # hash of parameters and random states; empty where the script ended itself
    error: str  # that ended the script


def trace_script(script: Path, arguments: Sequence[str], steps: int) -> Trace:
    """Run a script until ``steps`` steps had a difference in their loss; ``Guarded`` at a guard."""
    tracer, began = _Tracer(steps), time.perf_counter()
    with tracer.watching():
        state, error = run(script, arguments, tracer.end_step)
    seconds = time.perf_counter() - began
    tracer.chains.end()
    samplers, differences = tracer.chains.samplers.values(), tracer.differences.values()
    steps, optimizers = len(tracer.optimizers), [*dict.fromkeys(tracer.optimizers)]
    return Trace([*samplers], [*differences], optimizers, steps, seconds, state, error)


class _Tracer(TorchFunctionMode):
    """As a mode, it writes on each node of the graph which of the user's expressions made it."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._recording = Recording(on_evaluation=self._evaluated, on_call=self._called)
        self.chains = Chains(self._recording.draws.log)
        self.differences: dict[Place, Difference] = {}
        self.optimizers: list[str] = []  # the class of each step's
        self._steps, self._contrastive = steps, set[int]()  # numbers of steps with a difference
        self._patched = ExitStack()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Everything that is seen is seen inside this block."""
        backward = torch.autograd.backward
        self._patched.callback(setattr, torch.autograd, "backward", backward)

        def watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            met = [each for root in roots for each in self._before_backward(root)]
            backward(tensors, *args, **kwargs)
            for difference, outputs in met:
                reached = [each for each in outputs if each.cotangent is not None]
                for label, side in difference.sides.items():
                    pulls = [each.pull(label) for each in reached if label in each.labels]
                    side.cotangent = sum(pulls) if pulls else side.cotangent

        torch.autograd.backward = watched
        for module in map(importlib.import_module, ("ebmguard", "ebmguard.retrofit")):
            self._patched.callback(setattr, module, "guard", module.guard)
            vars(module)["guard"] = _guarded
        with self._patched, self._recording, self:
            yield

    def end_step(self, optimizer: Optimizer) -> bool:
        """An optimizer's step is over. Returns whether enough has been seen."""
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        moving = [chain.evaluations[-1].leaf.shape for chain, _ in self.chains.recent]
        if len(owned) == 1 and owned[0].shape in moving and not isinstance(owned[0], nn.Parameter):
            return False  # It is the sampler's own.
        self.chains.end()
        self.optimizers.append(type(optimizer).__name__)
        return self._steps <= max(len(self._contrastive), len(self.optimizers) // _PATIENCE)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        frame = None if torch.compiler.is_compiling() else user_frame(sys._getframe(1))
        if frame is None:
            return result
        place = Place(frame.f_code, frame.f_lasti)
        for each in _nodes(result):
            remember(each, place)
        if getattr(func, "__name__", "") == "__setitem__":
            self._see_buffer(args, frame)
        # Before the first `backward` nothing is known; later, a known difference is read.
        difference = self.differences.get(place)
        if difference is not None and isinstance(result, Tensor) and result.grad_fn is not None:
            self._see_entries(stack(frame))
            _read(difference, args, result, frame)
        return result

    def _called(self, module: Any, args: tuple[Any, ...], kwargs: Any, output: Any) -> Stack:
        calls, given = stack(sys._getframe(1)), (*args, *kwargs.values())
        x: Any = next((v for v in given if isinstance(v, Tensor) and v.ndim), None)
        for each in _nodes(output) if calls and x is not None else ():
            if each.shape[:1] == x.shape[:1] and self.chains.is_energy(module):
                shape, place = tuple(each.shape), calls[0][1]
                seen = Output(module, x.detach(), shape, place, self.chains.labels)
                remember(each, seen)
                each.register_hook(seen.keep_cotangent)  # type: ignore[no-untyped-call]
        return calls

    def _evaluated(self, evaluation: Evaluation) -> None:
        self._recording.evaluations.clear()
        if evaluation.output_shape[:1] == evaluation.x.shape[:1] and evaluation.noted:
            chain = self.chains.add(evaluation, evaluation.noted)
            if chain.sampler is not None:
                self._find_method(chain, chain.sampler)

    def _find_method(self, chain: Chain, sampler: Sampler) -> None:
        """A method that makes energies of what parts of its module return: recorded from now on."""
        frames = [frame for frame, _ in chain.last_calls]
        inside = frames[: frames.index(chain.loop)]
        for frame in sorted(inside, key=lambda each: each.f_code.co_name != "forward"):
            code, name = frame.f_code, frame.f_code.co_name
            owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            is_energy = sampler.is_scalar and sampler.is_linear and name != "forward"
            parts = owner.modules() if isinstance(owner, nn.Module) and not is_energy else ()
            kind: Any = next((k for k in type(owner).__mro__ if name in vars(k)), nn.Module)
            original: Any = vars(kind).get(name)
            if getattr(original, "__code__", None) is code and sampler.first.energy in parts:
                setattr(kind, name, _recorded(original, self._recording))
                self._patched.callback(setattr, kind, name, original)
                self.chains.replace(sampler, owner, "" if name == "forward" else name)
                return

    def _see_buffer(self, args: tuple[Any, ...], frame: FrameType) -> None:
        into, _, value = args
        for sampler in self.chains.samplers.values():
            is_batch = isinstance(value, Tensor) and value.shape == sampler.first.x.shape
            if is_batch and into.shape[1:] == value.shape[1:] and len(into) > len(value):
                names = [name for name, each in frame.f_locals.items() if each is into]
                sampler.buffer = f"{names[0] if names else 'a tensor'} {tuple(into.shape)}"

    def _see_entries(self, now: Stack) -> None:
        alive = {id(frame) for frame, _ in now}
        for chain, sampler in self.chains.recent:
            frames = [frame for frame, _ in chain.calls]
            shared = next((i for i, frame in enumerate(frames) if id(frame) in alive), None)
            if shared is not None:
                calls = chain.calls[frames.index(chain.loop) + 1 : shared + 1]
                sampler.entries = tuple(place for _, place in reversed(calls))

    def _before_backward(self, root: Tensor) -> Iterator[tuple[Difference, list[Output]]]:
        known: dict[Any, Rows] = {}
        if root.grad_fn is None or not self.chains.recent:
            return
        for node in meetings(root.grad_fn, known):
            place = node.metadata.get(Place)
            if place is not None:
                sides = {label: Side() for label in sorted(kinds(known[node]))}
                difference = self.differences.setdefault(place, Difference(place, sides))
                difference.times += 1
                self._contrastive.add(len(self.optimizers))
                yield difference, [output for output, _ in known[node]]


def _guarded(*_: Any, **__: Any) -> None:
    calls = stack(sys._getframe(1))
    raise Guarded(calls[0][1] if calls else "a place of its libraries")


def _read(difference: Difference, args: tuple[Any, ...], result: Tensor, frame: FrameType) -> None:
    """What the two sides are called where they meet."""
    found, known = edges(result.grad_fn), dict[Any, Rows]()
    counts = [sum(each.labels.count(label) for each in found) for label in difference.sides]
    is_batch = result.ndim > 0 and len(result) in counts
    total = result.sum() / (len(result) if is_batch else 1)
    here, source = difference.place.node, difference.place.source
    inner = [] if here is None else list(ast.walk(here))
    for output, edge in found.items():
        (label, *others) = set(output.labels)
        side = difference.sides.get(label)
        if side is not None and not others:
            side.site, side.shape, side.expression = output.place, output.shape, ""
            side.energy = output.module, output.method
            side.weight = _weight(total, edge, output.shape)
            node = None if output.place is None else output.place.node
            if node is not None and node in inner:
                side.expression = source.segment(node)
    operands = [here.left, here.right] if isinstance(here, ast.BinOp) else []
    named = [(source.segment(each), v) for each, v in zip(operands, args, strict=False)]
    for text, value in [*named, *frame.f_locals.items()]:
        has_rows = isinstance(value, Tensor) and value.grad_fn is not None and value.ndim > 0
        rows = behind(value.grad_fn, value.output_nr, known) if has_rows else Rows()
        side = difference.sides.get(next(iter(kinds(rows)), ""))
        if side is None or len(rows) != 1:
            continue
        ((output, chosen),) = rows
        if output not in found or len(value) != len(chosen):
            continue
        weight = _weight(total, GradientEdge(value.grad_fn, value.output_nr), value.shape)
        sign = _sign(value, found[output], chosen)
        if sign and not math.isnan(weight):
            side.expression = text if sign > 0 else f"-{text}"
            side.weight, side.shape = sign * weight, tuple(value.shape)


def _nodes(result: Any) -> list[Tensor]:
    """The tensors of a result that have a node in the graph."""
    parts = result.values() if isinstance(result, dict) else result
    each = parts if isinstance(result, tuple | list | dict) else (result,)
    return [part for part in each if isinstance(part, Tensor) and part.grad_fn is not None]


def _recorded(original: Callable[..., Any], recording: Recording) -> Callable[..., Any]:
    def method(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = recording.call(module, functools.partial(original, module), args, kwargs)
        for output in itertools.chain(*(edges(node.grad_fn) for node in _nodes(result))):
            if output.module is module:
                output.method = original.__name__.removeprefix("forward")
        return result

    return method


def _weight(total: Tensor, energies: GradientEdge, shape: Sequence[int]) -> float:
    """The derivative by the mean of energies, of which all enter alike; NaN where they do not."""
    (found,) = torch.autograd.grad(total, energies, retain_graph=True, allow_unused=True)
    if found is None or not shape:
        return math.nan
    mean = float(found.double().mean())
    is_alike = float((found.double() - mean).abs().max()) <= _SURE * abs(mean)
    return mean * shape[0] if is_alike and mean else math.nan


def _sign(value: Tensor, output: GradientEdge, rows: Sequence[int]) -> int:
    """1 where values are the outputs of these rows, -1 where their negatives, 0 else."""
    (found,) = torch.autograd.grad(value.sum(), output, retain_graph=True)
    each = found.double().reshape(len(found), -1)[list(rows)]
    for sign in (1, -1):
        # Heads may enter as their sum, or with weights that add up to one, as in a logsumexp.
        for of_rows in (each, each.sum(1)):
            if float((of_rows - sign).abs().max()) <= _SURE:
                return sign
    return 0
