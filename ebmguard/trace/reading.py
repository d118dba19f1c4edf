"""The expression in which energies of samples and of data meet, and what its two sides are."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from .chains import Sampler
from .graph import (
    NO_EFFECT,
    SURE,
    Edge,
    Effect,
    Experiment,
    Operation,
    edge_of,
    effect,
    evaluate,
    is_same,
    moved,
)
from .script import Place

__all__ = ["Difference", "Side"]


@dataclass(eq=False)
class Side:
    """One side of a difference: energies that a sampler follows, as the loss has them."""

    edge: Edge | None = None
    effect: Effect = NO_EFFECT  # on the difference
    sign: int = 0  # -1 where they are the negatives of what the sampler follows; 0: another energy
    is_here: bool = False  # whether they stand in the code of the difference
    name: str = ""  # the user's: one energy for each sample
    node: ast.expr | None = None  # the expression, where it has no name
    uses: tuple[ast.expr, ...] = ()  # where the difference has them
    shape: tuple[int, ...] = ()
    mean: float = math.nan
    bends: str = ""  # the first thing that is not affine in them, such as a clamp
    arguments: int = 1  # of the module: x, and what else
    rows: str | None = None  # what makes them a row of negatives for each positive, if they are

    @property
    def rank(self) -> tuple[bool, ...]:
        """The fitness of these energies for an expression of the difference; higher is better."""
        is_one = abs(abs(self.effect.weight) - 1) < SURE
        is_read = bool(self.sign), is_one, not math.isnan(self.effect.total)
        return *is_read, self.is_here, bool(self.name), self.sign > 0

    @property
    def weight(self) -> float:
        """The slope of the difference in the mean of the sampler's energy; NaN: none."""
        return self.sign * self.effect.weight

    def turned(self, text: str) -> str:
        """Return the text of these energies with the sign of the sampler's energy."""
        return f"-{text}" if self.sign < 0 else text


@dataclass(eq=False)
class Difference:
    """A place where energies of samples and of data meet."""

    place: Place
    labels: list[str]  # "data" first, and the samplers' names
    sides: dict[str, Side] = field(default_factory=dict)  # of these
    times: int = 0  # it was met
    effect: Effect = NO_EFFECT  # on the loss
    is_whole: bool = False  # it is that of its sides' means, and nothing beside
    is_of_others: bool = False  # than those that a sampler follows
    is_unpaired: bool = False  # it has conditions, and not one row of samples for each
    is_softmax: bool = False  # of each positive among its negatives: InfoNCE

    @property
    def elsewhere(self) -> set[int]:
        """The lines of its file with the same expression, this one too."""
        node, nodes = self.place.node, self.place.source.nodes
        same = [other for other in nodes if node and isinstance(other, type(node))]
        return {e.lineno for e in same if node and ast.dump(e) == ast.dump(node)}

    @property
    def is_sided(self) -> bool:
        """True where it lowers one side and raises another."""
        slopes = [side.sign * side.effect.total for side in self.sides.values()]
        return min(slopes) < 0 < max(slopes)

    def pull(self, label: str) -> float:
        """Return the slope of the loss in a side's energies; below 0, it raises them."""
        side = self.sides[label]
        return side.sign * self.effect.total * side.effect.total

    def read(
        self,
        samplers: Sequence[Sampler],
        experiment: Experiment,
        args: Sequence[Any] = (),
        values: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Read the sides from a call of the difference with these arguments and local names."""
        names = {edge_of(value): name for name, value in values.items() if name.isidentifier()}
        here = self.place.node
        operands = [here.left, here.right] if isinstance(here, ast.BinOp) else []
        for node, value in zip(operands, args, strict=False):
            names[edge_of(value)] = self.place.source.segment(node)
        ways: list[tuple[Sampler | None, tuple[Edge, float] | None]]
        ways = [(s, way) for s in samplers if s.name in self.labels for way in s.functions]
        tried = []
        for way in ways or [(None, None)]:
            choices = [self._choices(experiment, label, *way, names) for label in self.labels]
            best = [max(reversed(options), key=lambda side: side.rank) for options in choices]
            ranks = [*map(sum, zip(*(side.rank for side in best), strict=True))]
            tried.append((ranks, best, [options[:2][-1] for options in choices], *way))
        _, best, firsts, sampler, follows = max(tried, key=lambda way: way[0])
        turn = 0
        for chosen in (firsts, best):  # all of the energies, as a softmax has them; else the best
            self.sides = dict(zip(self.labels, chosen, strict=True))
            edges = [side.edge for side in chosen if side.edge is not None]
            if sampler is not None and len(edges) == len(self.labels) == 2:
                self._pair(sampler, experiment, *edges)
                if turn := self._softmax(experiment, *edges):
                    break
        self.is_softmax, sides = bool(turn), [*self.sides.values()]
        for side, slope in zip(sides, (-turn, turn), strict=False):
            if side.edge is not None:
                self._find(experiment, side.edge, side)
            if turn:
                side.effect, side.bends = Effect(slope, slope), ""
        if not self.is_sided:
            lasts = [[*experiment.of_samples(label)][-1:] for label in self.labels]
            ends = [(edge, len(experiment.values[edge])) for last in lasts for edge, _ in last]
            slopes = [experiment.effect(*end).weight for end in ends]
            self.is_of_others = len(slopes) == len(sides) and min(slopes) < 0 < max(slopes)
        if all(side.sign for side in sides):
            total = experiment.values[experiment.root].detach().double()
            is_batch = total.ndim and len(total) in [side.shape[0] for side in sides]
            mean = float(total.sum() / (len(total) if is_batch else 1))
            terms = sum(side.effect.weight * side.mean for side in sides)
            self.is_whole = math.isclose(mean, terms, rel_tol=SURE, abs_tol=1e-5) or bool(turn)
            if sampler is not None and follows is not None:
                sampler.aim(experiment, *follows)

    def _choices(
        self,
        experiment: Experiment,
        label: str,
        sampler: Sampler | None,
        follows: tuple[Edge, float] | None,
        names: Mapping[Any, str],
    ) -> list[Side]:
        """Return the energies of a side that a sampler follows, or their negatives."""
        choices = [Side()]
        for edge, rows in experiment.of_samples(label):
            one, value = next(iter(rows)), experiment.values[edge].detach()
            source = (follows[0], sampler.outputs) if sampler and follows else (one, [one])
            if sign := is_same(*source, rows, value):
                how, shape = experiment.effect(edge, len(value)), tuple(value.shape)
                codes = [call.calls[0].code for _, call, _ in experiment.users(edge)]
                side = Side(edge, how, sign, self.place.code in codes, names.get(edge, ""))
                side.shape, side.mean = shape, float(value.double().sum() / len(value))
                side.arguments = experiment.outputs[one].arguments
                choices.append(side)
        return choices

    def _pair(self, sampler: Sampler, experiment: Experiment, pos: Edge, neg: Edge) -> None:
        """Find out whether positives have a row of negatives, or those of their condition."""
        p, q = experiment.values[pos], experiment.values[neg]
        side, count = self.sides[self.labels[1]], q.numel() // len(p)
        ends = [next(iter(experiment.rows[edge].items())) for edge in (pos, neg)]
        first = experiment.outputs[ends[0][0]]
        a, b = (sampler.condition(experiment.outputs[output], rows) for output, rows in ends)
        is_varied = bool((a != a[:1]).any())
        is_repeated = torch.equal(b, a.repeat_interleave(count, 0))
        is_row = len(b) == len(q) or is_repeated
        if count > 1 and q.shape == (len(p), count) and p.numel() == len(p) and is_row:
            if side.rows is None:
                side.effect = Effect(side.effect.weight * count, *side.effect[1:])
                side.mean /= count
            side.rows = ""
        elif is_varied and p.numel() == len(p) == len({*map(tuple, a.tolist())}):
            if is_repeated:
                narrow = "" if q.ndim > 1 else "[:, None]"
                side.rows = narrow if count == 1 else f".reshape(-1, {count})"
            elif torch.equal(b, a.repeat(count, 1)):
                side.rows = f".reshape({count}, -1).T"
        self.is_unpaired = is_varied and len(first.inputs) > 1 and side.rows is None

    def _softmax(self, experiment: Experiment, pos: Edge, neg: Edge) -> int:
        """1 where it is InfoNCE of energies that are high on data; -1 its or their negatives."""
        side = self.sides[self.labels[1]]
        signs = {1, -1, 2, -2} if side.effect.bends else set[int]()
        for amplitude in (0.0, 1.0, -1.0) if signs else ():
            p, q = (moved(experiment.values[edge], amplitude) for edge in (pos, neg))
            value = evaluate(experiment.root, {pos: p, neg: q})[experiment.root]
            mean = value.sum() / (len(value) if value.ndim else 1)
            rows = q.reshape(1, -1).expand(len(p), -1)
            if side.rows is not None and q.numel() % len(p) == 0:
                is_turned = side.rows.endswith("T")
                rows = q.reshape(-1, len(p)).T if is_turned else q.reshape(len(p), -1)
            f = torch.cat([p.reshape(len(p), -1), rows], 1)
            for sign in [*signs]:
                g = f if abs(sign) == 1 else -f
                loss = (g.logsumexp(1) - g[:, 0]).mean()
                if not torch.allclose(mean, loss if sign > 0 else -loss, 1e-4, 1e-5):
                    signs.discard(sign)
        ways = {1: 1, -1: -1, 2: -1, -2: 1}
        return ways[min(signs, key=abs)] if signs else 0

    def _find(self, experiment: Experiment, edge: Edge, side: Side) -> None:
        """Find the expressions of the energies, and the first that is not affine in them."""
        values, affine, place = experiment.values, dict[Edge, float](), self.place
        value, users = values[edge], {user: (call, at) for user, call, at in experiment.users(edge)}
        if math.isnan(side.effect.weight):
            for user, (call, _) in users.items():
                # Squares beside: what is affine is so by some of the calls upon the energies.
                again = lambda x, of=call: of.again({**values, edge: x})  # noqa: E731
                inner, outer = effect(again, value, len(value)), experiment.effect(user, len(value))
                weight = inner.weight * outer.weight
                if not math.isnan(weight):
                    affine[user] = weight
            for user, made in experiment.made.items():
                is_call = isinstance(made, Operation) and not side.bends
                if is_call and experiment.effect(edge, root=user).bends:
                    side.bends = f"{made.calls[0].text} ({made.calls[0]})"
        if affine:
            side.effect = Effect(sum(affine.values()), sum(affine.values()))
        for user, (call, position) in users.items():
            expression = call.operand(position) if call.calls[0].code is place.code else None
            if expression is None:
                continue
            if not side.name and side.node is None:
                side.node = expression
                if place.node is not None and expression in ast.walk(place.node):
                    side.name, side.node = place.source.segment(expression), None
            if user in affine or not affine:
                side.uses += (expression,)
