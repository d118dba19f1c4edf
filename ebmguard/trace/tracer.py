"""What a running trainer shows: its samplers, and the expression in which its energies meet."""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ..measurement import Evaluation, Recording
from .chains import Chains, Sampler
from .graph import DATA, Output, Rows, behind, label_of, meetings, place_of, remember
from .places import Place, Stack, stack, users_frame
from .script import run

__all__ = ["Difference", "Side", "Trace", "trace_script"]

_PATIENCE = 10  # times as many steps are waited for a difference
_SURE = 1e-4


@dataclass(eq=False)
class Side:
    """One side of a difference.

    Attributes:
        label: "data", or the name of the sampler.
        expression: the user's for the energies of this side; empty where none was found.
            site: where the module was called that has made them.
        shape: of these energies.
        mean: over samples, of the sum over heads.
        cotangent: the sum of the loss's gradient with respect to the outputs of this side.
    """

    label: str
    expression: str = ""
    site: Place | None = None
    shape: tuple[int, ...] = ()
    mean: float = float("nan")
    cotangent: float = float("nan")


@dataclass(eq=False)
class Difference:
    """The expression in which the energies of samples and of data meet.

    Attributes:
        sides: by their labels.
        value: of the expression, when the sides were read; over samples its mean, over heads its sum.
        times: how often it was met.
    """

    place: Place
    sides: dict[str, Side]
    value: float = float("nan")
    times: int = 0

    def factor(self, positive: str, negative: str) -> float:
        """The expression as a multiple of mean(negative) - mean(positive); NaN where unclear."""
        gap = self.sides[negative].mean - self.sides[positive].mean
        size = abs(self.sides[negative].mean) + abs(self.sides[positive].mean)
        return self.value / gap if abs(gap) > _SURE * size else float("nan")


@dataclass(eq=False)
class Trace:
    """What was seen.

    Attributes:
        samplers: in the order of their first call.
        differences: in the order in which they were met.
        optimizers: names of the classes, of those that train.
        steps: of these, taken.
        seconds: of the traced run.
        state: hash of parameters and random states at its end; empty where the script ended itself.
        error: that ended the script.
    """

    samplers: list[Sampler] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    optimizers: list[str] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    state: str = ""
    error: str = ""


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
        self._steps, self._with_difference, self._all_steps = steps, 0, 0
        self._meets_here: dict[Place, Difference] = {}
        self._in_this_step: set[Place] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Everything that is seen is seen inside this block."""
        backward = torch.autograd.backward

        def watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            met = [each for root in roots for each in self._before_backward(root)]
            backward(tensors, *args, **kwargs)
            for difference, outputs in met:
                _add_cotangents(difference, outputs)

        torch.autograd.backward = watched
        try:
            with self._recording, _Places(self._computed):
                yield
        finally:
            torch.autograd.backward = backward

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
        self._all_steps += 1
        self.found.steps += 1
        self._with_difference += bool(self._in_this_step)
        self._in_this_step.clear()
        return (
            self._with_difference >= self._steps or self._all_steps >= _PATIENCE * self._steps
        )

    # -- what the recording tells -----------------------------------------------------------

    def _called(self, module: Any, args: tuple[Any, ...], kwargs: Any, output: Any) -> Stack:
        calls = stack(sys._getframe(1))
        given = (*args, *kwargs.values())
        x = next((v for v in given if isinstance(v, Tensor) and v.ndim), None)
        outputs = output.values() if isinstance(output, dict) else output
        for each in outputs if isinstance(output, tuple | list | dict) else (output,):
            is_energy = isinstance(each, Tensor) and each.grad_fn is not None
            if is_energy and x is not None and calls and self.chains.is_energy(module):
                seen = Output(module, x.detach(), tuple(each.shape), calls)
                remember(each, seen)
                each.register_hook(lambda gradient, seen=seen: _keep_cotangent(seen, gradient))
        return calls

    def _evaluated(self, evaluation: Evaluation) -> None:
        self._recording.evaluations.clear()
        if evaluation.noted:
            self.chains.add(evaluation, evaluation.noted)

    # -- what is computed -------------------------------------------------------------------

    def _computed(
        self, func: Any, args: tuple[Any, ...], result: Any, frame: FrameType
    ) -> None:
        """Before the first ``backward`` nothing is known; later, a known difference is read."""
        if getattr(func, "__name__", "") == "__setitem__":
            self._see_buffer(args, frame)
        difference = self._meets_here.get(Place.of(frame))
        if difference is not None and isinstance(result, Tensor) and result.grad_fn is not None:
            self._read(difference, result, frame)

    def _see_buffer(self, args: tuple[Any, ...], frame: FrameType) -> None:
        into, _, value = args
        for sampler in self.chains.samplers.values():
            rows = sampler.shape[0]
            if (
                isinstance(value, Tensor)
                and value.shape == (rows, *sampler.shape[1:])
                and into.shape[1:] == value.shape[1:]
                and len(into) > rows
            ):
                names = [name for name, each in frame.f_locals.items() if each is into]
                sampler.buffer = f"{names[0] if names else 'a tensor'} {tuple(into.shape)}"

    def _read(self, difference: Difference, result: Tensor, frame: FrameType) -> None:
        """What the two sides are called where they meet, and who called the samplers."""
        known: dict[Any, Rows] = {}
        behind(result.grad_fn, 0, known)
        here = difference.place.node
        inner = set() if here is None else {id(each) for each in ast.walk(here)}
        outputs = {output for output, _ in known[result.grad_fn]}
        for output in outputs:
            place = output.place
            (label, *others) = set(self._labels(output))
            for each in difference.sides.values():
                each.site = place if each.label in (label, *others) else each.site
            if not others and place is not None and place.code is frame.f_code:
                node = place.node
                if node is not None and id(node) in inner and label in difference.sides:
                    side = difference.sides[label]
                    side.expression, side.shape = place.source.segment(node), output.shape
        for name, value in frame.f_locals.items():
            if not isinstance(value, Tensor) or value.grad_fn is None or value.ndim == 0:
                continue
            rows = behind(value.grad_fn, value.output_nr, known)
            for label in label_of(rows, self._labels):
                side = difference.sides.get(label)
                of_label = sum(len(chosen) for _, chosen in rows)
                (output, *others) = {output for output, _ in rows}
                if side is not None and not others and output in outputs and len(value) == of_label:
                    side.expression, side.shape = name, tuple(value.shape)
                    side.mean = _per_sample(value)
        counts = {side.shape[:1] for side in difference.sides.values()}
        difference.value = _per_sample(result, is_batch=result.shape[:1] in counts)
        self._see_entries(stack(frame))

    def _see_entries(self, now: Stack) -> None:
        alive = {id(frame) for frame, _ in now}
        for chain, sampler in self.chains.recent:
            shared = [i for i, (frame, _) in enumerate(chain.calls) if id(frame) in alive]
            if shared:
                frame, at = chain.calls[shared[0]]
                sampler.entry = Place(frame.f_code, at)
                sampler.is_inline = chain.loop is frame

    # -- the loss ---------------------------------------------------------------------------

    def _labels(self, output: Output) -> list[str]:
        if output.labels is None:
            output.labels = self.chains.labels(output.x)
        return output.labels

    def _before_backward(self, root: Tensor) -> list[tuple[Difference, list[Output]]]:
        if root.grad_fn is None or not self.chains.recent:
            return []
        found = []
        known: dict[Any, Rows] = {}
        for node in meetings(root.grad_fn, self._labels, known):
            place = place_of(node)
            if place is None:
                continue
            difference = self._meets_here.get(place)
            if difference is None:
                sides = {label: Side(label) for label in sorted(label_of(known[node], self._labels))}
                difference = self._meets_here[place] = Difference(place, sides)
                self.found.differences.append(difference)
            difference.times += 1
            self._in_this_step.add(place)
            found.append((difference, [output for output, _ in known[node]]))
        return found


def _per_sample(x: Tensor, *, is_batch: bool = True) -> float:
    """Mean over samples of the sum over heads."""
    return float(x.detach().double().sum()) / (len(x) if is_batch and x.ndim else 1)


def _keep_cotangent(output: Output, gradient: Tensor) -> None:
    output.cotangent = gradient.detach().clone()


def _add_cotangents(difference: Difference, outputs: Sequence[Output]) -> None:
    """The gradient of the loss on each side, of rows that have one label."""
    totals: dict[str, float] = {}
    for output in outputs:
        if output.cotangent is not None and output.labels is not None:
            rows = output.cotangent.double().reshape(len(output.labels), -1).sum(1).tolist()
            for label, row in zip(output.labels, rows, strict=True):
                totals[label] = totals.get(label, 0.0) + row
    for label, total in totals.items():
        if label in difference.sides:
            difference.sides[label].cotangent = total
