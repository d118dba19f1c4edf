"""The lines that guard a traced trainer, in its own names: two, and an import."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, takewhile
from types import CodeType
from typing import Any

from .chains import Names, Sampler
from .reading import Difference, Side
from .refusals import Refused
from .script import Place, Source, source_of
from .tracer import Trace

__all__ = ["Plan", "by_hand", "plans"]

_FOLDER = 'log_dir="runs/1"'
_SURE = 1e-3
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
# The file, the first byte that is replaced and the first one that stays, and the new text.
Edit = tuple[str, int, int, str]


@dataclass(frozen=True)
class Plan:
    """Edits that guard a trainer."""

    edits: tuple[Edit, ...]
    has_scale: bool  # the sampler's is known, and tempers it

    def texts(self) -> dict[str, str]:
        """The text of each file with its edits."""
        found: dict[str, bytes] = {}
        for file, start, end, new in sorted(self.edits, key=lambda edit: -edit[1]):
            text = found.get(file, source_of(file).text.encode())
            found[file] = text[:start] + new.encode() + text[end:]
        return {file: text.decode() for file, text in found.items()}


def plans(found: Trace) -> list[Plan]:
    """Plans to try: the loss replaced; energies reweighted before it. Refused, if there is none."""
    sided = [d for d in found.differences if d.is_sided and not math.isnan(d.effect.total)]
    if not sided:
        raise _no_difference(found)
    sampler, positive, negative = _sides(found, sided[0])
    if not sampler.functions:
        error = found.unread or f"nothing is known of what {sampler.name} differentiates"
        raise Refused("not evaluated", error=error, guard=by_hand(sampler))
    if sided[0].is_unpaired:
        is_energy = sided[0].pull(negative) < 0
        options = _options(sampler, is_energy=is_energy, inline=True)
        raise Refused("conditional", site=sampler.site, options=options)
    is_energy = sided[0].pull(negative) < 0
    losses = [each for each in sided if negative in each.sides]
    entries = sampler.entries or ()
    of_one_call = len(losses) == 1 or len(sampler.lengths) <= max(each.times for each in losses)
    if not of_one_call or any(
        positive not in each.sides or (each.pull(negative) < 0) != is_energy for each in losses
    ):
        places = " and ".join(str(each.place) for each in losses)
        guard = by_hand(sampler, entries, is_energy)
        facts = {"guard": guard, "other": guard.replace(_FOLDER, _FOLDER.replace("1", "2"))}
        raise Refused("two losses", place=places, sampler=sampler.name, **facts)
    trainer = found.trainer_of(sampler)
    ways = [None, *entries] if sampler.is_function else [*entries, None]
    why, tried = None, []
    for entry in ways:
        options = _options(sampler, is_energy=is_energy, inline=entry is None)
        has_scale = sampler.measured.is_exact and "sampler_scale=" not in options
        try:
            if entry is None:
                first, loss = _inside(sampler, losses[0], options)
            else:
                first, loss = _around(sampler, entry, losses[0].place, options, is_energy, trainer)
            texts = (_losses(each, positive, negative, loss, is_energy) for each in losses)
            written = zip(*texts, strict=False)
            tried += [Plan((*first, *chain(*way)), has_scale) for way in written]
        except Refused as refused:
            why = why or refused
    if not tried:
        raise why or Refused("no names", place=losses[0].place)
    return tried


def _no_difference(found: Trace) -> Refused:
    """Why there is none: other energies than the sampler's, or none at all."""
    if found.error or not found.samplers:
        return Refused("stopped", error=found.error) if found.error else Refused("no sampler")
    if found.unread:
        return Refused("not evaluated", error=found.unread, guard=by_hand(found.samplers[0]))
    for sampler in found.samplers:
        for each in found.differences:
            if each.is_of_others and sampler.name in each.sides:
                is_energy = sampler.measured.convention == "energy"
                options = _options(sampler, is_energy=is_energy, inline=True)
                called = sampler.site.code.co_qualname
                return Refused("another energy", place=each.place, called=called, options=options)
    return Refused("no difference")


def by_hand(
    sampler: Sampler, entries: tuple[Place, ...] = (), is_energy: bool | None = None
) -> str:
    """The guard's call with the names at a call of the sampler, or with all that are known."""
    if is_energy is None:
        is_energy = sampler.measured.convention == "energy"
    own = [sampler.names.get(each.code, []) for each in entries]
    names = [*chain(*own, *sampler.names.values())]
    calls = [e.source.segment(e.node.func) for e in entries if isinstance(e.node, ast.Call)]
    words = [*calls, sampler.name.split(" ")[0]][:1] + [f"model={each}" for each in names[:1]]
    words += [f'energy="{sampler.method}"'] if sampler.method else []
    options = _options(sampler, is_energy=is_energy, inline=False)
    return f"ebmguard.guard({', '.join(['None', *words, options])})"


def _sides(found: Trace, difference: Difference) -> tuple[Sampler, str, str]:
    """The sampler of the negatives, and the labels of the positives and the negatives."""
    by_name = {each.name: each for each in found.samplers}
    samplers = [by_name[label] for label in difference.sides if label in by_name]
    known = {each.measured.convention for each in samplers} - {None}
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
    words, found = list[str](), sampler.measured
    if not inline and (sampler.is_function or not (found.is_exact or found.has_no_noise)):
        words.append("sampler_scale=1.0")  # No factor on the module tempers it, or none is known.
    elif found.is_exact and inline:
        words.append(f"output_scale={_number(found.output_scale)}")
    words += ['convention="energy"'] if is_energy else []
    return ", ".join([*words, _FOLDER])


def _number(scale: float) -> str:
    return f"{scale:{'_.0f' if scale == int(scale) else 'g'}}"


def _around(
    sampler: Sampler, entry: Place, loss: Place, options: str, is_energy: bool, trainer: Names
) -> tuple[list[Edit], str]:
    """The sampler wrapped where it is called, beside the loss; and the name of the guard's loss."""
    call, source = entry.node, entry.source
    base = getattr(call, "func", None)
    while isinstance(base, ast.Attribute):
        base = base.value
    guard = by_hand(sampler, (entry,), is_energy)
    nowhere = Refused("by hand", entry=entry, place=loss, guard=guard)
    if not isinstance(call, ast.Call) or not isinstance(base, ast.Name):
        raise nowhere
    name = source.segment(call.func)
    above = source.around(call)
    loops = [each for each in above if isinstance(each, _LOOPS)]
    owner: Any = next((each for each in above if isinstance(each, ast.ClassDef)), None)
    around_loss = source.around(loss.statement)  # nothing, where that is in another file
    energies = sampler.names.get(entry.code, [])
    mine = [each for each in energies if each.startswith("self.")]
    local = {*entry.code.co_varnames, *entry.code.co_cellvars, *entry.code.co_freevars}
    prefix, moved = "", list[Edit]()
    if base.id not in local and call.func is base and mine and owner in around_loss:
        moved = [_spliced(source, call.func, f"self.{name}")]
    if base.id == "self" or moved:
        body = owner.body if owner in around_loss else []
        init = next((each for each in body if "__init__" in _names(each)), None)
        if init is None:
            raise nowhere
        prefix, energies, (line, indent) = "self.", mine, _after(init.body[-1])
        made = source.segment(init)
        if loops and mine and f"{mine[0]} =" not in made:
            line, indent = loops[-1].lineno, loops[-1].col_offset  # the energy is made later
        here = _inner(trainer, source, owner)
        optimizers = [x for x in here if x.startswith("self.") and f"{x} =" in made]
    else:
        is_own = base.id in local or entry.code.co_name == "<module>"
        scopes = [each for each in above if is_own and isinstance(each, _SCOPES)]
        scope = next((each for each in scopes if base.id in _bound(source, each)), source.tree)
        bound = _bound(source, scope)
        binds = bound.get(base.id) or bound.get("*")
        loops = [each for each in loops if _owner(source, each) is scope]
        of_file = sampler.names.get(source.file, [])
        energies = energies or of_file
        if scope not in around_loss or binds is None:
            raise nowhere
        if loops:
            line, indent = loops[-1].lineno, loops[-1].col_offset
        elif binds is not scope and scope is not _owner(source, call):
            line, indent = _after(binds)
            at = _bound(source, source.tree).get(of_file[0]) if of_file else None
            energies = of_file if at is not None and at.lineno < line else []
        else:
            raise nowhere
        here = _inner(trainer, source, scope)
        optimizers = [x for x in here if x in bound and bound[x].lineno < line]
    told = [f"model={each}" for each in energies[:1]]
    told += [f'energy="{sampler.method}"'] if sampler.method else []
    told += [f"optimizer={each}" for each in optimizers[:1]]
    words = ", ".join(["None", name, *told, options])
    new = f"self.{name}" if moved else name
    loss_fn = prefix + _free(source, "loss_fn")
    text = f"{' ' * indent}{loss_fn}, {new} = ebmguard.guard({words})"
    if "_scale=" not in options and sampler.measured.is_exact:
        text += f"  # output_scale={_number(sampler.measured.output_scale)}, measured"
    return [_line(source, line, text), *moved, _import(source)], loss_fn


def _inner(names: Names, source: Source, scope: Any) -> list[str]:
    """What an optimizer is called in a scope, those inside it too."""
    if scope is source.tree:
        return names.get(source.file, [])
    lines = range(scope.lineno, scope.end_lineno + 1)
    codes = [
        each for each in names if isinstance(each, CodeType) and each.co_filename == source.file
    ]
    return [*chain(*(names[each] for each in codes if each.co_firstlineno in lines))]


def _inside(sampler: Sampler, difference: Difference, options: str) -> tuple[list[Edit], str]:
    """The energy tempered inside of the sampler's loop; and the name of the guard's loss."""
    place, is_tempered = difference.place, "output_scale" in options  # else nothing is tempered
    if sampler.spot is None and is_tempered:
        raise Refused("one place", site=sampler.site)
    spot, node = (sampler.spot if is_tempered else None) or (place, place.node)
    source = spot.source
    if source is not place.source or node is None:
        raise Refused("two files", site=spot, place=place, options=options)
    name = _free(source, "g")
    edits = [_line(source, _top(source), f"{name} = ebmguard.guard(None, None, {options})")]
    if is_tempered:
        edits.append(_spliced(source, node, f"{name}.temper({source.segment(node)})"))
    edits.append(_import(source))  # at last, which puts it above
    return edits, f"{name}.loss"


def _free(source: Source, name: str) -> str:
    """A name that the file has no use for: this one, or with underscores."""
    fields = "id", "arg", "attr"
    used = {getattr(node, each, "") for node in ast.walk(source.tree) for each in fields}
    while name in used:
        name += "_"
    return name


def _owner(source: Source, node: ast.AST) -> ast.AST:
    return next(each for each in source.around(node) if isinstance(each, _SCOPES))


def _bound(source: Source, scope: ast.AST) -> dict[str, Any]:
    """The names that a scope itself binds, each with the last statement that does, or the scope."""
    found: dict[str, Any] = {}
    for node in ast.walk(scope):
        around = [node, *source.around(node)]
        owners = (each for each in around[1:] if isinstance(each, (ast.ClassDef, *_SCOPES)))
        by: Any = next(each for each in around if each is scope or isinstance(each, ast.stmt))
        is_header = hasattr(by, "body") and by not in (node, scope)  # such as that of a loop
        is_own = node is not scope and not is_header and next(owners) is scope
        for name in _names(node) if is_own else ():
            found[name] = max(by, found.get(name, by), key=lambda each: each.lineno)
    return found


def _names(node: ast.AST) -> list[str]:
    """What a node itself binds."""
    if isinstance(node, ast.Name):
        return [node.id] if isinstance(node.ctx, ast.Store) else []
    if isinstance(node, ast.alias):
        return [(node.asname or node.name).partition(".")[0]]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    return [node.arg] if isinstance(node, ast.arg) else []


def _after(statement: ast.stmt) -> tuple[int, int]:
    return (statement.end_lineno or statement.lineno) + 1, statement.col_offset


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


def _import(source: Source) -> Edit:
    return _line(source, _top(source), "import ebmguard")


def _top(source: Source) -> int:
    """The line below a file's docstring and its first imports."""
    above = [*takewhile(_is_header, source.tree.body)]
    return _after(above[-1])[0] if above else 1


def _is_header(node: ast.stmt) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or isinstance(node, ast.Import | ast.ImportFrom)


def _losses(
    difference: Difference, positive: str, negative: str, loss: str, is_energy: bool
) -> Iterator[list[Edit]]:
    """The expression replaced by the guarded loss; or its energies reweighted before it."""
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
    if is_named and not rows and words[0] != words[1]:
        yield from _reweighted(source, place, sides, loss)


def _reweighted(source: Source, place: Place, sides: list[Side], loss: str) -> Iterator[list[Edit]]:
    """New names for reweighted energies, where the difference has the energies' own."""
    inside, last = [*ast.walk(_owner(source, place.statement))], place.statement.lineno
    pos, neg = (side.name for side in sides)
    assigned = [e for e in inside if isinstance(e, ast.Assign) and e.lineno < last]
    binds = [e for e in assigned if {pos, neg} & {*chain(*map(_names, ast.walk(e)))}]
    if binds:
        line, indent = _after(max(binds, key=lambda each: each.lineno))
        guard = loss.removesuffix(".loss") if loss.endswith(".loss") else f"{loss}.guard"
        uses = [(node, f"{side.name}_cd") for side in sides for node in side.uses]
        groups = "" if sides[1].rows is None else ', groups="rows"'
        own = f"{pos}_cd, {neg}_cd" if all(side.uses for side in sides) else f"{pos}, {neg}"
        text = f"{' ' * indent}{own} = {guard}.reweight({pos}, {neg}{groups})"
        splices = [_spliced(source, *use) for use in uses if own != f"{pos}, {neg}"]
        yield [_line(source, line, text), *splices]


def _is_mean(above: Any, node: ast.expr) -> bool:
    """Whether a call is the mean of the expression: (x).mean() or torch.mean(x)."""
    func: Any = getattr(above, "func", None)
    is_mean = isinstance(func, ast.Attribute) and func.attr == "mean"
    return is_mean and node in (func.value, *above.args[:1])
