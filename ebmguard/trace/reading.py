"""The expression in which energies of samples and of data meet, and what its two sides are."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from .chains import Sampler
from .experiment import NO_EFFECT, Effect, Experiment, effect, effect_on, is_same, moved, operand
from .graph import DATA, Edge, Operation, edge_of, evaluate
from .script import Place

__all__ = ["Difference", "Side", "read"]

_SURE = 1e-3


@dataclass(eq=False)
class Side:
    """One side of a difference: energies that a sampler follows, as the loss has them."""

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
        is_one = abs(abs(self.effect.weight) - 1) < _SURE
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
    """A place where energies of samples and of data meet; sides by "data" or a sampler's name."""

    place: Place
    sides: dict[str, Side]
    times: int = 0  # it was met
    effect: Effect = NO_EFFECT  # on the loss
    is_whole: bool = False  # it is that of its sides' means, and nothing beside
    is_of_others: bool = False  # than those that a sampler follows
    is_unpaired: bool = False  # it has conditions, and not one row of samples for each
    is_softmax: bool = False  # of each positive among its negatives: InfoNCE

    @property
    def elsewhere(self) -> set[int]:
        """The lines of its file with the same expression, this one too."""
        node, tree = self.place.node, self.place.source.tree
        same = [other for other in ast.walk(tree) if node and isinstance(other, type(node))]
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
    difference: Difference,
    samplers: Sequence[Sampler],
    experiment: Experiment,
    args: Sequence[Any] = (),
    values: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Read the sides from a call of the difference with these arguments and local names."""
    names = {edge_of(value): name for name, value in values.items() if name.isidentifier()}
    here = difference.place.node
    operands = [here.left, here.right] if isinstance(here, ast.BinOp) else []
    for node, value in zip(operands, args, strict=False):
        names[edge_of(value)] = difference.place.source.segment(node)
    labels = sorted(difference.sides, key=lambda label: label != DATA)
    known = [sampler_ for sampler_ in samplers if sampler_.name in difference.sides]
    ways: list[tuple[Sampler | None, tuple[Edge, float] | None]]
    ways = [(sampler_, way) for sampler_ in known for way in sampler_.functions] or [(None, None)]
    tried = []
    for way in ways:
        choices = [_choices(experiment, label, *way, names, difference.place) for label in labels]
        best = [max(reversed(options), key=lambda choice: choice[1].rank) for options in choices]
        ranks = [*map(sum, zip(*(side.rank for _, side in best), strict=True))]
        tried.append((ranks, best, [options[:2][-1] for options in choices], *way))
    _, best, firsts, sampler, follows = max(tried, key=lambda way: way[0])
    turn = 0
    for chosen in (firsts, best):  # all of the energies, as a softmax has them; else the best
        difference.sides = dict(zip(labels, (side for _, side in chosen), strict=True))
        edges = [edge for edge, _ in chosen if edge is not None]
        if sampler is not None and len(edges) == len(labels) == 2:
            _pair(difference, sampler, experiment, *edges)
            if turn := _softmax(difference, experiment, *edges):
                best = chosen
                break
    for edge, side in best:
        if edge is not None:
            _find(experiment, edge, side, difference.place)
    if turn:
        for side, slope in zip(difference.sides.values(), (-turn, turn), strict=True):
            side.effect, side.bends = Effect(slope, slope), ""
    difference.is_softmax = bool(turn)
    if not difference.is_sided:
        lasts = [[*experiment.of_samples(label)][-1:] for label in labels]
        energies = [(edge, experiment.values[edge]) for last in lasts for edge, _ in last]
        slopes = [effect(experiment.root, edge, x, len(x)).weight for edge, x in energies]
        difference.is_of_others = len(energies) == len(labels) and min(slopes) < 0 < max(slopes)
    if all(side.sign for side in difference.sides.values()):
        total = experiment.values[experiment.root].detach().double()
        counts = [side.shape[0] for side in difference.sides.values()]
        mean = float(total.sum() / (len(total) if total.ndim and len(total) in counts else 1))
        terms = sum(side.effect.weight * side.mean for side in difference.sides.values())
        is_sum = math.isclose(mean, terms, rel_tol=_SURE, abs_tol=1e-5)
        difference.is_whole = is_sum or difference.is_softmax
        if sampler is not None and follows is not None:
            sampler.aim(experiment, *follows)


def _pair(
    difference: Difference, sampler: Sampler, experiment: Experiment, pos: Edge, neg: Edge
) -> None:
    """Find out whether positives have a row of negatives, or those of their condition."""
    p, q = experiment.values[pos], experiment.values[neg]
    side, count = difference.sides[[*difference.sides][1]], q.numel() // len(p)
    first, (one, *_) = next(iter(experiment.rows[pos])), experiment.rows[neg]
    a = sampler.condition(experiment.outputs[first], experiment.rows[pos][first])
    b = sampler.condition(experiment.outputs[one], experiment.rows[neg][one])
    is_varied = bool((a != a[:1]).any())
    is_row = len(b) == len(q) or torch.equal(b, a.repeat_interleave(count, 0))
    if count > 1 and q.shape == (len(p), count) and p.numel() == len(p) and is_row:
        if side.rows is None:
            side.effect = Effect(side.effect.weight * count, *side.effect[1:])
            side.mean /= count
        side.rows = ""
    elif is_varied and p.numel() == len(p) == len({*map(tuple, a.tolist())}):
        if torch.equal(b, a.repeat_interleave(count, 0)):
            narrow = "" if q.ndim > 1 else "[:, None]"
            side.rows = narrow if count == 1 else f".reshape(-1, {count})"
        elif torch.equal(b, a.repeat(count, 1)):
            side.rows = f".reshape({count}, -1).T"
    has_condition = is_varied and len(experiment.outputs[first].inputs) > 1
    difference.is_unpaired = has_condition and side.rows is None


def _softmax(difference: Difference, experiment: Experiment, pos: Edge, neg: Edge) -> int:
    """1 where the value is InfoNCE of energies that are high on data; -1 its or their negatives."""
    _, side = difference.sides.values()
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


def _choices(
    experiment: Experiment,
    label: str,
    sampler: Sampler | None,
    follows: tuple[Edge, float] | None,
    names: Mapping[Any, str],
    place: Place,
) -> list[tuple[Edge | None, Side]]:
    """Return the energies of a side that a sampler follows, or their negatives."""
    choices: list[tuple[Edge | None, Side]] = [(None, Side())]
    for edge, rows in experiment.of_samples(label):
        one, *_ = rows
        source = (follows[0], sampler.outputs) if sampler and follows else (one, [one])
        if sign := is_same(*source, rows, experiment.values[edge]):
            value, made = experiment.values[edge].detach(), experiment.outputs[one]
            mean, shape = float(value.double().sum() / len(value)), tuple(value.shape)
            how = effect(experiment.root, edge, value, len(value))
            calls = [experiment.made[user].calls[0].code for user, _ in experiment.users(edge)]
            side = Side(how, sign, place.code in calls, names.get(edge, ""), None, (), shape, mean)
            side.arguments = made.arguments
            choices.append((edge, side))
    return choices


def _find(experiment: Experiment, edge: Edge, side: Side, place: Place) -> None:
    """Find the expressions of the energies, and the first that is not affine in them."""
    value, affine = experiment.values[edge], dict[Edge, float]()
    users = dict(experiment.users(edge))
    if math.isnan(side.effect.weight):
        for user in users:
            # Squares beside: what is affine is so by some of the calls upon the energies.
            call, result = experiment.made[user], experiment.values[user]
            assert isinstance(call, Operation)
            inner = effect_on(
                lambda x, of=call: of.again({**experiment.values, edge: x}),  # type: ignore[misc]
                value,
                len(value),
            )
            outer = effect(experiment.root, user, result, len(value))
            if not math.isnan(inner.weight * outer.weight):
                affine[user] = inner.weight * outer.weight
        for user, made in experiment.made.items():
            if not side.bends and isinstance(made, Operation) and effect(user, edge, value).bends:
                side.bends = f"{made.calls[0].text} ({made.calls[0]})"
    if affine:
        side.effect = Effect(sum(affine.values()), sum(affine.values()))
    for user, position in users.items():
        call = experiment.made[user]
        is_here = isinstance(call, Operation) and call.calls[0].code is place.code
        expression = operand(call, position) if is_here else None  # type: ignore[arg-type]
        if expression is None:
            continue
        if not side.name and side.node is None:
            side.node = expression
            if place.node is not None and expression in ast.walk(place.node):
                side.name, side.node = place.source.segment(expression), None
        if user in affine or not affine:
            side.uses += (expression,)
