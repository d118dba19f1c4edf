"""The expression in which energies of samples and of data meet, and what its two sides are."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from .chains import Sampler
from .experiment import Effect, Experiment, effect, is_same, operand
from .graph import Edge, Operation, Output, edge_of
from .script import Place

__all__ = ["Difference", "Side", "read"]

_SURE = 1e-3


@dataclass(eq=False)
class Side:
    """One side of a difference: energies that a sampler follows, as the loss has them."""

    expression: str = ""  # the user's, one energy for each sample, turned as the sampler has them
    node: ast.expr | None = None  # that expression, where it has no name
    is_turned: bool = False  # whether that is the negated output
    uses: tuple[ast.expr, ...] = ()  # where the difference has it by name
    shape: tuple[int, ...] = ()
    weight: float = math.nan  # slope of the difference in their mean; NaN: they enter unequally
    total: float = math.nan  # the sum of the gradient of the difference; NaN: it bends everywhere
    bends: str = ""  # what is affine in pieces alone, such as a clamp
    follows: bool = True  # whether they are what the sampler differentiates
    energy: tuple[Any, str, str] = (None, "", "")  # the module, its method, the part of its result
    arguments: int = 1  # of the module: x, and what else


@dataclass(eq=False)
class Difference:
    """Where energies of samples and of data meet: sides by "data", or the sampler's name."""

    place: Place
    sides: dict[str, Side]
    times: int = 0  # it was met
    slope: float = math.nan  # of the loss in it
    is_bent: bool = False  # the loss is not affine in it: a clamp around it, say
    is_whole: bool = False  # it is that of its sides' means, and nothing beside

    @property
    def elsewhere(self) -> set[int]:
        """Lines of its file where the same expression stands in another statement."""
        node, tree = self.place.node, self.place.source.tree
        if node is None:
            return set()
        same = [each for each in ast.walk(tree) if isinstance(each, type(node))]
        return {e.lineno for e in same if ast.dump(e) == ast.dump(node)}

    def pull(self, label: str) -> float:
        """How the loss enters the energies of a side: below 0, it raises them there."""
        side = self.sides[label]
        return self.slope * (side.total if math.isnan(side.weight) else side.weight)


@dataclass
class _Choice:
    """Energies of a side that are those of a sampler, or their negatives."""

    edge: Edge
    of: Edge
    sign: int
    effect: Effect
    name: str
    uses: list[Edge] = field(default_factory=list)  # calls that are affine in them, if not all are

    def term(self, found: Experiment) -> float:
        """What it adds to the difference, if it is affine in it."""
        value = found.values[self.edge].detach().double()
        return self.effect.weight * float(value.sum()) / len(value)

    @property
    def is_curved(self) -> bool:
        """Whether there is no contrastive part: a square, say."""
        return math.isnan(self.effect.weight) and not self.effect.is_bent

    @property
    def rank(self) -> tuple[bool, bool, bool]:
        weight = abs(self.effect.weight)
        return (
            abs(weight - 1) < _SURE,
            not math.isnan(weight) or self.effect.is_bent,
            bool(self.name),
        )


def read(
    difference: Difference,
    samplers: Sequence[Sampler],
    found: Experiment,
    args: Sequence[Any] = (),
    values: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """What the sides are, from a call of the difference with these arguments and local names."""
    root, place = found.root, difference.place
    names = {edge_of(value): name for name, value in values.items() if name.isidentifier()}
    here = place.node
    operands = [here.left, here.right] if isinstance(here, ast.BinOp) else []
    for node, value in zip(operands, args, strict=False):
        names[edge_of(value)] = place.source.segment(node)
    known: list[Sampler | None] = [s for s in samplers if s.name in difference.sides]
    known = [s for s in known if s is not None and s.functions] or [None]
    ways = [(s, *way) for s in known for way in (s.functions if s else [(None, None, 1.0)])]
    read_ways = []
    for sampler, follows, of, slope in ways:
        chosen = {label: _best(found, label, follows, of, names) for label in difference.sides}
        ranks = [each.rank if each else (False,) * 3 for each in chosen.values()]
        count = sum(each is not None for each in chosen.values())
        read_ways.append(
            ((count, *map(sum, zip(*ranks, strict=True))), sampler, follows, of, slope, chosen)
        )
    _, sampler, follows, of, slope, chosen = max(read_ways, key=lambda each: each[0])
    for label, choice in chosen.items():
        difference.sides[label] = _side(found, label, choice, place)
    chosen_sides = [each for each in chosen.values() if each is not None]
    if len(chosen_sides) == len(chosen):
        terms = [each.term(found) for each in chosen_sides]
        total = found.values[root].detach().double()
        is_batch = total.ndim and len(total) in [
            len(found.values[each.edge]) for each in chosen_sides
        ]
        mean = float(total.sum() / (len(total) if is_batch else 1))
        difference.is_whole = math.isclose(mean, sum(terms), rel_tol=_SURE, abs_tol=1e-5)
        if sampler is not None:
            sampler.aim(found, follows, of, slope)


def _best(
    found: Experiment, label: str, follows: Edge | None, of: Edge | None, names: dict[Any, str]
) -> _Choice | None:
    choices = []
    for edge, output, rows in found.of_samples(label):
        made, value = output.made, found.values[edge]
        assert isinstance(made, Output)
        own = (output, output) if follows is None or of is None else (follows, of)
        source = own[1].made
        if not isinstance(source, Output) or source.energy != made.energy:
            continue
        if sign := is_same(*own, output, rows, value):
            how, uses = _effect(found, edge, len(rows))
            choices.append(_Choice(edge, output, sign, how, names.get(edge, ""), uses))
    return max(choices, key=lambda each: each.rank, default=None)


def _effect(found: Experiment, edge: Edge, rows: int) -> tuple[Effect, list[Edge]]:
    """How energies enter the root; or how they do through the calls that are affine in them."""
    value = found.values[edge]
    whole = effect(found.root, edge, value, rows)
    users = [user for user, _ in found.users(edge)]
    if not math.isnan(whole.weight) or len(users) < 2:
        return whole, []
    affine, weight = list[Edge](), 0.0
    for user in users:
        inner = effect(user, edge, value).weight
        outer = effect(found.root, user, found.values[user], rows).weight
        if not found.values[user].ndim and not math.isnan(inner * outer):
            affine, weight = [*affine, user], weight + inner * outer
    return (Effect(whole.total, weight, is_bent=False), affine) if weight else (whole, [])


def _side(found: Experiment, label: str, choice: _Choice | None, place: Place) -> Side:
    if choice is None:
        outputs = [o for o in found.outputs.values() if label in o.labels]
        return Side(follows=False, energy=outputs[0].energy if outputs else (None, "", ""))
    made = choice.of.made
    assert isinstance(made, Output)
    turned = "" if choice.sign > 0 else "-"
    text, node, uses = choice.name, None, list[ast.expr]()
    for user, position in found.users(choice.edge):
        call = user.made
        assert isinstance(call, Operation)
        is_here = call.calls[0].code is place.code
        expression = operand(call, position) if is_here else None
        if expression is None:
            continue
        if not text and node is None:
            within = place.node is not None and expression in ast.walk(place.node)
            node, text = (None, place.source.segment(expression)) if within else (expression, "")
        if user in choice.uses or not choice.uses:
            uses.append(expression)
    return Side(
        turned + text if text else "",
        node,
        choice.sign < 0,
        tuple(uses),
        tuple(found.values[choice.edge].shape),
        choice.sign * choice.effect.weight,
        choice.sign * (math.nan if choice.is_curved else choice.effect.total),
        _bend(found, choice),
        energy=made.energy,
        arguments=made.arguments,
    )


def _bend(found: Experiment, choice: _Choice) -> str:
    """The first call on the way to the root that is not affine in the energies, in words."""
    if not math.isnan(choice.effect.weight):
        return ""
    for edge in _after(found, choice.edge):
        made = edge.made
        assert isinstance(made, Operation)
        if math.isnan(effect(edge, choice.edge, found.values[choice.edge]).weight):
            return f"{made.calls[0].text} ({made.calls[0]})"
    return ""


def _after(found: Experiment, edge: Edge) -> Iterator[Edge]:
    reached = {edge}
    for each, made in found.made.items():
        if isinstance(made, Operation) and reached.intersection(made.needs):
            reached.add(each)
            yield each
