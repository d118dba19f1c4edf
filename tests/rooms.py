"""The rooms of ebmguard/ and their imports.

A room is a module or package right below ``ebmguard/``, the facade ``__init__`` and ``__main__``
among them. An arrow leads from a room to one that any of its files imports, be it inside a function
or for the type checker alone. Floors are the longest chain of arrows; where arrows for types close
a circle, the longest chain of the others. A file that takes a name from a package imports the file
that the package has it from, so that one that only passes names on closes no circle of files.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]

# From the ground up. A room imports rooms of lower floors; a room of the ground floor, those that
# stand before it in the list.
LAYERS = (
    ("errors", "tags", "energies", "trainer", "ranks"),
    ("objective", "sampling", "samplers", "alerts", "sinks"),
    ("diagnostics", "recovery", "check"),
    ("retrofit",),
    ("report",),
    ("trace", "cli"),
)
FACADE, MAIN = "__init__", "__main__"
# It runs trainers, and measures what they do.
MAY_IMPORT = {"trace": {*LAYERS[0], "sampling"}, MAIN: {"cli"}}

Arrow = tuple[str, str]


def may_import(room: str) -> set[str]:
    """The rooms that a room may import; none where it has no place in the list."""
    if room in MAY_IMPORT:
        return MAY_IMPORT[room]
    if room == FACADE:
        room = "cli"  # It names what a user of the library needs: all but the command line.
    height = next((height for height, floor in enumerate(LAYERS) if room in floor), 0)
    before = LAYERS[0][: LAYERS[0].index(room)] if room in LAYERS[0] else ()
    return {name for floor in LAYERS[:height] for name in floor} | set(before)


@dataclass(frozen=True)
class Import:
    """The absolute name that is imported, whether for the type checker alone, and as what."""

    target: str
    for_types: bool = False
    bound: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Module:
    """A file, and the name by which it is imported."""

    name: str
    path: Path

    @property
    def room(self) -> str:
        """What stands right below the package."""
        return (*self.name.split("."), FACADE)[1]

    @property
    def lines(self) -> int:
        """How many lines the file has."""
        return len(self.path.read_text().splitlines())

    @property
    def is_package(self) -> bool:
        """Whether it is the file of a package."""
        return self.path.name == "__init__.py"

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of its syntax."""
        return [*ast.walk(ast.parse(self.path.read_text()))]

    @cached_property
    def imports(self) -> list[Import]:
        """Every name that it imports anywhere, and the attributes that it reads of those."""
        package = self.name.split(".")
        if not self.is_package:
            package.pop()
        typed: set[ast.AST] = set()
        found = []
        for node in self.nodes:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in vars(node.test).values():
                typed.update(inner for part in node.body for inner in ast.walk(part))
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split(".")[0]
                    bound = {alias.asname: alias.name} if alias.asname else {first: first}
                    found.append(Import(alias.name, node in typed, bound))
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                stem = ".".join([*base, *([node.module] if node.module else [])])
                for alias in node.names:
                    target = f"{stem}.{alias.name}"
                    bound = {alias.asname or alias.name: target}
                    found.append(Import(target, node in typed, bound))
        names = {name: target for each in found for name, target in each.bound.items()}
        # No arrow of its own between rooms: that of the import says whether it runs.
        read = [
            Import(f"{names[node.value.id]}.{node.attr}", for_types=True)
            for node in self.nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in names
        ]
        return found + read


@cache
def modules(folder: Path, package: str) -> list[Module]:
    """Every file below a folder, which is imported as the package of that name."""
    paths = sorted(folder.rglob("*.py"))
    parts = [[package, *path.relative_to(folder).with_suffix("").parts] for path in paths]
    names = [".".join(part).removesuffix(".__init__") for part in parts]
    return [Module(name, path) for name, path in zip(names, paths, strict=True)]


def circles_of_files(files: Collection[Module]) -> set[frozenset[str]]:
    """Files that reach each other by imports, where there are more than one."""
    by_name = {module.name: module for module in files}
    bound = {
        module.name: {name: own for each in module.imports for name, own in each.bound.items()}
        for module in files
        if module.is_package
    }

    def home(name: str) -> str:
        """The file that a name comes from, through packages that pass it on; "" of another's."""
        if name in by_name:
            return name
        owner, _, last = name.rpartition(".")
        owner = owner and home(owner)
        source = bound.get(owner, {}).get(last, name)
        return home(source) if source != name else owner

    arrows = set()
    for module in files:
        targets = {each.target for each in module.imports}
        for target in targets:
            is_passed_by = target in bound and any(own.startswith(f"{target}.") for own in targets)
            owner = "" if is_passed_by else home(target)
            if owner and owner != module.name:
                arrows.add((module.name, owner))
    return _circles(by_name, arrows)


class House:
    """The files of the package, and their rooms."""

    def __init__(self, *, without: Collection[str] = ()) -> None:
        found = modules(ROOT / "ebmguard", "ebmguard")
        self.modules = [module for module in found if module.room not in without]
        self.rooms = {module.room for module in self.modules}

    @cached_property
    def arrows(self) -> dict[Arrow, bool]:
        """From a room to one that it imports, and whether for the type checker alone."""
        found: dict[Arrow, bool] = {}
        for module in self.modules:
            for imported in module.imports:
                package, *below = imported.target.split(".")
                room = below[0] if below else FACADE
                if package == "ebmguard" and room in self.rooms and room != module.room:
                    arrow = module.room, room
                    found[arrow] = found.get(arrow, True) and imported.for_types
        return found

    def circles(self) -> set[frozenset[str]]:
        """Rooms that can reach each other, where there are more than one."""
        return _circles(self.rooms, self.arrows)

    def heights(self) -> dict[str, int]:
        """The floor of each room, from 1."""
        at_run_time = {arrow for arrow, for_types in self.arrows.items() if not for_types}
        arrows = at_run_time if self.circles() else set(self.arrows)
        alone = {room: frozenset([room]) for room in self.rooms}
        of = alone | {room: circle for circle in _circles(self.rooms, arrows) for room in circle}

        def height(circle: frozenset[str]) -> int:
            below = {of[b] for a, b in arrows if a in circle and b not in circle}
            return 1 + max(map(height, below), default=0)

        return {room: height(of[room]) for room in sorted(self.rooms)}


def _circles(names: Collection[str], arrows: Collection[Arrow]) -> set[frozenset[str]]:
    """Those that reach each other, more than one of them, together."""
    reached = {name: {name} for name in names}
    size = 0
    while size < (size := sum(map(len, reached.values()))):
        for a, b in arrows:
            reached[a] |= reached[b]
    circles = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in names
    }
    return {circle for circle in circles if len(circle) > 1}
