"""The samplers of a running trainer, and the expressions in which its energies meet."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ..sampling import Evaluation, Recording
from .chains import Chains, Names, Sampler, names_of
from .graph import DATA, Edge, Experiment, Operation, Output, edge_of
from .reading import Difference
from .script import Place, Stack, run, stack

__all__ = ["Guarded", "Trace", "trace_script"]

_PATIENCE = 10  # times as many steps are waited for a difference, where there is a sampler
# Their results are no values of the loss.
_GRADIENTS = torch.autograd.grad, torch.autograd.backward, Tensor.backward


class Guarded(BaseException):
    """The script makes a guard, at this place: it would write into the folder of a real run."""


def _guarded(*_: Any, **__: Any) -> None:
    places = stack().places
    raise Guarded(places[0] if places else "a place of its libraries")


def trace_script(script: Path, arguments: Sequence[str], steps: int) -> Trace:
    """Run a script until ``steps`` steps had a difference in their loss; ``Guarded`` at a guard."""
    trace, began = Trace(steps), time.perf_counter()
    watched = functools.partial(trace.before_backward, torch.autograd.backward)
    with (
        mock.patch("ebmguard.guard", _guarded),
        mock.patch("ebmguard.retrofit.guard", _guarded),
        mock.patch("torch.autograd.backward", watched),
        trace.recording,
        trace,
    ):
        trace.state, trace.error = run(script, arguments, trace.end_step)
    trace.seconds = time.perf_counter() - began
    trace.chains.end()
    stepping = {code for names in trace.optimizers.values() for code in names}
    for sampler in trace.samplers:
        if sampler.entries is None and sampler.loop.code in stepping:
            sampler.entries = ()  # Its loop stands beside the loss.
    return trace


class Trace(TorchFunctionMode):
    """A run: its samplers, its differences and what trains them.

    The mode writes on the nodes of the graph which calls made them of which energies.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.optimizers: dict[Optimizer, Names] = {}  # those that train, with their names
        self.steps, self.seconds = 0, 0.0  # steps of these
        self.state = self.error = ""  # hash of parameters and random states; what ended the script
        self.unread = ""  # why something could not be evaluated again
        self.recording = Recording(on_evaluation=self._evaluated, on_call=self._called)
        self.chains = Chains(self.recording.draws.log)
        self._differences: dict[Place, Difference] = {}
        self._wanted, self._contrastive = steps, set[int]()  # numbers of steps with a difference
        self._root: Edge | None = None  # of the gradient that is being computed
        self._rests = False  # while the trainer's own values are evaluated again

    @property
    def samplers(self) -> list[Sampler]:
        """The samplers, in their order."""
        return [*self.chains.samplers.values()]

    @property
    def differences(self) -> list[Difference]:
        """The differences that lower one side and raise another; all, where none does."""
        known = [*self._differences.values()]
        return [difference for difference in known if difference.is_sided] or known

    def trainer_of(self, sampler: Sampler) -> Names:
        """Return the names of the one optimizer that trains a sampler's energy."""
        weights = {*sampler.energy.parameters()}
        names = [n for o, n in self.optimizers.items() if not weights.isdisjoint(_owned(o))]
        return names[0] if len(names) == 1 else {}

    def before_backward(self, backward: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Look for differences in what ``backward`` is called on, then call it."""
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        for root in filter(None, map(edge_of, roots)):
            with self._resting():
                self._look_behind(root)
        self._root = edge_of(roots[0])
        backward(tensors, *args, **kwargs)

    def end_step(self, optimizer: Optimizer) -> bool:
        """Take an optimizer's step. Return whether the trace may end."""
        owned = _owned(optimizer)
        moving = [chain.evaluations[-1].leaf.shape for chain, _ in self.chains.recent]
        if len(owned) == 1 and owned[0].shape in moving and not isinstance(owned[0], nn.Parameter):
            return False  # It is the sampler's own.
        self.chains.end()
        if not self.optimizers:
            self.chains.forget()
        if optimizer not in self.optimizers:
            self.optimizers[optimizer] = names_of(optimizer, stack().frames)
        self.steps += 1
        patience = _PATIENCE if self.chains.samplers else 1
        return self._wanted <= max(len(self._contrastive), self.steps // patience)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._rests or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        made = None if func in _GRADIENTS else Operation.of(func, args, kwargs)
        if func is torch.autograd.grad:
            outputs = kwargs.get("outputs", args[0] if args else None)
            self._root = edge_of(outputs if isinstance(outputs, Tensor) else next(iter(outputs)))
        result = func(*args, **kwargs)
        if made is not None and (calls := stack()).places:
            made.mark(args[0] if result is None else result, calls)
        return result

    def _called(self, module: Any, args: tuple[Any, ...], kwargs: Any, output: Any) -> _Noted:
        calls, given = stack(), (*args, *kwargs.values())
        noted = _Noted(calls, arguments=sum(argument is not None for argument in given))
        inner = enumerate(output) if isinstance(output, tuple | list) else ()
        named: Iterable[Any] = output.items() if isinstance(output, dict) else inner
        parts = {f"[{key!r}]": x for key, x in named if isinstance(x, Tensor)}
        parts |= {"": output} if isinstance(output, Tensor) else {}
        for part, tensor in parts.items() if calls.places else ():
            tensors = [x for x in given if isinstance(x, Tensor)]
            batches = [x for x in tensors if x.shape[:1] == tensor.shape[:1]]
            if tensor.grad_fn is None or not tensor.ndim or not batches:
                continue
            noted.given = [*map(id, batches)]
            if part:
                noted.watch(part, tensor)
            if self.chains.is_energy(module, is_made=edge_of(tensor) is not None):
                made = Output(
                    module,
                    value=tensor.detach().clone(),
                    inputs=tuple(x.detach() for x in batches),
                    label_rows=self.chains.labels,
                    part=part,
                    arguments=noted.arguments,
                )
                made.mark(tensor, calls)
        return noted

    def _evaluated(self, evaluation: Evaluation) -> None:
        self.recording.evaluations.clear()
        noted = evaluation.note
        if noted is None or not noted.calls.places:
            return
        if evaluation.output is None and len(noted.parts) == 1:
            ((evaluation.output, evaluation.cotangent),) = noted.parts.values()
        if evaluation.output_shape[:1] == evaluation.x.shape[:1]:
            sampler = self.chains.add(evaluation, noted.calls).sampler
            if sampler is not None:
                sampler.arguments = noted.arguments
                if evaluation.input_id in noted.given:
                    sampler.moves = noted.given.index(evaluation.input_id)
                with self._resting():
                    sampler.see(self._root)

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

    def _look_behind(self, root: Edge) -> None:
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
            while len(users := {user for user, *_ in loss.users(edge)}) == 1:
                (edge,) = users
                if self._meet(loss, edge, is_first=False):
                    return

    def _meet(self, loss: Experiment, edge: Edge, *, is_first: bool) -> bool:
        labels = sorted(loss.kinds(edge), key=lambda label: (label != DATA, label))
        calls = loss.made[edge].calls
        self.chains.see_calls(calls)
        difference = Difference(calls[0], Experiment(edge), labels, effect=loss.effect(edge))
        difference.read(self.samplers)
        if is_first or difference.is_sided:
            if (known := self._differences.get(calls[0])) is not None:
                difference.times += known.times
            self._differences[calls[0]] = difference
            self._contrastive.add(self.steps)
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


def _owned(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
