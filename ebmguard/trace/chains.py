"""Calls of samplers, found in the evaluations of energies: each loop over one energy is a chain."""

from __future__ import annotations

import ast
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..sampling import Draw, Evaluation, Measured
from .experiment import Experiment, effect, operand
from .graph import DATA, Edge, Operation, Output, behind, evaluate
from .script import Place, Stack

__all__ = ["Chain", "Chains", "Sampler"]

_NEAR = 3.0  # steps between the last evaluation and the samples
_MOST = 0.9  # of the rows must be as near
_KEPT = 8  # chains that a loss may use
_MEASURED = 3  # calls of one sampler


@dataclass(eq=False)
class Chain:
    """One call of a sampler; its loop and whose it is are known from the second evaluation on."""

    evaluations: list[Evaluation]
    calls: Stack  # at the first evaluation
    last_calls: Stack
    loop: Any = None  # the innermost frame that the evaluations share
    sampler: Sampler | None = None


@dataclass(eq=False)
class Sampler:
    """The chains of one energy that one loop makes."""

    name: str  # of the function with the loop
    first: Evaluation  # of its energy, the module whose output is differentiated
    loop: Place  # of that loop's evaluations
    site: Place  # the energy's call in the user's code
    names: dict[Any, list[str]]  # of the energy, in the code of each frame and in each file
    method: str  # of the energy that is called; empty for the module's own call
    entries: tuple[Place, ...] | None = None  # calls from beside the loss to the loop; once known
    lengths: list[int] = field(default_factory=list)  # evaluations of each call
    measured: Measured = field(default_factory=lambda: Measured("no call has ended"))
    buffer: str = ""  # the name of a larger tensor into which samples are written
    part: str = ""  # of what the energy returns, such as "[1]"; empty where it is one tensor
    root: Edge | None = None  # what was differentiated last
    slope: float = math.nan  # of that in the energies of the loss, where those are a function
    spot: tuple[Place, ast.expr] | None = None  # the expression of these, where it is the sampler's
    arguments: int = 1  # that the energy is given

    @cached_property
    def functions(self) -> list[tuple[Edge, Edge, float]]:
        """Energies that it may follow, as the output and what is made of it: each with its slope.

        What is differentiated is affine in them, and the same in all samples.
        """
        found = [] if self.root is None else [*behind(self.root)]
        outputs = [each for each in found if isinstance(each.made, Output)]
        if self.root is None or len(outputs) != 1:
            return []
        values, count = evaluate(self.root, {}), len(outputs[0].made.x)  # type: ignore[union-attr]
        slopes = [
            (each, effect(self.root, each, values[each]).weight / count)
            for each in found
            if values[each].ndim and len(values[each]) == count
        ]
        return [(each, outputs[0], slope) for each, slope in slopes if not math.isnan(slope)]

    def aim(self, loss: Experiment, follows: Edge, of: Edge, slope: float) -> None:
        """The loss has these of its functions for energies: where they are in its own code."""
        if follows != of and math.isnan(self.slope):
            self.slope, self.measured = slope, Measured("no call has ended")
        own, places = Experiment(self.root or of), set[Place]()
        for made in loss.made.values():
            places.update(made.calls)
        spots = [spot for user, at in own.users(follows) for spot in _spots(follows, user, at)]
        self.spot = next((spot for spot in spots if spot[0] not in places), None)

    @property
    def is_function(self) -> bool:
        """Whether the energy is made of what the module returns: its parts, or a function."""
        return bool(self.part) or not math.isnan(self.slope)

    @cached_property
    def is_scalar(self) -> bool:
        """Whether one number per sample is differentiated: heads of which the sum is the same."""
        each = self.first.cotangent
        if each is None:
            return False
        total = each.double().reshape(len(each) if each.ndim else 1, -1).sum(1)
        return total.numel() == 1 or bool(total.std() < 1e-3 * total.abs().mean())

    @cached_property
    def is_linear(self) -> bool:
        """Whether heads are differentiated alike in all samples: no logsumexp of them."""
        each = self.first.cotangent
        if each is None or each.ndim < 2 or each[0].numel() == 1:
            return True
        return bool((each - each[:1]).abs().max() <= 1e-3 * each.abs().max())


class Chains:
    """Groups evaluations as they come."""

    def __init__(self, draws: list[Draw | None]) -> None:
        self.samplers: dict[Any, Sampler] = {}  # by the code and the energy of their loops
        self._over: list[Chain] = []
        self._draws = draws
        self._open: dict[int, Chain] = {}
        self._methods: dict[int, str] = {}

    @property
    def recent(self) -> list[tuple[Chain, Sampler]]:
        """The last chains of energies, those that are under way last."""
        chains = [*self._over, *self._open.values()]
        known = [(each, each.sampler) for each in chains if each.sampler is not None]
        return [pair for pair in known if pair[1].is_scalar] or known

    def is_energy(self, module: nn.Module) -> bool:
        """Whether a sampler differentiates one number per sample of this module."""
        known = self.samplers.values()
        energies = [s.first.energy for s in [s for s in known if s.is_scalar] or known]
        return any(each in module.modules() or module in each.modules() for each in energies)

    def replace(self, sampler: Sampler, energy: object, method: str) -> None:
        """A sampler of parts is one of ``energy`` by ``method``, which is called from here on."""
        if self._methods.get(id(energy)) != "":  # its own call, in which that method is called
            self._methods[id(energy)] = method
        self.samplers = {k: each for k, each in self.samplers.items() if each is not sampler}
        self._over = [each for each in self._over if each.sampler is not sampler]
        self._open = {k: each for k, each in self._open.items() if each.sampler is not sampler}

    def add(self, evaluation: Evaluation, calls: Stack) -> Chain:
        """One more evaluation; ``calls`` are the user's frames when the energy was called."""
        key = id(evaluation.energy)
        chain = self._open.get(key)
        if chain is not None and chain.evaluations[-1].x.shape == evaluation.x.shape:
            before = [frame for frame, _ in chain.last_calls]
            shared = next((frame for frame, _ in calls if frame in before), None)
            # Of two places that no function shares, one is no part of the loop: a penalty's.
            is_one = calls[0][0] is before[0] or calls[0][1] == chain.calls[0][1]
            if shared is not None and (is_one if chain.loop is None else chain.loop is shared):
                chain.loop = shared
                chain.evaluations.append(evaluation)
                chain.last_calls = calls
                chain.sampler = chain.sampler or self._sampler_of(chain)
                return chain
        self._end(key)
        self._open[key] = Chain([evaluation], calls, calls)
        return self._open[key]

    def end(self) -> None:
        """A training step is over, and so are all chains."""
        for key in list(self._open):
            self._end(key)
        self._draws[:] = [None] * len(self._draws)

    def labels(self, x: Tensor) -> list[str]:
        """For each row of ``x`` the sampler at whose end it lies, or ``DATA``."""
        labels = [DATA] * len(x)
        nearest = [math.inf] * len(x)
        for chain, sampler in self.recent:
            first, *ends = (each.x for each in chain.evaluations[:1] + chain.evaluations[-3:])
            last = ends[-1]
            if last.shape[1:] != x.shape[1:] or last.device != x.device:
                continue
            # The last gradient may be taken where the one before it was.
            squares = [float(_lengths(b - a).square().mean()) for a, b in pairwise(ends)]
            limit = _NEAR * math.sqrt(max(squares))
            count = len(last)
            for at in {*range(0, len(x) - count + 1, count), max(0, len(x) - count)}:
                rows = x.detach()[at : at + count]
                near = _lengths(rows - last[: len(rows)])
                distance, to_start = float(near.mean()), _lengths(rows - first[: len(rows)]).mean()
                # Data at which the chains have started is no sample.
                is_end = (near <= limit).double().mean() > _MOST and distance < to_start
                if is_end and distance < nearest[at]:
                    labels[at : at + count] = [sampler.name] * len(rows)
                    nearest[at : at + count] = [distance] * len(rows)
        return labels

    def _end(self, key: int) -> None:
        chain = self._open.pop(key, None)
        if chain is None or chain.sampler is None:
            return
        sampler = chain.sampler
        sampler.lengths.append(len(chain.evaluations))
        if len(sampler.lengths) <= _MEASURED and not sampler.measured.is_exact:
            if not math.isnan(sampler.slope):
                for each in chain.evaluations:
                    each.cotangent = torch.full((len(each.x),), sampler.slope)
            sampler.measured = Measured.of(chain.evaluations, self._draws)
        chain.evaluations = chain.evaluations[:1] + chain.evaluations[-3:]
        self._over = [*self._over[1 - _KEPT :], chain]

    def _sampler_of(self, chain: Chain) -> Sampler:
        first = chain.evaluations[0]
        place = next(place for frame, place in chain.calls if frame is chain.loop)
        key = (place.code, id(first.energy), first.x.shape[1:])
        if key not in self.samplers:
            taken = {each.name for each in self.samplers.values()}
            name = place.code.co_name if place.code.co_name != "<module>" else "the script"
            names = _names(first.energy, chain.calls)
            if name in taken:
                name += f" of {next((n for group in names.values() for n in group), len(taken))}"
            site, method = chain.calls[0][1], self._methods.get(id(first.energy), "")
            self.samplers[key] = Sampler(name, first, place, site, names, method)
        return self.samplers[key]


def _spots(follows: Edge, user: Edge, at: int) -> Iterator[tuple[Place, ast.expr]]:
    """The expressions that are energies, one inside another: what a call is upon, and calls."""
    made, call = follows.made, user.made
    if isinstance(made, Output) and not made.part and (node := made.calls[0].node) is not None:
        yield made.calls[0], node
    if isinstance(call, Operation) and (node := operand(call, at)) is not None:
        yield call.calls[0], node
    if made is not None and call is not None and not isinstance(call, Output):
        for place in made.calls[1:]:
            if place not in call.calls and (node := place.node) is not None:
                yield place, node


def _lengths(x: Tensor) -> Any:
    return x.double().flatten(1).norm(dim=1)


def _names(module: object, calls: Stack) -> dict[Any, list[str]]:
    found = defaultdict[Any, list[str]](list)
    for frame, _ in calls:
        code, mine = frame.f_code, _attributes(frame.f_locals.get("self"))
        spaces = [(code, "", frame.f_locals), (code.co_filename, "", frame.f_globals)]
        spaces += [(code, "self.", mine)]
        spaces += [(code, f"self.{name}.", _attributes(part)) for name, part in mine.items()]
        for where, prefix, space in spaces:
            found[where] += [prefix + name for name, each in space.items() if each is module]
    return found


def _attributes(of: object) -> dict[str, object]:
    mine = getattr(of, "__dict__", {})
    return {**mine, **mine.get("_modules", {})}
