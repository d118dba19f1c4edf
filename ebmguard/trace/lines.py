"""The lines that guard a traced trainer, in the trainer's names: two, and an import."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from .chains import Names, Sampler
from .places import after, binds, where
from .reading import Difference, Side
from .refusals import Refused
from .script import Place, Source, source_of
from .tracer import Trace

__all__ = ["Plan", "by_hand", "plans"]

_FOLDER = 'log_dir="runs/1"'
_SURE = 1e-3
# The file, the first byte that is replaced and the first one that stays, and the new text.
Edit = tuple[str, int, int, str]


@dataclass(frozen=True)
class Plan:
    """Edits that guard a trainer."""

    edits: tuple[Edit, ...]
    has_scale: bool  # the sampler's is known, and tempers it
    parts: tuple[str, ...]  # of the trainer, to the guard
    softmax: Difference | None  # of which it makes another loss

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
        options = _options(sampler, is_energy=is_energy, inline=True)
        raise Refused("conditional", site=sampler.site, options=options)
    losses = [difference for difference in sided if negative in difference.sides]
    entries = sampler.entries or ()
    is_one = len(losses) == 1 or len(sampler.lengths) <= max(x.times for x in losses)
    is_one |= entries == () and len(sampler.sites) == 1  # all chains are tempered at once
    if (
        len(sided) > len(losses)
        or not is_one
        or any(positive not in x.sides or (x.pull(negative) < 0) != is_energy for x in losses)
    ):
        raise _one_guard_a_loss(trace, sided)
    trainer = trace.trainer_of(sampler)
    ways = [None, *entries] if sampler.is_function else [*entries, None]
    why, tried = None, []
    for entry in ways:
        options = _options(sampler, is_energy=is_energy, inline=entry is None)
        has_scale = sampler.measured.is_exact and "sampler_scale=" not in options
        try:
            parts: tuple[str, ...] = ()
            if entry is None:
                first, loss = _inside(sampler, losses[0], options)
            else:
                place = losses[0].place
                first, loss, parts = _around(sampler, entry, place, options, is_energy, trainer)
            texts = (_losses(x, positive, negative, loss, is_energy) for x in losses)
            more = has_scale, parts, losses[0] if losses[0].is_softmax else None
            tried += [Plan((*first, *chain(*way)), *more) for way in zip(*texts, strict=False)]
        except Refused as refused:
            why = why or refused
    if not tried:
        raise why or Refused("no names", place=losses[0].place)
    return tried


def _one_guard_a_loss(trace: Trace, sided: list[Difference]) -> Refused:
    """Explain a guard per loss, with its sampler or with a chain beside it."""
    ways = list[str]()
    for number, difference in enumerate(sorted(sided, key=lambda x: x.place.line), 1):
        sampler, _, negative = _sides(trace, difference)
        guard = by_hand(sampler, sampler.entries or (), difference.pull(negative) < 0)
        guard = guard.replace(_FOLDER, _FOLDER.replace("1", str(number)))
        loss = f"loss_{number}"
        make = f"make `{loss}, draw_{number} = {guard}`, draw its samples with `draw_{number}`"
        if sampler.entries == ():
            place, loss = sampler.site, f"g_{number}.loss"
            make = f"make `g_{number} = {guard}`, write `g_{number}.temper(...)` around the energy "
            make += f"at {place}"
        ways.append(f"For the loss at {difference.place} {make}, and call `{loss}` there.")
    places = " and ".join(dict.fromkeys(str(difference.place) for difference in sided))
    return Refused("two losses", place=places, ways=" ".join(ways))


def _no_difference(trace: Trace) -> Refused:
    """Explain why no difference exists: other energies than the sampler's, or none at all."""
    if trace.error or not trace.samplers:
        return Refused("stopped", error=trace.error) if trace.error else Refused("no sampler")
    unread = [
        f"nothing is known of what {x.name} follows" for x in trace.samplers if not x.functions
    ]
    if trace.unread or unread:
        error = trace.unread or unread[0]
        return Refused("not evaluated", error=error, guard=by_hand(trace.samplers[0]))
    for sampler in trace.samplers:
        for difference in trace.differences:
            if difference.is_of_others and sampler.name in difference.labels:
                is_energy = sampler.measured.convention == "energy"
                options = _options(sampler, is_energy=is_energy, inline=True)
                called = sampler.site.code.co_qualname
                place = difference.place
                return Refused("another energy", place=place, called=called, options=options)
    return Refused("no difference", guard=by_hand(trace.samplers[0]))


def by_hand(
    sampler: Sampler, entries: tuple[Place, ...] = (), is_energy: bool | None = None
) -> str:
    """Return a call of guard, with the names at the sampler's calls, or any that are known."""
    if is_energy is None:
        is_energy = sampler.measured.convention == "energy"
    called = [sampler.names.get(entry.code, []) for entry in entries]
    names = [*chain(*called, *sampler.names.values())]
    calls = [e.source.segment(e.node.func) for e in entries if isinstance(e.node, ast.Call)]
    words = [*calls, sampler.name.split(" ")[0]][:1] + [f"model={name}" for name in names[:1]]
    words += [f'energy="{sampler.method}"'] if sampler.method else []
    words = ["None"] if sampler.entries == () else words
    options = _options(sampler, is_energy=is_energy, inline=sampler.entries == ())
    return f"ebmguard.guard({', '.join(['None', *words, options])})"


def _sides(trace: Trace, difference: Difference) -> tuple[Sampler, str, str]:
    """Return the sampler of the negatives, and the labels of positives and negatives."""
    by_name = {sampler.name: sampler for sampler in trace.samplers}
    samplers = [by_name[label] for label in difference.sides if label in by_name]
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
    facts = {"loop": samplers[0].loop, "place": difference.place}
    raise Refused("wrong sign", way=way, word=word, **facts)


def _options(sampler: Sampler, *, is_energy: bool, inline: bool) -> str:
    words, measured = list[str](), sampler.measured
    if not inline and (sampler.is_function or not (measured.is_exact or measured.has_no_noise)):
        words.append("sampler_scale=1.0")  # No factor on the module tempers it, or none is known.
    elif measured.is_exact and inline:
        words.append(f"output_scale={_number(measured.output_scale)}")
    words += ['convention="energy"'] if is_energy else []
    return ", ".join([*words, _FOLDER])


def _number(scale: float) -> str:
    return f"{scale:{'_.0f' if scale == int(scale) else 'g'}}"


def _around(
    sampler: Sampler, entry: Place, loss: Place, options: str, is_energy: bool, trainer: Names
) -> tuple[list[Edit], str, tuple[str, ...]]:
    """Wrap the sampler where it has a name. Return edits, the loss's name, the trainer's parts."""
    at = where(sampler, entry, loss, trainer)
    if at is None:
        guard = by_hand(sampler, (entry,), is_energy)
        raise Refused("by hand", entry=entry, place=loss, guard=guard)
    is_own = at.is_moved or (at.sampler.startswith("self.") and not at.is_global)
    new = f"self.{at.sampler}" if at.is_moved else at.sampler
    loss_fn = _free(at.source, "loss_fn")
    parts = [f"model={name}" for name in at.models[:1]]
    parts += [f'energy="{sampler.method}"'] if sampler.method else []
    parts += [f"optimizer={name}" for name in at.optimizers[:1]]
    words, indent = ", ".join(["None", at.sampler, *parts, options]), " " * at.indent
    loss_fn = f"self.{loss_fn}" if is_own else loss_fn
    text = f"{indent}global {loss_fn}\n" if at.is_global else ""
    text += f"{indent}{loss_fn}, {new} = ebmguard.guard({words})"
    if "_scale=" not in options and sampler.measured.is_exact:
        text += f"  # output_scale={_number(sampler.measured.output_scale)}, measured"
    moved = [_spliced(at.source, entry.node.func, new)] if at.is_moved else []  # type: ignore[union-attr]
    return [*_made(at.source, at.line, text), *moved], loss_fn, tuple(parts)


def _inside(sampler: Sampler, difference: Difference, options: str) -> tuple[list[Edit], str]:
    """Temper the energy inside the sampler's loop. Return edits and the name of the loss."""
    place, is_tempered = difference.place, "output_scale" in options  # else nothing is tempered
    if sampler.spot is None and is_tempered:
        raise Refused("one place", site=sampler.site)
    spot, node = (sampler.spot if is_tempered else None) or (place, place.node)
    source = spot.source
    if source is not place.source or node is None:
        raise Refused("two files", site=spot, place=place, options=options)
    name = _free(source, "g")
    edits = _made(source, _top(source), f"{name} = ebmguard.guard(None, None, {options})")
    if is_tempered:
        edits.append(_spliced(source, node, f"{name}.temper({source.segment(node)})"))
    return edits, f"{name}.loss"


def _free(source: Source, name: str) -> str:
    """Return a name that the file does not use: this one, or with underscores."""
    fields = "id", "arg", "attr"
    used = {getattr(node, field, "") for node in source.nodes for field in fields}
    while name in used:
        name += "_"
    return name


def _line(source: Source, line: int, text: str) -> Edit:
    start = source.offset(line, 0)
    return source.file, start, start, f"{text}\n"


def _spliced(source: Source, node: ast.expr, text: str) -> Edit:
    start = source.offset(node.lineno, node.col_offset)
    end = source.offset(node.end_lineno or node.lineno, node.end_col_offset or 0)
    whole = source.text.encode()
    if whole[start - 2 : start] in (b" (", b"((") and whole[end : end + 1] == b")":
        start, end = start - 1, end + 1
    return source.file, start, end, text


def _made(source: Source, line: int, text: str) -> list[Edit]:
    # The import comes last, which puts it above.
    return [_line(source, line, text), _line(source, _top(source), "import ebmguard")]


def _top(source: Source) -> int:
    """Return the line below a file's docstring and its first imports."""
    line = 1
    for node in source.tree.body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_text and not isinstance(node, ast.Import | ast.ImportFrom):
            break
        line, _ = after(node)
    return line


def _losses(
    difference: Difference, positive: str, negative: str, loss: str, is_energy: bool
) -> Iterator[list[Edit]]:
    """Yield edits: the expression replaced by the guarded loss; its energies reweighted."""
    place, source, node = difference.place, difference.place.source, difference.place.node
    named, words = list[Edit](), list[str]()
    sides = [difference.sides[label] for label in (positive, negative)]
    rows = sides[1].rows
    for side, new in zip(sides, ("pos_all", "neg_all"), strict=True):
        new = _free(source, new)
        words.append(side.turned(side.name or new))
        if not side.name:
            if side.node is None:
                raise Refused("no names", place=place)
            named.append(_spliced(source, side.node, f"({new} := {source.segment(side.node)})"))
    pos, neg = words
    if rows is not None:
        is_atom = isinstance(ast.parse(neg, mode="eval").body, ast.Name | ast.Call | ast.Subscript)
        neg = f'{neg if is_atom or not rows else f"({neg})"}{rows}, groups="rows"'
    other, factor = (side.weight for side in sides)
    is_plain = difference.is_whole and not difference.effect.bends
    if node is not None and is_plain and abs(abs(factor) - 1) < _SURE > abs(factor + other):
        for above in source.around(node):
            if isinstance(above, ast.UnaryOp) and isinstance(above.op, ast.USub):
                node, factor = above, -factor
            elif _is_mean(above, node):
                node = above  # type: ignore[assignment]
            elif not isinstance(above, ast.Attribute) or above.attr != "mean":
                break
        minus = "-" if (factor < 0) != is_energy else ""
        yield [*named, _spliced(source, node, f"{minus}{loss}({pos}, {neg})")]
    is_named = not named and all(word.isidentifier() for word in words)
    if is_named and not (rows or difference.is_softmax) and words[0] != words[1]:
        yield from _reweighted(source, place, sides, loss)


def _reweighted(source: Source, place: Place, sides: list[Side], loss: str) -> Iterator[list[Edit]]:
    """Yield edits that use reweighted energies in the difference."""
    inside, last = [*ast.walk(source.scope(place.statement))], place.statement.lineno
    pos, neg = (side.name for side in sides)
    assigned = [e for e in inside if isinstance(e, ast.Assign) and e.lineno < last]
    made = [e for e in assigned if {pos, neg} & {*chain(*map(binds, ast.walk(e)))}]
    if made:
        line, indent = after(max(made, key=lambda statement: statement.lineno))
        guard = loss.removesuffix(".loss") if loss.endswith(".loss") else f"{loss}.guard"
        uses = [(node, f"{side.name}_cd") for side in sides for node in side.uses]
        groups = "" if sides[1].rows is None else ', groups="rows"'
        names = f"{pos}_cd, {neg}_cd" if all(side.uses for side in sides) else f"{pos}, {neg}"
        text = f"{' ' * indent}{names} = {guard}.reweight({pos}, {neg}{groups})"
        splices = [_spliced(source, *use) for use in uses if names != f"{pos}, {neg}"]
        yield [_line(source, line, text), *splices]


def _is_mean(above: Any, node: ast.expr) -> bool:
    """Tell whether a call is the mean of the expression: (x).mean() or torch.mean(x)."""
    func: Any = getattr(above, "func", None)
    is_mean = isinstance(func, ast.Attribute) and func.attr == "mean"
    return is_mean and node in (func.value, *above.args[:1])
