"""The lines that guard a traced trainer, in the trainer's names: two, and an import."""

from __future__ import annotations

import ast
import math
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from .chains import Names, Sampler
from .graph import SURE
from .places import binds, where
from .reading import Difference, Side
from .refusals import Refused
from .script import Place, Source, source_of
from .tracer import Trace

__all__ = ["Plan", "by_hand", "plans"]

# The file, the first byte that is replaced and the first one that stays, and the new text.
Edit = tuple[str, int, int, str]


@dataclass(frozen=True)
class Plan:
    """Edits that guard a trainer."""

    edits: tuple[Edit, ...]
    has_scale: bool  # the sampler's is known, and tempers it
    parts: tuple[str, ...]  # of the trainer, to the guard
    softmax: Place | None  # whose loss it makes to another one

    def texts(self) -> dict[str, str]:
        """Return the edited text of the files."""
        texts: dict[str, bytes] = {}
        for file, start, end, new in sorted(self.edits, key=lambda edit: -edit[1]):
            text = texts.get(file, source_of(file).text.encode())
            texts[file] = text[:start] + new.encode() + text[end:]
        return {file: text.decode() for file, text in texts.items()}


def plans(trace: Trace) -> list[Plan]:
    """Return plans to try: replace the loss, or reweight the energies before it.

    Refused where there is none.
    """
    sided = [d for d in trace.differences if d.is_sided and not math.isnan(d.effect.total)]
    if not sided:
        raise _no_difference(trace)
    sampler, positive, negative = _sides(trace, sided[0])
    is_energy = sided[0].pull(negative) < 0
    if sided[0].is_unpaired:
        raise Refused("conditional", site=sampler.site, guard=_guard(sampler, is_energy))
    losses = [difference for difference in sided if negative in difference.sides]
    entries = sampler.entries or ()
    is_one = len(losses) == 1 or len(sampler.lengths) <= max(x.times for x in losses)
    is_one |= entries == () and len(sampler.sites) == 1  # all chains are tempered at once
    is_alike = all(positive in x.sides and (x.pull(negative) < 0) == is_energy for x in losses)
    if len(sided) > len(losses) or not (is_one and is_alike):
        raise _one_guard_a_loss(trace, sided)
    trainer, place = trace.trainer_of(sampler), losses[0].place
    softmax = place if losses[0].is_softmax else None
    why, tried = list[Refused](), list[Plan]()
    for entry in [None, *entries] if sampler.is_function else [*entries, None]:
        has_scale = sampler.measured.is_exact and not (entry and sampler.is_function)
        try:
            if entry is None:
                first, loss, parts = _inside(sampler, place, is_energy)
            else:
                first, loss, parts = _around(sampler, entry, place, is_energy, trainer)
            texts = (_losses(x, positive, negative, loss, is_energy) for x in losses)
            for way in zip(*texts, strict=False):
                tried.append(Plan((*first, *chain(*way)), has_scale, parts, softmax))
        except Refused as refused:
            why.append(refused)
    if not tried:
        raise why[0] if why else Refused("no names", place=place)
    return tried


def _one_guard_a_loss(trace: Trace, sided: list[Difference]) -> Refused:
    """Explain a guard per loss, with its sampler or with a chain beside it."""
    ways = list[str]()
    for number, difference in enumerate(sided, 1):
        sampler, _, negative = _sides(trace, difference)
        guard = by_hand(sampler, difference.pull(negative) < 0).replace("runs/1", f"runs/{number}")
        ways.append(f"`loss_{number}, draw_{number} = {guard}` for that at {difference.place}")
    return Refused("two losses", ways=", and ".join(ways))


def _no_difference(trace: Trace) -> Refused:
    """Explain why no difference exists: other energies than the sampler's, or none at all."""
    if trace.error or not trace.samplers:
        return Refused("stopped", error=trace.error) if trace.error else Refused("no sampler")
    blind = [
        f"nothing is known of what {x.name} follows" for x in trace.samplers if not x.functions
    ]
    if trace.unread or blind:
        error = trace.unread or blind[0]
        return Refused("not evaluated", error=error, guard=by_hand(trace.samplers[0]))
    for sampler in trace.samplers:
        for difference in trace.differences:
            if difference.is_of_others and sampler.name in difference.labels:
                called, guard = sampler.site.code.co_qualname, _guard(sampler)
                return Refused("another energy", place=difference.place, called=called, guard=guard)
    return Refused("no difference", guard=by_hand(trace.samplers[0]))


def by_hand(
    sampler: Sampler, is_energy: bool | None = None, entries: tuple[Place, ...] | None = None
) -> str:
    """Return a call of guard, with the names at the sampler's calls, or any that are known."""
    entries = sampler.entries if entries is None else entries
    if entries == ():
        return _guard(sampler, is_energy)
    called = [sampler.names.get(entry.code, []) for entry in entries or ()]
    names = [*chain(*called, *sampler.names.values())]
    calls = [e.source.segment(e.node.func) for e in entries or () if isinstance(e.node, ast.Call)]
    name, *_ = *calls, sampler.name.split(" ")[0]
    return _guard(sampler, is_energy, name, _parts(sampler, names, []))


def _parts(sampler: Sampler, models: list[str], optimizers: list[str]) -> tuple[str, ...]:
    method = [f'energy="{sampler.method}"'] if sampler.method else []
    named = [f"model={x}" for x in models[:1]], method, [f"optimizer={x}" for x in optimizers[:1]]
    return tuple(chain(*named))


def _guard(
    sampler: Sampler, is_energy: bool | None = None, name: str = "None", parts: Iterable[str] = ()
) -> str:
    """Return a call of guard for a sampler, or for a chain that it tempers inside."""
    measured, words = sampler.measured, ["None", name, *parts]
    if name == "None" and measured.is_exact:
        words.append(f"output_scale={_number(measured.output_scale)}")
    elif name != "None" and (
        sampler.is_function or not (measured.is_exact or measured.has_no_noise)
    ):
        words.append("sampler_scale=1.0")  # No factor on the module tempers it, or none is known.
    if measured.convention == "energy" if is_energy is None else is_energy:
        words.append('convention="energy"')
    return f'ebmguard.guard({", ".join(words)}, log_dir="runs/1")'


def _number(scale: float) -> str:
    return f"{scale:{'_.0f' if scale == int(scale) else 'g'}}"


def _sides(trace: Trace, difference: Difference) -> tuple[Sampler, str, str]:
    """Return the sampler of the negatives, and the labels of positives and negatives."""
    samplers = [sampler for sampler in trace.samplers if sampler.name in difference.sides]
    known = {sampler.measured.convention for sampler in samplers} - {None}
    is_up = "log_density" in known
    for sampler in samplers:
        pull = difference.pull(sampler.name)
        if (pull > 0) == is_up if len(known) == 1 else len(samplers) == 1:
            others = [at for at in difference.sides if difference.pull(at) * pull < 0]
            return sampler, others[0], sampler.name
    if len(known) != 1:
        raise Refused("no sign", guard="` or `".join(map(by_hand, samplers)))
    way, word = ("up", "raises") if is_up else ("down", "lowers")
    raise Refused("wrong sign", way=way, word=word, loop=samplers[0].loop, place=difference.place)


def _around(
    sampler: Sampler, entry: Place, loss: Place, is_energy: bool, trainer: Names
) -> tuple[list[Edit], str, tuple[str, ...]]:
    """Wrap the sampler where it has a name. Return edits, the loss's name, the trainer's parts."""
    at = where(sampler, entry, loss, trainer)
    if at is None:
        guard = by_hand(sampler, is_energy, (entry,))
        raise Refused("by hand", entry=entry, place=loss, guard=guard)
    new, loss_fn = at.sampler, _free(at.source, "loss_fn")
    edits = list[Edit]()
    if at.is_moved:
        new = f"self.{new}"
        edits.append(_spliced(at.source, entry.node.func, new))  # type: ignore[union-attr]
    if new.startswith("self.") and not at.is_global:
        loss_fn = f"self.{loss_fn}"
    parts = _parts(sampler, at.models, at.optimizers)
    guard = _guard(sampler, is_energy, at.sampler, parts)
    text = f"global {loss_fn}\n" * at.is_global + f"{loss_fn}, {new} = {guard}"
    if "_scale=" not in guard and sampler.measured.is_exact:
        text += f"  # output_scale={_number(sampler.measured.output_scale)}, measured"
    first = _beside(at.source, at.statement, text, is_below=at.is_below)
    return [first, _imported(at.source), *edits], loss_fn, parts


def _inside(
    sampler: Sampler, loss: Place, is_energy: bool
) -> tuple[list[Edit], str, tuple[str, ...]]:
    """Temper the energy inside the sampler's loop. Return edits and the name of the loss."""
    is_tempered, source, guard = sampler.measured.is_exact, loss.source, _guard(sampler, is_energy)
    if sampler.spot is None and is_tempered:
        raise Refused("one place", site=sampler.site)
    spot, node = (sampler.spot if is_tempered else None) or (loss, loss.node)
    if spot.source is not source or node is None:
        raise Refused("by hand", entry=spot, place=loss, guard=guard)
    name = _free(source, "g")
    edits = [_beside(source, _top(source), f"{name} = {guard}"), _imported(source)]
    if is_tempered:
        edits.append(_spliced(source, node, f"{name}.temper({source.segment(node)})"))
    return edits, f"{name}.loss", ()


def _free(source: Source, name: str) -> str:
    """Return a name that the file does not use: this one, or with underscores."""
    fields = "id", "arg", "attr"
    used = {getattr(node, field, "") for node in source.nodes for field in fields}
    while name in used:
        name += "_"
    return name


def _beside(source: Source, node: ast.stmt | None, text: str, *, is_below: bool = True) -> Edit:
    """Put lines before or after a statement, or at the top of a file."""
    line = source.text.splitlines()[node.lineno - 1] if node is not None else ""
    below = 1 if node is None else (node.end_lineno or 0) + 1 if is_below else node.lineno
    start, indent = source.offset(below, 0), line[: len(line) - len(line.lstrip())]
    return source.file, start, start, textwrap.indent(f"{text}\n", indent)


def _spliced(source: Source, node: ast.expr, text: str) -> Edit:
    start = source.offset(node.lineno, node.col_offset)
    end = source.offset(node.end_lineno or node.lineno, node.end_col_offset or 0)
    whole = source.text.encode()
    if whole[:start].endswith((b"= (", b"+ (", b"((")) and whole[end : end + 1] == b")":
        start, end = start - 1, end + 1
    return source.file, start, end, text


def _imported(source: Source) -> Edit:
    # It follows another edit at the same place, which puts it above.
    return _beside(source, _top(source), "import ebmguard")


def _top(source: Source) -> ast.stmt | None:
    """Return the last of a file's docstring and its first imports."""
    last = None
    for node in source.tree.body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_text and not isinstance(node, ast.Import | ast.ImportFrom):
            break
        last = node
    return last


def _losses(
    difference: Difference, positive: str, negative: str, loss: str, is_energy: bool
) -> Iterator[list[Edit]]:
    """Yield edits: the expression replaced by the guarded loss; its energies reweighted."""
    place, source, node = difference.place, difference.place.source, difference.place.node
    named, words = list[Edit](), list[str]()
    sides = [difference.sides[label] for label in (positive, negative)]
    for side, new in zip(sides, ("pos_all", "neg_all"), strict=True):
        name = side.name or _free(source, new)
        words.append(side.turned(name))
        if not side.name:
            if side.node is None:
                raise Refused("no names", place=place)
            named.append(_spliced(source, side.node, f"({name} := {source.segment(side.node)})"))
    pos, neg = words
    if (rows := sides[1].rows) is not None:
        is_atom = isinstance(ast.parse(neg, mode="eval").body, ast.Name | ast.Call | ast.Subscript)
        neg = f'{neg if is_atom or not rows else f"({neg})"}{rows}, groups="rows"'
    other, factor = (side.weight for side in sides)
    is_plain = difference.is_whole and not difference.effect.bends
    if node is not None and is_plain and abs(abs(factor) - 1) < SURE > abs(factor + other):
        for above in source.around(node):
            match above:
                case ast.UnaryOp(op=ast.USub()):
                    node, factor = above, -factor
                case ast.Call(func=ast.Attribute(attr="mean")):
                    node = above
                case ast.Attribute(attr="mean"):  # of a call
                    pass
                case _:
                    break
        minus = "-" if (factor < 0) != is_energy else ""
        yield [*named, _spliced(source, node, f"{minus}{loss}({pos}, {neg})")]
    is_named = not named and all(word.isidentifier() for word in words)
    if is_named and not (rows or difference.is_softmax) and words[0] != words[1]:
        yield from _reweighted(source, place, sides, loss)


def _reweighted(source: Source, place: Place, sides: list[Side], loss: str) -> Iterator[list[Edit]]:
    """Yield edits that use reweighted energies in the difference."""
    inside, last = ast.walk(source.scope(place.statement)), place.statement.lineno
    names = [side.name for side in sides]
    assigned = [e for e in inside if isinstance(e, ast.Assign) and e.lineno < last]
    made = [e for e in assigned if {*names} & {*chain(*map(binds, ast.walk(e)))}]
    if made:
        guard = loss.removesuffix(".loss") if loss.endswith(".loss") else f"{loss}.guard"
        groups = "" if sides[1].rows is None else ', groups="rows"'
        is_new = all(side.uses for side in sides)
        new = [f"{name}_cd" if is_new else name for name in names]
        text = f"{', '.join(new)} = {guard}.reweight({', '.join(names)}{groups})"
        uses = [(use, name) for side, name in zip(sides, new, strict=True) for use in side.uses]
        splices = [_spliced(source, *use) for use in uses if is_new]
        yield [_beside(source, max(made, key=lambda e: e.lineno), text), *splices]
