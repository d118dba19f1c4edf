"""The calls of samplers, as chains: a chain is a loop that evaluates one energy."""

from __future__ import annotations

import ast
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..sampling import Draw, Evaluation, Measured
from .experiment import Experiment, effect, operand
from .graph import DATA, Edge, Operation, Output, behind, evaluate
from .script import Place, Stack

__all__ = ["Chain", "Chains", "Names", "Sampler", "names_of"]

_NEAR = 3.0  # steps between the last evaluation and the samples
_MOST = 0.9  # of the rows must be as near
_KEPT = 8  # chains that a loss may use
_MEASURED = 3  # calls of one sampler
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
    measured: Measured = field(default_factory=lambda: Measured("no call has ended"))
    root: Edge | None = None  # what was differentiated
    outputs: list[Edge] = field(default_factory=list)  # behind it
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
        graph, values = behind(root), evaluate(root, {})
        outputs = {e: made for e, made in graph.items() if isinstance(made, Output)}
        if len({made.energy for made in outputs.values()}) == len(outputs) > 0:
            count = len(next(iter(outputs.values())).value)
            self.root, self.outputs = root, [*outputs]
            # An output itself before what is made of it, and that next to the root first.
            later = [*values.items()][::-1]
            for edge, value in sorted(later, key=lambda pair: pair[0] not in outputs):
                is_batch = value.ndim and len(value) == count
                weight = effect(root, edge, value).weight if is_batch else math.nan
                if not math.isnan(weight):
                    self.functions.append((edge, weight / count))

    def aim(self, loss: Experiment, follows: Edge, slope: float) -> None:
        """Find the expression of the loss's energies in the sampler's code."""
        if self.spot is not None or self.root is None:
            return
        driven, places = Experiment(self.root), set[Place]()
        for made in loss.made.values():
            places.update(made.calls)
        value = driven.values[follows].flatten()
        alike = [e for e, by in self.functions if by == slope]  # the same in another shape, too
        alike = [e for e in alike if torch.equal(driven.values[e].flatten(), value)]
        spots = list[tuple[Place, ast.expr, Any]]()
        for edge in [follows, *alike]:
            users: list[tuple[Edge | None, tuple[int, int]]] = [*driven.users(edge)]
            for user, at in users or [(None, (0, 0))]:
                spots += _spots(edge, user, at)
        spots = [spot for spot in spots if spot[0] not in places]
        self.spot = next(((place, node) for place, node, _ in spots), None)
        called = [self.methods[code] for _, _, code in spots if code in self.methods]
        is_output = isinstance(follows.made, Output) and not follows.made.part
        if called and not (is_output and self.names):
            self.method, self.energy, self.names = called[0]
        if not is_output:
            self.slope, self.measured = slope, Measured("no call has ended")

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
        if chain is not None and chain.evaluations[-1].x.shape == evaluation.x.shape:
            before = [frame for frame, _ in chain.last_calls]
            shared = next((frame for frame, _ in calls if frame in before), None)
            # Of two places that no function shares, one is no part of the loop: a penalty's.
            is_one = calls[0][0] is before[0] or calls[0][1] == chain.calls[0][1]
            is_new = shared is not None and _is_new(chain, evaluation, calls, shared)
            is_same = is_one if chain.loop is None else chain.loop is shared
            if shared is not None and is_same and not is_new:
                chain.loop = shared
                chain.evaluations.append(evaluation)
                chain.last_calls = calls
                chain.sampler = chain.sampler or self._sampler_of(chain)
                return chain
        self._end(key)
        self._open[key] = Chain([evaluation], calls, calls)
        return self._open[key]

    def end(self) -> None:
        """Close all chains at the end of a training step."""
        for key in list(self._open):
            self._end(key)
        self._draws[:] = [None] * len(self._draws)

    def forget(self) -> None:
        """Drop the measurements, which may be of chains from before the training."""
        for sampler in self.samplers.values():
            sampler.measured = Measured("no call has ended")
            del sampler.lengths[:-1]

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
        sampler.sites.add(chain.calls[0][1])
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
        first = chain.evaluations[0]
        place = next(place for frame, place in chain.calls if frame is chain.loop)
        key = (place.code, id(first.energy), first.x.shape[1:])
        if key not in self.samplers:
            taken = {sampler.name for sampler in self.samplers.values()}
            name = place.code.co_name if place.code.co_name != "<module>" else "the script"
            names = names_of(first.energy, chain.calls)
            if name in taken:
                name += f" of {next((n for group in names.values() for n in group), len(taken))}"
            site, methods = chain.calls[0][1], _methods(chain)
            self.samplers[key] = Sampler(name, first, first.energy, place, site, names, methods)
        return self.samplers[key]


def _is_new(chain: Chain, evaluation: Evaluation, calls: Stack, shared: Any) -> bool:
    """Tell whether it begins another chain: in another loop of the function, far away."""
    if len(chain.evaluations) < 3:
        return False
    before, now = (next(p for f, p in x if f is shared) for x in (chain.last_calls, calls))
    if before == now or before.loops[:1] == now.loops[:1]:
        return False
    *steps, jump = (
        float(_lengths(b.x - a.x).mean())
        for a, b in pairwise([*chain.evaluations[-3:], evaluation])
    )
    return jump > _NEAR * max(steps)


def _methods(chain: Chain) -> dict[Any, tuple[str, nn.Module, Names]]:
    """Return the modules' methods between the loop and the energy: name, module, its names."""
    methods = {}
    loop = [frame for frame, _ in chain.calls].index(chain.loop)
    for at, (frame, _) in enumerate(chain.calls[:loop]):
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        method = getattr(getattr(type(owner), code.co_name, None), "__code__", None)
        if isinstance(owner, nn.Module) and method is code:
            name = code.co_name.removeprefix("forward")
            methods[code] = name, owner, names_of(owner, chain.calls[at + 1 :])
    return methods


def _spots(
    follows: Edge, user: Edge | None, at: tuple[int, int]
) -> Iterator[tuple[Place, ast.expr, Any]]:
    """Yield the expressions of an energy, from the inside out, with the code that they call."""
    made, call = follows.made, user.made if user else None
    is_whole = not made.part if isinstance(made, Output) else call is None
    if made is not None and is_whole and (node := made.calls[0].node) is not None:
        yield made.calls[0], node, None
    if isinstance(call, Operation) and (node := operand(call, at)) is not None:
        yield call.calls[0], node, None
    if made is not None and isinstance(call, Operation):
        for inner, place in pairwise(made.calls):
            if place not in call.calls and (node := place.node) is not None:
                yield place, node, inner.code


def _lengths(x: Tensor) -> Any:
    return x.double().reshape(len(x), -1).norm(dim=1)


def names_of(part: object, calls: Stack) -> Names:
    """Return the names of a part, by the code of these frames and by their files."""
    names = defaultdict[Any, list[str]](list)
    for frame, _ in calls:
        code = frame.f_code
        spaces = [(code, "", frame.f_locals), (code.co_filename, "", frame.f_globals)]
        for where, prefix, space in spaces:
            names[where] += [prefix + name for name, value in space.items() if value is part]
            if prefix.count(".") < 2:  # what self or a network has, and what that has
                inner = {
                    name: value
                    for name, value in space.items()
                    if name == "self" or prefix or isinstance(value, nn.Module)
                }
                spaces += [
                    (where, f"{prefix}{n}.", _attributes(value)) for n, value in inner.items()
                ]
    return names


def _attributes(of: object) -> dict[str, object]:
    mine = getattr(of, "__dict__", {})
    return {**mine, **mine.get("_modules", {})}
