"""The calls of samplers, as chains: a chain is a loop that evaluates one energy."""

from __future__ import annotations

import ast
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..sampling import Draw, Evaluation, Measured
from .graph import DATA, Edge, Experiment, Output
from .script import Place, Stack

__all__ = ["Chain", "Chains", "Names", "Sampler", "names_of"]

_NEAR = 3.0  # steps between the last evaluation and the samples
_MOST = 0.9  # of the rows must be as near
_KEPT = 8  # chains that a loss may use
_MEASURED = 3  # calls of one sampler
_NONE = Measured("no call has ended")
Names: TypeAlias = dict[Any, list[str]]  # in the code of each frame, and in each file


@dataclass(eq=False)
class Chain:
    """One call of a sampler. The second evaluation tells its loop and its sampler."""

    evaluations: list[Evaluation]
    calls: Stack  # at the first evaluation
    last_calls: Stack
    loop: Any = None  # the innermost frame that the evaluations share
    sampler: Sampler | None = None
    end: Tensor | None = None  # the samples, as a loss has them
    distance: float = math.inf  # of these from the last evaluation

    def loop_of(self, evaluation: Evaluation, calls: Stack) -> FrameType | None:
        """Return the frame of its loop where that has made an evaluation, too; else None."""
        before, shape = self.last_calls, self.evaluations[-1].x.shape
        shared = next((frame for frame in calls.frames if frame in before.frames), None)
        if shared is None or shape != evaluation.x.shape:
            return None
        # Of two places that no function shares, one is no part of the loop: a penalty's.
        is_one = calls.frames[0] is before.frames[0] or calls.places[0] == self.calls.places[0]
        if not (is_one if self.loop is None else self.loop is shared):
            return None
        was, now = (x.places[x.frames.index(shared)] for x in (before, calls))
        if len(self.evaluations) < 3 or was == now or was.loops[:1] == now.loops[:1]:
            return shared
        # In another loop of the function a chain begins far away.
        points = [x.x for x in (*self.evaluations[-3:], evaluation)]
        *steps, jump = (float(_lengths(b - a).mean()) for a, b in pairwise(points))
        return None if jump > _NEAR * max(steps) else shared


@dataclass(eq=False)
class Sampler:
    """The chains of one energy that one loop makes."""

    name: str  # of the function with the loop
    first: Evaluation  # of the module whose output is differentiated
    energy: Any  # that module, or the one whose method calls it
    loop: Place  # of that loop's evaluations
    site: Place  # the energy's call in the user's code
    names: Names  # of the energy
    methods: dict[Any, tuple[str, nn.Module, Names]]  # by code: its module's, names
    method: str | None = None  # that returns the loss's energies; empty for the module's own call
    entries: tuple[Place, ...] | None = None  # calls from beside the loss to the loop; once known
    calls: tuple[Place, ...] = ()  # all around the loop, from the inside out
    callees: dict[Place, Names] = field(default_factory=dict)  # what is called there, by its base
    lengths: list[int] = field(default_factory=list)  # evaluations of each call
    measured: Measured = _NONE
    driven: Experiment | None = None  # what was differentiated
    functions: list[tuple[Edge, float]] = field(default_factory=list)  # what it may follow
    slope: float = math.nan  # of the root in the loss's energies, where those are no one's output
    spot: tuple[Place, ast.expr] | None = None  # their expression, where it is the sampler's alone
    arguments: int = 1  # that the energy is given
    moves: int = 0  # which of those with an entry for each sample
    still: Tensor | None = None  # entries of a sample that no step moves
    sites: set[Place] = field(default_factory=set)  # where its chains call the energy

    def see(self, root: Edge | None) -> None:
        """Keep the energies in which the differentiated root is affine: it may follow these."""
        if root is None or self.functions:
            return
        driven = Experiment(root)
        outputs = driven.outputs
        if len({made.energy for made in outputs.values()}) == len(outputs) > 0:
            self.driven, count = driven, len(next(iter(outputs.values())).value)
            # An output itself before what is made of it, and that next to the root first.
            for edge in dict.fromkeys((*outputs, *reversed(driven.values))):
                value = driven.values[edge]
                if value.ndim and len(value) == count:
                    weight = driven.effect(edge).weight
                    if not math.isnan(weight):
                        self.functions.append((edge, weight / count))

    def aim(self, loss: Experiment, follows: Edge, slope: float) -> None:
        """Find the expression of the loss's energies in the sampler's code."""
        if self.spot is not None or self.driven is None:
            return
        values, places = self.driven.values, {x for made in loss.made.values() for x in made.calls}
        same = [  # the same in another shape, too
            edge
            for edge, by in [(follows, slope), *self.functions]
            if by == slope and torch.equal(values[edge].flatten(), values[follows].flatten())
        ]
        spots = [x for edge in same for x in self.driven.spots(edge) if x[0] not in places]
        self.spot = next(((place, node) for place, node, _ in spots), None)
        called = [self.methods[code] for _, _, code in spots if code in self.methods]
        is_output = isinstance(follows.made, Output) and not follows.made.part
        if called and not (is_output and self.names):
            self.method, self.energy, self.names = called[0]
        if not is_output:
            self.slope, self.measured = slope, _NONE

    def condition(self, made: Output, rows: list[int]) -> Tensor:
        """Return the entries of these input rows that no sampler step moves: (rows, entries)."""
        parts = [x[rows].double().reshape(len(rows), -1) for x in made.inputs]
        if self.moves < len(parts) and self.still is not None:
            entries = parts.pop(self.moves)
            parts += [entries[:, self.still]] if entries.shape[1:] == self.still.shape else []
        return torch.cat(parts, 1) if parts else torch.empty(len(rows), 0)

    @property
    def is_function(self) -> bool:
        """True where the energy is a function of the module's output, which no factor tempers."""
        return not math.isnan(self.slope) and self.method is None

    @cached_property
    def is_scalar(self) -> bool:
        """True where the sampler differentiates one number per sample."""
        cotangent = self.first.cotangent
        if cotangent is None:
            return False
        total = cotangent.double().reshape(len(cotangent) if cotangent.ndim else 1, -1).sum(1)
        return total.numel() == 1 or bool(total.std() < 1e-3 * total.abs().mean())


class Chains:
    """The open and the closed chains of a training run."""

    def __init__(self, draws: list[Draw | None]) -> None:
        self.samplers: dict[Any, Sampler] = {}  # by the code and the energy of their loops
        self._over: list[Chain] = []
        self._draws = draws
        self._open: dict[int, Chain] = {}

    @property
    def recent(self) -> list[tuple[Chain, Sampler]]:
        """The last chains; the open ones come last."""
        chains = [*self._over, *self._open.values()]
        known = [(chain, chain.sampler) for chain in chains if chain.sampler is not None]
        return [pair for pair in known if pair[1].is_scalar] or known

    def is_energy(self, module: nn.Module, *, is_made: bool) -> bool:
        """Tell whether a sampler differentiates this module, or a part of it.

        Of a part, where the result is made of what energies are: else the module samples.
        """
        known = self.samplers.values()
        energies = [s.first.energy for s in [s for s in known if s.is_scalar] or known]
        modules = [*module.modules()] if is_made else [module]
        return any(energy in modules or module in energy.modules() for energy in energies)

    def add(self, evaluation: Evaluation, calls: Stack) -> Chain:
        """Add an evaluation; ``calls`` are the user's frames when the energy was called."""
        key = id(evaluation.energy)
        chain = self._open.get(key)
        loop = chain and chain.loop_of(evaluation, calls)
        if chain is None or loop is None:
            self._end(key)
            chain = self._open[key] = Chain([evaluation], calls, calls)
        else:
            chain.loop, chain.last_calls = loop, calls
            chain.evaluations.append(evaluation)
            chain.sampler = chain.sampler or self._sampler_of(chain)
        return chain

    def end(self) -> None:
        """Close all chains at the end of a training step."""
        for key in list(self._open):
            self._end(key)
        self._draws[:] = [None] * len(self._draws)

    def forget(self) -> None:
        """Drop the measurements, which may be of chains from before the training."""
        for sampler in self.samplers.values():
            sampler.measured = _NONE
            del sampler.lengths[:-1]

    def see_calls(self, now: Sequence[Place]) -> None:
        """Find the calls that lead from these, of a loss, to the loops of samplers."""
        codes = [place.code for place in now]
        for chain, sampler in self.recent:
            frames, places = chain.calls
            inner = frames.index(chain.loop)
            ends = (at for at in range(inner, len(places)) if places[at].code in codes)
            if (shared := next(ends, None)) is not None:
                sampler.calls = places[inner + 1 :]
                sampler.entries = places[inner + 1 : shared + 1][::-1]
                for at in range(inner + 1, shared + 1):
                    name = getattr(places[at].base, "id", "")
                    base = {**frames[at].f_globals, **frames[at].f_locals}.get(name)
                    if base is not None and places[at] not in sampler.callees:
                        sampler.callees[places[at]] = names_of(base, frames[at:])

    def labels(self, x: Tensor) -> list[str]:
        """Label the rows of ``x``: the sampler at whose end a row lies, or ``DATA``."""
        labels = [DATA] * len(x)
        nearest = [math.inf] * len(x)
        for chain, sampler in self.recent:
            first, *ends = (e.x for e in chain.evaluations[:1] + chain.evaluations[-3:])
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
                is_near = (near <= limit).double().mean() > _MOST
                is_end = bool(is_near) and distance < float(to_start)
                if is_end and distance < chain.distance:
                    chain.distance, chain.end = distance, rows.clone()
                # Of steps as long as the data's range, all rows are near: the nearest are samples.
                is_end &= distance <= max(2 * chain.distance, limit / 4)
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
        sampler.sites.add(chain.calls.places[0])
        first, last = (chain.evaluations[at].x for at in (0, -1))
        sampler.still = (first == last).reshape(len(first), -1).all(0)
        if len(sampler.lengths) <= _MEASURED and not sampler.measured.is_exact:
            if not math.isnan(sampler.slope):
                for evaluation in chain.evaluations:
                    evaluation.cotangent = torch.full((len(evaluation.x),), sampler.slope)
            measured = Measured.of(chain.evaluations, self._draws, chain.end)
            sampler.measured = measured.after(sampler.measured)
        chain.evaluations = chain.evaluations[:1] + chain.evaluations[-3:]
        self._over = [*self._over[1 - _KEPT :], chain]

    def _sampler_of(self, chain: Chain) -> Sampler:
        first, (frames, places) = chain.evaluations[0], chain.calls
        place = places[frames.index(chain.loop)]
        key = (place.code, id(first.energy), first.x.shape[1:])
        if key not in self.samplers:
            taken = {sampler.name for sampler in self.samplers.values()}
            name = place.code.co_name if place.code.co_name != "<module>" else "the script"
            names = names_of(first.energy, frames)
            if name in taken:
                name += f" of {next((n for group in names.values() for n in group), len(taken))}"
            rest = place, places[0], names, _methods(chain)
            self.samplers[key] = Sampler(name, first, first.energy, *rest)
        return self.samplers[key]


def _methods(chain: Chain) -> dict[Any, tuple[str, nn.Module, Names]]:
    """Return the modules' methods between the loop and the energy: name, module, its names."""
    methods, frames = {}, chain.calls.frames
    for at, frame in enumerate(frames[: frames.index(chain.loop)], 1):
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        method = getattr(getattr(type(owner), code.co_name, None), "__code__", None)
        if isinstance(owner, nn.Module) and method is code:
            name = code.co_name.removeprefix("forward")
            methods[code] = name, owner, names_of(owner, frames[at:])
    return methods


def names_of(part: object, frames: Sequence[FrameType]) -> Names:
    """Return the names of a part, by the code of these frames and by their files."""
    names = defaultdict[Any, list[str]](list)
    for frame in frames:
        code = frame.f_code
        spaces = [(code, "", frame.f_locals), (code.co_filename, "", frame.f_globals)]
        for where, prefix, space in spaces:
            for name, value in space.items():
                index = name if name.isdigit() else repr(name)  # of a list or dict of modules
                path = f"{prefix}.{name}" if name.isidentifier() else f"{prefix}[{index}]"
                if value is part:
                    names[where].append(path.lstrip("."))
                # What self or a network has, and what that has.
                is_open = name == "self" or prefix or isinstance(value, nn.Module)
                if is_open and len(re.findall(r"[.[]", path)) < 3:
                    mine = getattr(value, "__dict__", {})
                    spaces.append((where, path, {**mine, **mine.get("_modules", {})}))
    return names


def _lengths(x: Tensor) -> Any:
    return x.double().reshape(len(x), -1).norm(dim=1)
