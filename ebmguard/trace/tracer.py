"""The samplers of a running trainer, and the expressions in which its energies meet."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ..sampling import Evaluation, Recording
from .chains import Chains, Names, Sampler, names_of
from .experiment import Experiment, effect
from .graph import Edge, Operation, Output, edge_of
from .reading import Difference, Side, read
from .script import Place, Stack, run, stack

__all__ = ["Guarded", "Trace", "trace_script"]

_PATIENCE = 10  # times as many steps are waited for a difference, where there is a sampler
# Their results are no values of the loss.
_GRADIENTS = torch.autograd.grad, torch.autograd.backward, Tensor.backward


class Guarded(BaseException):
    """The script makes a guard, at this place: it would write into the folder of a real run."""


@dataclass(eq=False)
class Trace:
    """The samplers and differences of a run, in their order."""

    samplers: list[Sampler]
    differences: list[Difference]
    optimizers: dict[Optimizer, Names]  # those that train, with their names
    steps: int  # of these
    seconds: float
    state: str  # hash of parameters and random states; empty where the script ended itself
    error: str  # that ended the script
    unread: str = ""  # why something could not be evaluated again

    def trainer_of(self, sampler: Sampler) -> Names:
        """Return the names of the one optimizer that trains a sampler's energy."""
        weights = {*sampler.energy.parameters()}
        owned = [([p for g in o.param_groups for p in g["params"]], o) for o in self.optimizers]
        names = [self.optimizers[o] for own, o in owned if not weights.isdisjoint(own)]
        return names[0] if len(names) == 1 else {}


def trace_script(script: Path, arguments: Sequence[str], steps: int) -> Trace:
    """Run a script until ``steps`` steps had a difference in their loss; ``Guarded`` at a guard."""
    tracer, began = _Tracer(steps), time.perf_counter()
    with tracer.watching():
        state, error = run(script, arguments, tracer.end_step)
    seconds = time.perf_counter() - began
    tracer.chains.end()
    samplers = [*tracer.chains.samplers.values()]
    stepping = {code for names in tracer.optimizers.values() for code in names}
    for sampler in samplers:
        if sampler.entries is None and sampler.loop.code in stepping:
            sampler.entries = ()  # Its loop stands beside the loss.
    differences = [*tracer.differences.values()]
    differences = [difference for difference in differences if difference.is_sided] or differences
    known, taken = tracer.optimizers, tracer.taken
    return Trace(samplers, differences, known, taken, seconds, state, error, tracer.unread)


class _Tracer(TorchFunctionMode):
    """A mode that writes on the nodes of the graph which calls made them of which energies."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._recording = Recording(on_evaluation=self._evaluated, on_call=self._called)
        self.chains = Chains(self._recording.draws.log)
        self.differences: dict[Place, Difference] = {}
        self.optimizers: dict[Optimizer, Names] = {}
        self.taken = 0  # steps of these
        self._steps, self._contrastive = steps, set[int]()  # numbers of steps with a difference
        self._patched = ExitStack()
        self._root: Edge | None = None  # of the gradient that is being computed
        self.unread = ""  # why something could not be evaluated again
        self._rests = False  # while the trainer's own values are evaluated again

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs inside this block."""
        backward = torch.autograd.backward
        self._patched.callback(setattr, torch.autograd, "backward", backward)

        def watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            for root in filter(None, map(edge_of, roots)):
                with self._resting():
                    self._before_backward(root)
            self._root = edge_of(roots[0])
            backward(tensors, *args, **kwargs)

        torch.autograd.backward = watched
        for module in map(importlib.import_module, ("ebmguard", "ebmguard.retrofit")):
            self._patched.callback(setattr, module, "guard", module.guard)
            vars(module)["guard"] = _guarded
        with self._patched, self._recording, self:
            yield

    def end_step(self, optimizer: Optimizer) -> bool:
        """Take an optimizer's step. Return whether the trace may end."""
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        moving = [chain.evaluations[-1].leaf.shape for chain, _ in self.chains.recent]
        if len(owned) == 1 and owned[0].shape in moving and not isinstance(owned[0], nn.Parameter):
            return False  # It is the sampler's own.
        self.chains.end()
        if not self.optimizers:
            self.chains.forget()
        if optimizer not in self.optimizers:
            self.optimizers[optimizer] = names_of(optimizer, stack(sys._getframe(1)))
        self.taken += 1
        patience = _PATIENCE if self.chains.samplers else 1
        return self._steps <= max(len(self._contrastive), self.taken // patience)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._rests or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        made = None if func in _GRADIENTS else Operation.of(func, args, kwargs)
        if func is torch.autograd.grad:
            outputs = kwargs.get("outputs", args[0] if args else None)
            self._root = edge_of(outputs if isinstance(outputs, Tensor) else next(iter(outputs)))
        result = func(*args, **kwargs)
        calls = stack(sys._getframe(1)) if made is not None else ()
        if made is not None and calls:
            made.mark(args[0] if result is None else result, tuple(place for _, place in calls))
            # Before the first `backward` nothing is known; later, a known difference is read.
            difference = self.differences.get(calls[0][1])
            if difference is not None and (edge := edge_of(result)) is not None:
                self._see_entries(calls)
                with self._resting():
                    samplers = [*self.chains.samplers.values()]
                    read(difference, samplers, Experiment(edge), args, calls[0][0].f_locals)
        return result

    def _called(self, module: Any, args: tuple[Any, ...], kwargs: Any, output: Any) -> _Noted:
        calls, given = stack(sys._getframe(1)), (*args, *kwargs.values())
        noted = _Noted(calls, arguments=sum(argument is not None for argument in given))
        for part, tensor in _parts(output) if calls else ():
            inputs = (x for x in given if isinstance(x, Tensor))
            batches = [x for x in inputs if x.shape[:1] == tensor.shape[:1]]
            if tensor.grad_fn is None or not tensor.ndim or not batches:
                continue
            noted.given = [*map(id, batches)]
            if part:
                noted.watch(part, tensor)
            if self.chains.is_energy(module, is_made=edge_of(tensor) is not None):
                value, places = tensor.detach().clone(), tuple(place for _, place in calls)
                made = tuple(x.detach() for x in batches), value, places, self.chains.labels
                Output(module, *made, part, noted.arguments).mark(tensor)
        return noted

    def _evaluated(self, evaluation: Evaluation) -> None:
        self._recording.evaluations.clear()
        noted = evaluation.note
        if noted is None or not noted.calls:
            return
        if evaluation.output is None and len(noted.parts) == 1:
            ((evaluation.output, evaluation.cotangent),) = noted.parts.values()
        if evaluation.output_shape[:1] == evaluation.x.shape[:1]:
            chain = self.chains.add(evaluation, noted.calls)
            if chain.sampler is not None:
                chain.sampler.arguments = noted.arguments
                if evaluation.input_id in noted.given:
                    chain.sampler.moves = noted.given.index(evaluation.input_id)
                with self._resting():
                    chain.sampler.see(self._root)

    @contextmanager
    def _resting(self) -> Iterator[None]:
        before, self._rests = self._rests, True
        try:
            with torch.enable_grad():  # Gradients may be under way.
                yield
        except (RuntimeError, TypeError, ValueError, IndexError, OSError, SyntaxError) as failed:
            self.unread = f"{type(failed).__name__}: {failed}"  # The trainer goes on.
        finally:
            self._rests = before

    def _see_entries(self, now: Stack) -> None:
        alive = {id(frame) for frame, _ in now}
        for chain, sampler in self.chains.recent:
            frames = [frame for frame, _ in chain.calls]
            shared = next((i for i, frame in enumerate(frames) if id(frame) in alive), None)
            if shared is not None:
                around = chain.calls[frames.index(chain.loop) + 1 :]
                calls = chain.calls[frames.index(chain.loop) + 1 : shared + 1]
                sampler.calls = tuple(place for _, place in around)
                sampler.entries = tuple(place for _, place in reversed(calls))
                for at, (frame, place) in enumerate(calls):
                    name = place.base.id if place.base else ""
                    base = {**frame.f_globals, **frame.f_locals}.get(name)
                    if base is not None and place not in sampler.callees:
                        sampler.callees[place] = names_of(base, around[at:])

    def _before_backward(self, root: Edge) -> None:
        if not self.chains.recent:
            return
        loss = Experiment(root)
        for x in (x for out in loss.outputs.values() for x in out.inputs):
            self.chains.labels(x)  # All rows are seen before the first has its label.
        if len({label for out in loss.outputs.values() for label in out.labels}) < 2:
            return
        met = [*loss.meetings()]
        is_sided = [self._meet(loss, edge, is_first=True) for edge in met]
        if any(is_sided):
            return
        for edge in met:  # Squares may have met first: what has a slope is added to them later.
            while len(users := {user for user, _ in loss.users(edge)}) == 1:
                (edge,) = users
                if self._meet(loss, edge, is_first=False):
                    return

    def _meet(self, loss: Experiment, edge: Edge, *, is_first: bool) -> bool:
        made = edge.made
        assert isinstance(made, Operation)
        place = made.calls[0]
        difference = self.differences.get(place)
        if difference is None:
            difference = Difference(place, {label: Side() for label in sorted(loss.kinds(edge))})
            read(difference, [*self.chains.samplers.values()], Experiment(edge))
            if not (is_first or difference.is_sided):
                return False
            self.differences[place] = difference
        difference.times += 1
        difference.effect = effect(loss.root, edge, loss.values[edge])
        self._contrastive.add(self.taken)
        return difference.is_sided


@dataclass
class _Noted:
    """A call: the user's frames, and the parts of its result with a gradient."""

    calls: Stack
    arguments: int
    given: list[int] = field(default_factory=list)  # ids of those with an entry for each sample
    parts: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def watch(self, part: str, tensor: Tensor) -> None:
        value = tensor.detach().clone()

        def look(gradient: Tensor) -> None:
            self.parts[part] = value, gradient.detach().clone()

        tensor.register_hook(look)  # type: ignore[no-untyped-call]


def _parts(output: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a result, with the expression that takes them out of it."""
    if isinstance(output, Tensor):
        yield "", output
    inner = enumerate(output) if isinstance(output, tuple | list) else ()
    named: Iterable[Any] = output.items() if isinstance(output, dict) else inner
    yield from ((f"[{key!r}]", tensor) for key, tensor in named if isinstance(tensor, Tensor))


def _guarded(*_: Any, **__: Any) -> None:
    calls = stack(sys._getframe(1))
    raise Guarded(calls[0][1] if calls else "a place of its libraries")
