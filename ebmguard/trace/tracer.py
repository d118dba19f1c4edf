"""What a running trainer shows: its samplers, and the expression in which its energies meet."""

from __future__ import annotations

import ast
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
from .graph import Output, Rows, behind, edges, kinds, meetings, place_of, remember
from .places import Place, Stack, stack, users_frame
from .script import run

__all__ = ["Difference", "Side", "Trace", "trace_script"]

_PATIENCE = 10  # times as many steps are waited for a difference
_SURE = 1e-4


@dataclass(eq=False)
class Side:
    """One side of a difference.

    ``weight`` is the derivative of the difference by the mean of these energies, of the sum over
    heads; NaN where they enter unequally. ``cotangent`` sums the loss's gradient by the outputs.
    """

    label: str  # "data", or the name of the sampler
    expression: str = ""  # the user's, one energy for each sample, high where the output is
    site: Place | None = None  # where the module was called that has made them
    energy: tuple[object, str] = (None, "")  # that module, and its method: "" for its own call
    shape: tuple[int, ...] = ()
    weight: float = math.nan
    cotangent: float = math.nan


@dataclass(eq=False)
class Difference:
    """The expression in which the energies of samples and of data meet: sides by their labels."""

    place: Place
    sides: dict[str, Side]
    times: int = 0  # it was met


@dataclass(eq=False)
class Trace:
    """What was seen, in the order in which it was met."""

    samplers: list[Sampler] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    optimizers: list[str] = field(default_factory=list)  # classes of those that train
    steps: int = 0  # of these
    seconds: float = 0.0
    state: str = ""  # hash of parameters and random states; empty where the script ended itself
    error: str = ""  # that ended the script


def trace_script(script: Path, arguments: Sequence[str], steps: int) -> Trace:
    """Run a script until ``steps`` optimizer steps have had a difference in their loss."""
    tracer = _Tracer(steps)
    found, began = tracer.found, time.perf_counter()
    with tracer.watching():
        found.state, found.error = run(script, arguments, tracer.end_step)
    found.seconds = time.perf_counter() - began
    tracer.chains.end()
    found.samplers = list(tracer.chains.samplers.values())
    return found


class _Places(TorchFunctionMode):
    """Writes on each node of the graph which of the user's expressions has made it."""

    def __init__(self, see: Callable[[Any, tuple[Any, ...], Any, FrameType], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling():
            frame = users_frame(sys._getframe(1))
            if frame is not None:
                for each in result if isinstance(result, tuple | list) else (result,):
                    if isinstance(each, Tensor) and each.grad_fn is not None:
                        remember(each, Place.of(frame))
                self._see(func, args, result, frame)
        return result


class _Tracer:
    def __init__(self, steps: int) -> None:
        self.found = Trace()
        self._recording = Recording(on_evaluation=self._evaluated, on_call=self._called)
        self.chains = Chains(self._recording.draws.log)
        self._steps, self._with_difference = steps, 0
        self._meets_here: dict[Place, Difference] = {}
        self._in_this_step: set[Place] = set()
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
                _add_cotangents(difference, outputs)

        torch.autograd.backward = watched
        with self._patched, self._recording, _Places(self._computed):
            yield

    def end_step(self, optimizer: Optimizer) -> bool:
        """An optimizer's step is over. Returns whether enough has been seen."""
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        moving = [chain.evaluations[-1].leaf.shape for chain, _ in self.chains.recent]
        if len(owned) == 1 and owned[0].shape in moving and not isinstance(owned[0], nn.Parameter):
            return False  # It is the sampler's own.
        self.chains.end()
        name = type(optimizer).__name__
        if name not in self.found.optimizers:
            self.found.optimizers.append(name)
        self.found.steps += 1
        self._with_difference += bool(self._in_this_step)
        self._in_this_step.clear()
        return self._with_difference >= self._steps or self.found.steps >= _PATIENCE * self._steps

    def _called(self, module: Any, args: tuple[Any, ...], kwargs: Any, output: Any) -> Stack:
        calls = stack(sys._getframe(1))
        given = (*args, *kwargs.values())
        x = next((v for v in given if isinstance(v, Tensor) and v.ndim), None)
        outputs = output.values() if isinstance(output, dict) else output
        for each in outputs if isinstance(output, tuple | list | dict) else (output,):
            if x is None or not isinstance(each, Tensor) or each.grad_fn is None:
                continue
            if each.shape[:1] == x.shape[:1] and calls and self.chains.is_energy(module):
                seen = Output(module, x.detach(), tuple(each.shape), calls, self.chains.labels)
                remember(each, seen)
                each.register_hook(seen.keep_cotangent)  # type: ignore[no-untyped-call]
        return calls

    def _evaluated(self, evaluation: Evaluation) -> None:
        self._recording.evaluations.clear()
        is_energy = evaluation.output_shape[:1] == evaluation.x.shape[:1]
        if is_energy and evaluation.noted:
            chain = self.chains.add(evaluation, evaluation.noted)
            if chain.sampler is not None:
                self._find_method(chain, chain.sampler)

    def _find_method(self, chain: Chain, sampler: Sampler) -> None:
        """A method that makes energies of what parts of its module return, called in the loop.

        From here on its calls are recorded, in the place of those of the parts.
        """
        frames = [frame for frame, _ in chain.last_calls]
        inside = frames[: frames.index(chain.loop)]
        for frame in sorted(inside, key=lambda each: each.f_code.co_name != "forward"):
            code, name = frame.f_code, frame.f_code.co_name
            owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            is_energy = sampler.is_scalar and sampler.is_linear and name != "forward"
            if is_energy or not isinstance(owner, nn.Module):
                continue
            kind: Any = next((k for k in type(owner).__mro__ if name in vars(k)), nn.Module)
            original: Any = vars(kind).get(name)
            is_its = getattr(original, "__code__", None) is code
            if is_its and any(part is sampler.energy for part in owner.modules()):
                setattr(kind, name, _recorded(original, self._recording))
                self._patched.callback(setattr, kind, name, original)
                self.chains.replace(sampler, owner, "" if name == "forward" else name)
                return

    def _computed(self, func: Any, args: tuple[Any, ...], result: Any, frame: FrameType) -> None:
        """Before the first ``backward`` nothing is known; later, a known difference is read."""
        if getattr(func, "__name__", "") == "__setitem__":
            self._see_buffer(args, frame)
        difference = self._meets_here.get(Place.of(frame))
        if difference is not None and isinstance(result, Tensor) and result.grad_fn is not None:
            self._read(difference, args, result, frame)

    def _see_buffer(self, args: tuple[Any, ...], frame: FrameType) -> None:
        into, _, value = args
        for sampler in self.chains.samplers.values():
            is_batch = isinstance(value, Tensor) and value.shape == sampler.shape
            if is_batch and into.shape[1:] == value.shape[1:] and len(into) > len(value):
                names = [name for name, each in frame.f_locals.items() if each is into]
                sampler.buffer = f"{names[0] if names else 'a tensor'} {tuple(into.shape)}"

    def _read(
        self, difference: Difference, args: tuple[Any, ...], result: Tensor, frame: FrameType
    ) -> None:
        """What the two sides are called where they meet, and who called the samplers."""
        self._see_entries(stack(frame))
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
                node = output.place.node if output.place is not None else None
                if any(node is each for each in inner):
                    side.expression = source.segment(node)  # type: ignore[arg-type]
        operands = [here.left, here.right] if isinstance(here, ast.BinOp) else []
        named = [(source.segment(each), v) for each, v in zip(operands, args, strict=False)]
        for text, value in [*named, *frame.f_locals.items()]:
            if not isinstance(value, Tensor) or value.grad_fn is None or value.ndim == 0:
                continue
            rows = behind(value.grad_fn, value.output_nr, known)
            if len(rows) != 1:
                continue
            ((output, chosen),) = rows
            side = difference.sides.get(next(iter(kinds(rows)), ""))
            if side is None or output not in found or len(value) != len(chosen):
                continue
            weight = _weight(total, GradientEdge(value.grad_fn, value.output_nr), value.shape)
            sign = _sign(value, found[output], chosen)
            if sign and not math.isnan(weight):
                side.expression = text if sign > 0 else f"-{text}"
                side.weight, side.shape = sign * weight, tuple(value.shape)

    def _see_entries(self, now: Stack) -> None:
        alive = {id(frame) for frame, _ in now}
        for chain, sampler in self.chains.recent:
            shared = [i for i, (frame, _) in enumerate(chain.calls) if id(frame) in alive]
            if shared:
                loop = next(i for i, (frame, _) in enumerate(chain.calls) if frame is chain.loop)
                calls = chain.calls[loop + 1 : shared[0] + 1]
                sampler.entries = tuple(map(Place.at, reversed(calls)))
                sampler.is_inline = not calls

    def _before_backward(self, root: Tensor) -> list[tuple[Difference, list[Output]]]:
        if root.grad_fn is None or not self.chains.recent:
            return []
        found = []
        known: dict[Any, Rows] = {}
        for node in meetings(root.grad_fn, known):
            place = place_of(node)
            if place is None:
                continue
            difference = self._meets_here.get(place)
            if difference is None:
                sides = {label: Side(label) for label in sorted(kinds(known[node]))}
                difference = self._meets_here[place] = Difference(place, sides)
                self.found.differences.append(difference)
            difference.times += 1
            self._in_this_step.add(place)
            found.append((difference, [output for output, _ in known[node]]))
        return found


def _recorded(original: Callable[..., Any], recording: Recording) -> Callable[..., Any]:
    def method(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = recording.call(module, functools.partial(original, module), args, kwargs)
        for output in edges(getattr(result, "grad_fn", None)):
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
    """1 where values are the outputs of these rows, -1 where their negatives, 0 else.

    Several heads may enter as their sum, or with weights that add up to one, as in a logsumexp.
    """
    (found,) = torch.autograd.grad(value.sum(), output, retain_graph=True)
    each = found.double().reshape(len(found), -1)[list(rows)]
    for sign in (1, -1):
        for of_rows in (each, each.sum(1)):
            if float((of_rows - sign).abs().max()) <= _SURE:
                return sign
    return 0


def _add_cotangents(difference: Difference, outputs: Sequence[Output]) -> None:
    """The gradient of the loss on each side, of rows that have one label."""
    totals: dict[str, float] = {}
    for output in outputs:
        if output.cotangent is not None:
            rows = output.cotangent.double().reshape(len(output.labels), -1).sum(1).tolist()
            for label, row in zip(output.labels, rows, strict=True):
                totals[label] = totals.get(label, 0.0) + row
    for label, total in totals.items():
        if label in difference.sides:
            difference.sides[label].cotangent = total
