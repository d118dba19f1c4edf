"""Mutants of the core: one token or one statement is changed, and tests should fail.

python -m benchmarks.mutants   # go on where the last run stopped, two at a time

Each mutant is run against the tests of its room that execute its line, by a first run of the room
with coverage: the quickest first, for a minute. What lives then is run against all tests of all
rooms that execute it; where import alone does, against all tests of its room. It changes no file: a
loader compiles the mutated source in the process of the tests. Processes that a test starts run the
code as it is.
"""

from __future__ import annotations

import argparse
import ast
import csv
import dataclasses
import importlib.abc
import importlib.util
import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOMS = {
    "alerts": ("alerts",),
    "diagnostics": ("diagnostics",),
    "objective": ("objective",),
    "recovery": ("recovery",),
    "report": ("report",),
    "retrofit": ("retrofit", "never_silent"),
    "samplers": ("samplers",),
    "sampling": ("sampling",),
    "sinks": ("sinks",),
    "trace": ("trace",),
}
"""Of the core, with the folders of their tests."""
COUNT, SEED, MINUTES, QUICK = 300, 0, 15, 60.0
SURVIVES = "lives a minute"
RUNS, TABLE = Path("runs/mutants"), Path("docs/results/mutants.csv")
SWAPS = dict(
    pair.split(" → ")
    for pair in (
        *("< → <=", "<= → <", "> → >=", ">= → >", "== → !=", "!= → ==", "in → not in"),
        *("not in → in", "is → is not", "is not → is", "and → or", "or → and", "not → "),
        *("+ → -", "- → +", "* → /", "/ → *", "// → *", "% → *", "** → *", "| → &", "& → |"),
        *("+= → -=", "-= → +=", "*= → /=", "/= → *=", "|= → &=", "min → max", "max → min"),
        *("any → all", "all → any"),
    )
)


@dataclass(frozen=True)
class Mutant:
    """A change of bytes ``begin`` to ``end`` of a file."""

    file: str
    line: int
    begin: int
    end: int
    new: str

    @property
    def name(self) -> str:
        return f"{self.file.removeprefix('ebmguard/')}:{self.line}:{self.begin}-{self.end}"

    @property
    def room(self) -> str:
        return self.file.split("/")[1]

    def text(self) -> tuple[str, str]:
        """The line before and after."""
        source = Path(self.file).read_bytes()
        first = source.rfind(b"\n", 0, self.begin) + 1
        last = source.find(b"\n", self.end)
        before = source[first:last].decode()
        after = (source[first : self.begin] + self.new.encode() + source[self.end : last]).decode()
        return " ".join(before.split()), " ".join(after.split())

    def source(self) -> bytes:
        """The file, changed."""
        source = Path(self.file).read_bytes()
        return source[: self.begin] + self.new.encode() + source[self.end :]


def mutants_of(file: Path) -> Iterator[Mutant]:
    """The changes of a file: other operators and constants, calls and assignments left out.

    What tests do not hold anywhere is left alone: annotations, messages of errors, and names that
    a module lists.
    """
    source = file.read_bytes()
    starts = [0]
    for text in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(text))
    tree = ast.parse(source)

    def begin(node: Any) -> int:
        return int(starts[node.lineno - 1] + node.col_offset)

    def end(node: Any) -> int:
        return int(starts[node.end_lineno - 1] + node.end_col_offset)

    def whole(node: ast.AST, new: str) -> Mutant:
        return change(begin(node), end(node), new)

    def between(left: int, right: int) -> Iterator[Mutant]:
        word = source[left:right].decode().strip("() \n\\")
        if word in SWAPS and source.count(word.encode(), left, right) == 1:
            first = source.index(word.encode(), left)
            yield change(first, first + len(word.encode()), SWAPS[word])

    def change(first: int, last: int, new: str) -> Mutant:
        return Mutant(file.as_posix(), source.count(b"\n", 0, first) + 1, first, last, new)

    def walk(node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.BoolOp(values=values):
                yield from between(end(values[0]), begin(values[1]))
            case ast.BinOp(left=left, right=right) | ast.Compare(left=left, comparators=[right]):
                yield from between(end(left), begin(right))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield from between(begin(node), begin(operand))
            case ast.AugAssign(target=target, value=value):
                yield from between(end(target), begin(value))
                yield whole(node, "pass")
            case ast.Constant(value=bool() | int() | float() as value):
                more = value * 1.5 or 1.0 if isinstance(value, float) else value + 1
                yield whole(node, repr(not value if isinstance(value, bool) else more))
            case ast.Call(func=ast.Name() as func) if func.id in ("min", "max", "any", "all"):
                yield whole(func, SWAPS[func.id])
            case ast.Expr(value=ast.Call()):
                yield whole(node, "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield whole(node, "pass")
        for name, fields in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in fields if isinstance(fields, list) else [fields]:
                messages = ast.Raise | ast.Assert | ast.JoinedStr
                if isinstance(child, ast.AST) and not isinstance(child, messages):
                    yield from walk(child)

    return walk(tree)


def is_another(mutant: Mutant) -> bool:
    """Whether it can be compiled, and means something else."""
    try:
        changed = ast.parse(mutant.source())
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse(Path(mutant.file).read_bytes()))


def drawn(count: int = COUNT, seed: int = SEED) -> list[Mutant]:
    """The mutants of the study, uniform over all changes of all rooms."""
    files = sorted(x for room in ROOMS for x in Path("ebmguard", room).rglob("*.py"))
    every = [mutant for file in files for mutant in mutants_of(file)]
    random.Random(seed).shuffle(every)
    return [*itertools.islice(filter(is_another, every), count)]


class Loader(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports one module from its mutated source."""

    def __init__(self, mutant: Mutant) -> None:
        # Now: a test may work in another folder when the module is imported.
        self.file, self.source = Path(mutant.file).absolute(), mutant.source()
        self.module = mutant.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def pytest_sessionstart(self) -> None:
        """Come before what checks types, which the suite's own conftest has put first."""
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.module:
            return None
        places = [str(self.file.parent)] if self.file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            name, self.file, loader=self, submodule_search_locations=places
        )

    def get_source(self, fullname: str) -> str:
        return self.source.decode()

    def get_code(self, fullname: str) -> Any:
        return compile(self.source, self.file, "exec", dont_inherit=True)


def pytest_of(*words: str) -> list[str]:
    return ["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *words]


def coverage_of(room: str) -> Path:
    """Which tests of a room execute which lines: measured once."""
    data = RUNS.absolute() / f"{room}.coverage"
    if not data.exists():
        RUNS.mkdir(parents=True, exist_ok=True)
        folders = [f"tests/{name}" for name in ROOMS[room]]
        words = pytest_of(*folders, "--cov=ebmguard", "--cov-context=test", "--cov-report=")
        words += ["--durations=0", "-vv"]
        part = data.with_suffix(".part")
        own = {**os.environ, "COVERAGE_FILE": str(part)}
        with data.with_suffix(".seconds").open("w") as seconds:
            subprocess.run(
                [sys.executable, "-m", "pytest", *words], env=own, check=True, stdout=seconds
            )
        part.rename(data)
    return data


def tests_of(mutant: Mutant, rooms: Iterable[str]) -> dict[str, float]:
    """The seconds of the tests of these rooms that execute its line, the quickest first."""
    from coverage import CoverageData

    found = dict[str, float]()
    for file in map(coverage_of, rooms):
        data = CoverageData(str(file))
        data.read()
        spent = re.findall(
            r"^([\d.]+)s call +(.+)$", file.with_suffix(".seconds").read_text(), re.M
        )
        seconds = {test: float(text) for text, test in spent}
        contexts = data.contexts_by_lineno(str(Path(mutant.file).absolute())).get(mutant.line, [])
        names = {name.partition("|")[0] for name in contexts if name}
        found |= {name: seconds.get(name, 0.0) for name in names}
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def run(mutant: Mutant, *, is_whole: bool) -> str:
    """ "caught by" the test that fails first or "the time" that they take, or that it "lives"."""
    tests = tests_of(mutant, ROOMS if is_whole else [mutant.room])
    if not is_whole:
        total = itertools.accumulate(tests.values())
        quick = [*itertools.takewhile(lambda pair: pair[1] < QUICK, zip(tests, total, strict=True))]
        tests = dict(quick) or tests
    words = [sys.executable, "-m", "benchmarks.mutants"]
    words += ["--one", json.dumps(dataclasses.asdict(mutant))]
    words += tests or [f"tests/{name}" for name in ROOMS[mutant.room]]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60 * MINUTES)
    except subprocess.TimeoutExpired:
        return "caught by the time"
    if done.returncode not in (0, 1, 2, 3, 4):  # 2 to 4: it could not even be imported
        raise RuntimeError(f"{mutant.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    if not done.returncode:
        return "lives" if is_whole else SURVIVES
    test = re.search(r"^(?:FAILED|ERROR) (tests/\S+)", done.stdout, re.M)
    return f"caught by {test[1]}" if test else "caught at import"


def main(words: list[str] | None = None) -> int:
    """Run what has not been run, or one mutant's tests."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rooms", nargs="+", choices=[*ROOMS], default=[*ROOMS])
    parser.add_argument("tests", nargs="*", help=argparse.SUPPRESS)
    own = parser.parse_args(words)
    if own.one:
        import pytest

        loader = Loader(Mutant(**json.loads(own.one)))
        sys.meta_path.insert(0, loader)
        return int(pytest.main(pytest_of(*own.tests), plugins=[loader]))
    rows, mutants = RUNS / "rows.jsonl", [x for x in drawn() if x.room in own.rooms]
    RUNS.mkdir(parents=True, exist_ok=True)
    rows.touch()
    for room in sorted({x.room for x in mutants}):
        coverage_of(room)
    for is_whole in (False, True):
        lines = map(json.loads, rows.read_text().splitlines())
        fates = {line["name"]: line["fate"] for line in lines}
        left = [x for x in mutants if fates.get(x.name) == (SURVIVES if is_whole else None)]
        with ThreadPoolExecutor(own.workers) as pool, rows.open("a") as stream:
            results = pool.map(partial(run, is_whole=is_whole), left)
            for mutant, fate in zip(left, results, strict=True):
                before, after = mutant.text()
                line = {"name": mutant.name, "fate": fate, "before": before, "after": after}
                print(json.dumps(line), file=stream, flush=True)
                print(f"{fate:8} {mutant.name}: {before}  ->  {after}", flush=True)
    write(rows.read_text().splitlines())
    return 0


def write(lines: list[str]) -> None:
    """The table, with the reasons that were written into it by hand."""
    rows = {row["name"]: row for row in map(json.loads, lines)}  # the last of a name counts
    reasons = dict[str, str]()
    if TABLE.exists():
        with TABLE.open(encoding="utf-8", newline="") as stream:
            reasons = {row["name"]: row["why"] for row in csv.DictReader(stream)}
    with TABLE.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, ["name", "fate", "before", "after", "why"])
        writer.writeheader()
        writer.writerows({**row, "why": reasons.get(row["name"], "")} for row in rows.values())


if __name__ == "__main__":
    sys.exit(main())
