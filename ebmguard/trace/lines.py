"""The lines that guard a traced trainer, in its own names: two, and an import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

from .chains import Sampler
from .script import Place, Source, shown, source_of
from .tracer import Difference, Trace

__all__ = ["BETA_STAR", "NO_SAMPLER", "Plan", "Unclear", "plans"]

BETA_STAR = "beta_star=0.5"
NO_SAMPLER = "no module with an output per sample was differentiated by its input in a loop"
_SURE = 1e-3
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
# The file, the first byte that is replaced and the first one that stays, and the new text.
Edit = tuple[str, int, int, str]


class Unclear(Exception):
    """What could not be told, in words."""


@dataclass(frozen=True)
class Plan:
    """Edits that guard a trainer."""

    edits: tuple[Edit, ...]
    options: str  # of the guard, as they are written
    is_inline: bool  # the sampler stays as it is, or is tempered inside of its loop

    def texts(self) -> dict[str, str]:
        """The text of each file with its edits."""
        found: dict[str, bytes] = {}
        for file, start, end, new in sorted(self.edits, key=lambda edit: -edit[1]):
            text = found.get(file, source_of(file).text.encode())
            found[file] = text[:start] + new.encode() + text[end:]
        return {file: text.decode() for file, text in found.items()}


def plans(found: Trace) -> list[Plan]:
    """Plans to try: the loss replaced; energies reweighted before it. Unclear, if there is none."""
    if not found.samplers:
        raise Unclear(NO_SAMPLER)
    pairs = {each: combinations(each.sides.values(), 2) for each in found.differences}
    sided = [d for d, two in pairs.items() if any(a.cotangent * b.cotangent < 0 for a, b in two)]
    if not sided:
        raise Unclear("energies of samples and of data were met in no difference of a loss")
    sides = sided[0].sides
    for each in found.samplers:
        energy = (each.first.energy, each.method)
        if each.method and each.name in sides and any(s.energy != energy for s in sides.values()):
            called = f"{type(each.first.energy).__name__}.{each.method}"
            raise Unclear(f"the sampler differentiates {called}, and the loss has another output")
    sampler, positive, negative = _sides(found, sided[0])
    if not sampler.is_scalar:
        site, made_by = sampler.site, sampler.site.code.co_qualname
        raise Unclear(f"the module called at {site} gives no energies; {made_by} does")
    is_energy = sides[negative].cotangent < 0
    losses = [each for each in sided if negative in each.sides]
    of_one_call = len(losses) == 1 or len(sampler.lengths) <= max(each.times for each in losses)
    if not of_one_call or any(
        positive not in each.sides or (each.sides[negative].cotangent < 0) != is_energy
        for each in losses
    ):
        places = " and ".join(str(each.place) for each in losses)
        raise Unclear(f"`{negative}` draws for losses at {places}: a guard and a call for each")
    options = _options(sampler, is_energy=is_energy)
    why, tried = "", []
    for entry in (*(sampler.entries or ()), None):
        try:
            if entry is None:
                first, loss = _inside(sampler, losses[0], options)
            else:
                first, loss = _around(sampler, entry, losses[0].place, options)
            ways = (_losses(each, positive, negative, loss, is_energy) for each in losses)
            tried += [
                Plan((*first, *chain(*way)), options, is_inline=entry is None)
                for way in zip(*ways, strict=False)
            ]
        except Unclear as unclear:
            why = why or str(unclear)
    if not tried:
        raise Unclear(why or "the loss is no difference of two means that could be replaced")
    return tried


def _sides(found: Trace, difference: Difference) -> tuple[Sampler, str, str]:
    """The sampler of the negatives, and the labels of the positives and the negatives."""
    by_name = {each.name: each for each in found.samplers}
    samplers = [by_name[label] for label in difference.sides if label in by_name]
    known = {each.measured.convention for each in samplers} - {None}
    if len(known) > 1:
        raise Unclear("of the samplers of this difference one goes up and another down")
    is_up = "log_density" in known
    for sampler in samplers:
        pull = difference.sides[sampler.name].cotangent
        if (pull > 0) == is_up if known else len(samplers) == 1:
            others = [at for at, side in difference.sides.items() if side.cotangent * pull < 0]
            return sampler, others[0], sampler.name
    if not known:
        raise Unclear("which of the samplers draws the negatives: none of them has told its sign")
    way, word = ("up", "raises") if is_up else ("down", "lowers")
    raise Unclear(f"the sampler goes {way} the output, and the loss {word} the output there")


def _options(sampler: Sampler, *, is_energy: bool) -> str:
    words, found = BETA_STAR, sampler.measured
    if found.is_exact and found.noise > 0 and sampler.is_linear:
        scale = found.output_scale  # the shortest number within its error
        words += f", output_scale={scale:{'_.0f' if scale == int(scale) else 'g'}}"
    return f'{words}, convention="energy"' if is_energy else words


def _around(sampler: Sampler, entry: Place, loss: Place, options: str) -> tuple[list[Edit], str]:
    """The sampler wrapped where it is called, beside the loss; and the name of the guard's loss."""
    call, source = entry.node, entry.source
    base = getattr(call, "func", None)
    while isinstance(base, ast.Attribute):
        base = base.value
    if not isinstance(call, ast.Call) or not isinstance(base, ast.Name):
        raise Unclear(f"the sampler is no call of a name that could be bound again, at {entry}")
    name = source.segment(call.func)
    elsewhere = Unclear(f"`{name}` is called at {entry}, and the loss is elsewhere, at {loss}")
    above = source.around(call)
    loops = [each for each in above if isinstance(each, _LOOPS)]
    owner: Any = next((each for each in above if isinstance(each, ast.ClassDef)), None)
    around_loss = source.around(loss.statement)  # nothing, where that is in another file
    energies = sampler.names.get(entry.code, [])
    mine = [each for each in energies if each.startswith("self.")]
    prefix, moved = "", list[Edit]()
    if base.id != "self" and call.func is base and mine and owner in around_loss:
        moved = [_spliced(source, call.func, f"self.{name}")]
    if base.id == "self" or moved:
        if owner not in around_loss:
            raise elsewhere
        init = next((each for each in owner.body if "__init__" in _names(each)), None)
        if init is None:
            raise Unclear(f"the class {owner.name} has no __init__, where a guard could be made")
        prefix, energies, (line, indent) = "self.", mine, _after(init.body[-1])
        if loops and mine and f"{mine[0]} =" not in source.segment(init):
            line, indent = loops[-1].lineno, loops[-1].col_offset  # the energy is made later
    else:
        scope: ast.AST = source.tree
        if base.id not in entry.code.co_names or entry.code.co_name == "<module>":
            scopes = [each for each in above if isinstance(each, _SCOPES)]
            scope = next((each for each in scopes if base.id in _bound(source, each)), source.tree)
        if scope not in around_loss:
            raise elsewhere
        bound = _bound(source, scope)
        binds = bound.get(base.id) or bound.get("*")
        if binds is None:
            raise Unclear(f"where `{name}` is bound in {shown(source.file)}")
        loops = [each for each in loops if _owner(source, each) is scope]
        of_file = sampler.names.get(source.file, [])
        energies = energies or of_file
        if loops:
            line, indent = loops[-1].lineno, loops[-1].col_offset
        elif binds is not scope and scope is not _owner(source, call):
            line, indent = _after(binds)
            made = _bound(source, source.tree).get(of_file[0]) if of_file else None
            energies = of_file if made is not None and made.lineno < line else []
        else:
            raise Unclear(f"`{name}` is known only inside of the function that takes a step")
    model = [f"model={each}" for each in energies[:1]]
    method = [f'energy="{sampler.method}"'] if sampler.method else []
    words = ", ".join(["None", name, *model, *method, options])
    new = f"self.{name}" if moved else name
    text = f"{' ' * indent}{prefix}cd_loss, {new} = ebmguard.guard({words})"
    return [_import(source), _line(source, line, text), *moved], f"{prefix}cd_loss"


def _inside(sampler: Sampler, difference: Difference, options: str) -> tuple[list[Edit], str]:
    """The energy tempered inside of the sampler's loop; and the name of the guard's loss."""
    site, loss = sampler.site, difference.place
    if any(side.site == site for side in difference.sides.values()):
        raise Unclear(f"the sampler and the loss call the energy at the same place, {site}")
    node, source = site.node, site.source
    if source is not loss.source or node is None:
        raise Unclear(f"the sampler calls the energy at {site}, and the loss is at {loss}")
    line, _ = _after(_imports(source)[-1])
    made = _line(source, line, f"g = ebmguard.guard(None, None, {options})")
    edits = [_import(source), made]
    if "output_scale" in options:  # without one nothing is tempered
        edits.append(_spliced(source, node, f"g.temper({source.segment(node)})"))
    return edits, "g.loss"


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
    return _line(source, _imports(source)[0].lineno, "import ebmguard")


def _imports(source: Source) -> list[ast.stmt]:
    found = [each for each in source.tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
    found = [each for each in found if getattr(each, "module", "") != "__future__"]
    if not found:
        raise Unclear(f"{source.file} imports nothing")
    return [*found]


def _losses(
    difference: Difference, positive: str, negative: str, loss: str, is_energy: bool
) -> Iterator[list[Edit]]:
    """The expression replaced by the guarded loss; or its energies reweighted before it."""
    place, source, node = difference.place, difference.place.source, difference.place.node
    named, words = list[Edit](), list[str]()
    for label, new in ((positive, "pos_all"), (negative, "neg_all")):
        side = difference.sides[label]
        words.append(side.expression or new)
        if not side.expression:
            call = side.site.node if side.site and side.site.code is place.code else None
            if call is None:
                raise Unclear(f"no name for the energies of {label} where they meet, at {place}")
            named.append(_spliced(source, call, f"({new} := {source.segment(call)})"))
    pos, neg = words
    factor, other = (difference.sides[label].weight for label in (negative, positive))
    if node is not None and abs(abs(factor) - 1) < _SURE and abs(factor + other) < _SURE:
        for above in source.around(node):
            if isinstance(above, ast.UnaryOp) and isinstance(above.op, ast.USub):
                node, factor = above, -factor
            elif _is_mean(above, node):
                node = above  # type: ignore[assignment]
            elif not isinstance(above, ast.Attribute) or above.attr != "mean":
                break
        minus = "-" if (factor < 0) != is_energy else ""
        yield [*named, _spliced(source, node, f"{minus}{loss}({pos}, {neg})")]
    if not named and pos.isidentifier() and neg.isidentifier() and pos != neg:
        inside, last = ast.walk(_owner(source, place.statement)), place.statement.lineno
        assigned = [e for e in inside if isinstance(e, ast.Assign) and e.lineno < last]
        binds = [e for e in assigned if {pos, neg} & {*chain(*map(_names, ast.walk(e)))}]
        if binds:
            line, indent = _after(max(binds, key=lambda each: each.lineno))
            guard = "g" if loss == "g.loss" else f"{loss}.guard"
            text = f"{' ' * indent}{pos}, {neg} = {guard}.reweight({pos}, {neg})"
            yield [_line(source, line, text)]


def _is_mean(above: Any, node: ast.expr) -> bool:
    """Whether a call is the mean of the expression: (x).mean() or torch.mean(x)."""
    func: Any = getattr(above, "func", None)
    is_mean = isinstance(func, ast.Attribute) and func.attr == "mean"
    return is_mean and node in (func.value, *above.args[:1])
