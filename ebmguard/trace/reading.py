"""The expression in which energies of samples and of data meet, and what its two sides are."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from .chains import Sampler
from .graph import NO_EFFECT, SURE, Edge, Effect, Experiment, effect, evaluate, moved
from .script import Place

__all__ = ["Difference", "Side"]


@dataclass(eq=False)
class Side:
    """One side of a difference: energies that a sampler follows, as the loss has them."""

    edge: Edge
    value: Tensor
    effect: Effect  # on the difference
    sign: int  # -1 where they are the negatives of what the sampler follows
    arguments: int  # of the module: x, and what else
    is_here: bool  # whether they stand in the code of the difference
    name: str  # the user's: one energy for each sample
    node: ast.expr | None = None  # the expression, where it has no name
    uses: tuple[ast.expr, ...] = ()  # where the difference has them
    bends: str = ""  # the first thing that is not affine in them, such as a clamp
    rows: str | None = None  # what makes them a row of negatives for each positive, if they are

    @property
    def rank(self) -> tuple[bool, ...]:
        """The fitness of these energies for an expression of the difference; higher is better."""
        is_one, has_total = abs(abs(self.effect.weight) - 1) < SURE, self.effect.total
        return is_one, not math.isnan(has_total), self.is_here, bool(self.name), self.sign > 0

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
    experiment: Experiment
    labels: list[str]  # "data" first, and the samplers' names
    sides: dict[str, Side] = field(default_factory=dict)  # of those that are found
    times: int = 1  # it was met
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
        return bool(slopes) and min(slopes) < 0 < max(slopes)

    def pull(self, label: str) -> float:
        """Return the slope of the loss in a side's energies; below 0, it raises them."""
        side = self.sides[label]
        return side.sign * self.effect.total * side.effect.total

    def read(self, samplers: Sequence[Sampler]) -> None:
        """Find the sides, among the energies that one of the samplers follows."""
        experiment, tried = self.experiment, []
        for sampler in (sampler for sampler in samplers if sampler.name in self.labels):
            for way in sampler.functions:
                found = {label: [*self._choices(label, sampler, way[0])] for label in self.labels}
                choices = {label: sides for label, sides in found.items() if sides}
                best = {x: max(sides[::-1], key=lambda s: s.rank) for x, sides in choices.items()}
                ranks = [*map(sum, zip(*(side.rank for side in best.values()), strict=True))]
                tried.append(((len(best), ranks), best, choices, sampler, way))
        if tried:
            _, self.sides, choices, sampler, way = max(tried, key=lambda one: one[0])
        if len(self.sides) == len(self.labels) == 2:
            firsts = {label: sides[0] for label, sides in choices.items()}
            self._pair(sampler, *firsts.values())
            if turn := self._softmax(*firsts.values()):
                self.sides, self.is_softmax = firsts, True
                for side, slope in zip(firsts.values(), (-turn, turn), strict=True):
                    side.effect = Effect(slope, slope)
            else:
                self._pair(sampler, *self.sides.values())
        for side in self.sides.values():
            self._find(side)
        if not self.is_sided:
            lasts = [edge for x in self.labels for edge, _ in [*experiment.of_samples(x)][-1:]]
            slopes = [experiment.effect(e, len(experiment.values[e])).weight for e in lasts]
            self.is_of_others = len(slopes) == len(self.labels) and min(slopes) < 0 < max(slopes)
        if len(self.sides) == len(self.labels):
            sides = self.sides.values()
            total = experiment.values[experiment.root].detach().double()
            is_batch = total.ndim and len(total) in [len(side.value) for side in sides]
            mean = float(total.sum() / (len(total) if is_batch else 1))
            means = [float(side.value.double().sum() / len(side.value)) for side in sides]
            terms = sum(side.effect.weight * x for side, x in zip(sides, means, strict=True))
            self.is_whole = self.is_softmax or math.isclose(mean, terms, rel_tol=SURE, abs_tol=1e-5)
            sampler.aim(experiment, *way)
        for side in [] if self.is_softmax else self.sides.values():
            if side.rows == "":  # A row counts as one energy.
                weight = side.effect.weight * side.value[0].numel()
                side.effect = side.effect._replace(weight=weight)

    def _choices(self, label: str, sampler: Sampler, follows: Edge) -> Iterator[Side]:
        """Yield the energies of a side that a sampler follows, or their negatives."""
        experiment, root = self.experiment, self.experiment.made[self.experiment.root]
        given = [(x, node) for x, node in root.operands if isinstance(x, Edge) and node]
        texts = root.names | {x: self.place.source.segment(node) for x, node in given}
        for edge, rows in experiment.of_samples(label):
            value = experiment.values[edge].detach()
            if sampler.driven and (sign := sampler.driven.sign_of(follows, experiment, edge)):
                is_here = self.place.code in (x.calls[0].code for _, x, _ in experiment.users(edge))
                arguments = experiment.outputs[next(iter(rows))].arguments
                how = experiment.effect(edge, len(value))
                yield Side(edge, value, how, sign, arguments, is_here, texts.get(edge, ""))

    def _pair(self, sampler: Sampler, pos: Side, neg: Side) -> None:
        """Find out whether positives have a row of negatives, or those of their condition."""
        p, q, count = pos.value, neg.value, neg.value.numel() // len(pos.value)
        ends = [next(iter(self.experiment.rows[side.edge].items())) for side in (pos, neg)]
        outputs = [self.experiment.outputs[edge] for edge, _ in ends]
        a, b = (sampler.condition(of, rows) for of, (_, rows) in zip(outputs, ends, strict=True))
        is_varied, is_repeated = (
            bool((a != a[:1]).any()),
            torch.equal(b, a.repeat_interleave(count, 0)),
        )
        is_each = p.numel() == len(p)
        if (
            is_each
            and count > 1
            and q.shape == (len(p), count)
            and (len(b) == len(q) or is_repeated)
        ):
            neg.rows = ""
        elif is_each and is_varied and len(p) == len({*map(tuple, a.tolist())}):
            if is_repeated:
                narrow = "" if q.ndim > 1 else "[:, None]"
                neg.rows = narrow if count == 1 else f".reshape(-1, {count})"
            elif torch.equal(b, a.repeat(count, 1)):
                neg.rows = f".reshape({count}, -1).T"
        self.is_unpaired = is_varied and len(outputs[0].inputs) > 1 and neg.rows is None

    def _softmax(self, pos: Side, neg: Side) -> int:
        """1 or -1 where it is InfoNCE: the sign of its slope in the samples' energies. Else 0."""
        root = self.experiment.root

        def is_that(sign: int, high: int, amplitude: float) -> bool:
            p, q = (moved(side.value, amplitude) for side in (pos, neg))
            value = evaluate(root, {pos.edge: p, neg.edge: q})[root]
            rows = q.reshape(1, -1).expand(len(p), -1)
            if neg.rows is not None:
                rows = q.reshape(-1, len(p)).T if neg.rows.endswith("T") else q.reshape(len(p), -1)
            chances = (high * torch.cat([p.reshape(len(p), -1), rows], 1)).log_softmax(1)
            return torch.allclose(sign * value.mean(), -chances[:, 0].mean(), 1e-4, 1e-5)

        ways = product((1, -1), (1, -1)) if neg.effect.bends else ()
        same = (way for way in ways if all(is_that(*way, by) for by in (0.0, 1.0, -1.0)))
        return math.prod(next(same, (0,)))

    def _find(self, side: Side) -> None:
        """Find the expressions of the energies, and the first that is not affine in them."""
        experiment, place, affine = self.experiment, self.place, dict[Edge, float]()
        users = [*experiment.users(side.edge)]
        if math.isnan(side.effect.weight):
            values, count = experiment.values, len(side.value)
            for user, call, _ in users:
                # Squares beside: what is affine is so by some of the calls upon the energies.
                again = lambda x, of=call: of.again({**values, side.edge: x})  # noqa: E731
                outer = experiment.effect(user, count).weight
                weight = effect(again, side.value, count).weight * outer
                if not math.isnan(weight):
                    affine[user] = weight
            for user, made in experiment.made.items():
                if not side.bends and experiment.effect(side.edge, root=user).bends:
                    side.bends = f"{made.calls[0].text} ({made.calls[0]})"
        if affine:
            side.effect = Effect(sum(affine.values()), sum(affine.values()))
        for user, call, expression in users:
            if expression is None or call.calls[0].code is not place.code:
                continue
            if not side.name and side.node is None:
                side.node = expression
                if place.node is not None and expression in ast.walk(place.node):
                    side.name, side.node = place.source.segment(expression), None
            if user in affine or not affine:
                side.uses += (expression,)
