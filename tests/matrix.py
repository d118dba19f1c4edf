"""The suite on other people's machines: `python -m tests.matrix --help`, or `make test-matrix`.

Each environment differs from the plain one in one thing: the instructions that PyTorch or oneDNN
may use, the number of threads, the Python, or the versions of packages. Its row in the table is
replaced when it has run, so that a matrix may be run in parts.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "results" / "matrix.md"
FOLDER = ROOT / ".venv-matrix"
CPU_INFO = Path("/proc/cpuinfo")
SUITE = ("-m", "not slow", "tests", "--ignore=tests/frameworks")
ADAPTERS = ("-m", "not slow", "tests/adapters", "tests/frameworks")
COLUMNS = ("environment", "what differs", "Python, torch", "when", "passed", "failed", "skipped")
FOLLOWS_JAX = {"blackjax", "optax"}  # a pin of theirs would ask for a newer jax than the lowest
# What a plain environment leaves to the machine; and where no bytecode may be kept, each process of
# the tests would compile torch again.
CHOSEN = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "OMP_NUM_THREADS",
    "PYTHONDONTWRITEBYTECODE",
)


class CannotRunError(Exception):
    """Why an environment cannot be had on this machine."""


@dataclass(frozen=True)
class Environment:
    """One way to run the suite.

    Attributes:
        says: what differs from the plain environment, in words.
        variables: environment variables on top of one thread.
        needs: a flag of /proc/cpuinfo without which the instructions are not there.
        python: the interpreter's name; "" is the one that runs this.
        torch: "pinned" by constraints.txt, or the "lowest" or "newest" of pyproject.toml.
        lowest: extras of pyproject.toml whose packages have their lowest versions.
        tests: what pytest is given.
    """

    says: str
    variables: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""
    python: str = ""
    torch: str = "pinned"
    lowest: tuple[str, ...] = ()
    tests: tuple[str, ...] = SUITE


ENVIRONMENTS = {
    "plain": Environment("the machine's own instructions, 1 thread"),
    "threads": Environment("4 threads", {"OMP_NUM_THREADS": "4"}),
    "aten-default": Environment("ATEN_CPU_CAPABILITY=default", {"ATEN_CPU_CAPABILITY": "default"}),
    "aten-avx2": Environment("ATEN_CPU_CAPABILITY=avx2", {"ATEN_CPU_CAPABILITY": "avx2"}, "avx2"),
    "onednn-sse41": Environment(
        "ONEDNN_MAX_CPU_ISA=SSE41", {"ONEDNN_MAX_CPU_ISA": "SSE41"}, "sse4_1"
    ),
    "onednn-avx2": Environment("ONEDNN_MAX_CPU_ISA=AVX2", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "avx2"),
    "python-3.11": Environment("Python 3.11", python="python3.11"),
    "python-3.13": Environment("Python 3.13", python="python3.13"),
    "torch-lowest": Environment("the lowest torch", python="python3.11", torch="lowest"),
    "torch-newest": Environment("the newest torch", torch="newest"),
    "extras-lowest": Environment(
        "the lowest versions of the extra train", python="python3.11", lowest=("train",)
    ),
    "frameworks-lowest": Environment(
        "the lowest versions of the frameworks' extras, with the adapters' tests",
        python="python3.11",
        lowest=("lightning", "accelerate", "torchebm", "jax", "wandb", "mlflow", "trackio"),
        tests=ADAPTERS,
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What pytest counted, and the names of what failed."""

    passed: int
    failed: tuple[str, ...]
    skipped: int


def requirements(extras: Sequence[str]) -> Iterator[str]:
    """The requirements of extras in pyproject.toml, those that they name of each other resolved."""
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for extra in extras:
        for requirement in optional[extra]:
            own = re.fullmatch(r"ebmguard\[(.*)\]", requirement)
            yield from requirements(own[1].split(",")) if own else (requirement,)


def lowest(requirement: str) -> str:
    """``name>=1.2`` as ``name==1.2``: the version that a user may have."""
    return requirement.replace(">=", "==")


def interpreter(environment: Environment) -> str:
    """A Python with what the environment asks for, installed where it is not there yet.

    Raises:
        CannotRunError: there is no such Python, or no such package for it.
    """
    if environment.needs and environment.needs not in (
        CPU_INFO.read_text() if CPU_INFO.is_file() else ""
    ):
        raise CannotRunError(f"{CPU_INFO} knows no {environment.needs} of this processor")
    is_plain = environment.torch == "pinned" and not environment.lowest
    own = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if is_plain and environment.python == own:
        raise CannotRunError("it is the plain environment")
    if is_plain and not environment.python:
        return sys.executable
    base = shutil.which(environment.python or own)
    if base is None:
        raise CannotRunError(f"there is no {environment.python or own} on the PATH")
    words = [Path(base).name, environment.torch, *environment.lowest]
    folder = FOLDER / "-".join(words)
    python, ready = str(folder / "bin" / "python"), folder / ".ready"
    if not ready.exists():
        command([base, "-m", "venv", "--clear", str(folder)])
        install(python, environment)
        ready.touch()
    return python


def install(python: str, environment: Environment) -> None:
    """Install the project with the packages of the environment, the others from the pins.

    What decides comes first, with whatever it needs; the pins hold for what is left.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = project["dependencies"]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    wanted = {
        "lowest": lowest(torch),
        "newest": torch,
        "pinned": next(pin for pin in pins if pin.startswith("torch==")),
    }[environment.torch]
    first = [wanted, *map(lowest, requirements(environment.lowest))]
    # What pip had not resolved after half an hour, the lowest frameworks, takes uv seconds.
    command([python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "uv"])
    pip = [python, "-m", "uv", "pip"]
    # Compiled here: a syntax warning of a package is no failure of a test that imports it first.
    quiet = [*pip, "install", "--quiet", "--compile-bytecode"]
    command([*quiet, "--upgrade", *first])
    there = command([*pip, "freeze"]).lower().replace("_", "-")
    names = {line.partition("==")[0] for line in there.splitlines()} | FOLLOWS_JAX
    free = [pin for pin in pins if pin.partition("==")[0] not in names]
    rest = FOLDER / "pins.txt"
    rest.write_text("\n".join([*free, *first]) + "\n")
    extra = "adapters" if environment.tests is ADAPTERS else "test"
    command([*quiet, "-c", str(rest), "-e", f"{ROOT}[{extra}]"])


def command(words: Sequence[str]) -> str:
    """What a command prints.

    Raises:
        CannotRunError: it failed, with its last line that begins with ERROR, or its first one.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        errors = [line for line in said if line.startswith("ERROR")][-1:] or said
        raise CannotRunError(errors[0] if errors else f"{words[0]} ended with {done.returncode}")
    return done.stdout


def run(environment: Environment, python: str, arguments: Sequence[str]) -> Outcome:
    """Run pytest and count.

    Raises:
        CannotRunError: pytest ended without a report.
    """
    report = FOLDER / "report.xml"
    report.unlink(missing_ok=True)
    variables = {k: v for k, v in os.environ.items() if k not in CHOSEN}
    variables |= {"OMP_NUM_THREADS": "1", **environment.variables}
    words = [python, "-m", "pytest", "-q", "-n", "2", f"--junitxml={report}"]
    ended = subprocess.run([*words, *arguments], cwd=ROOT, env=variables, check=False)
    if not report.is_file():
        raise CannotRunError(f"pytest ended with {ended.returncode} and without a report")
    return outcome(ET.parse(report).getroot())


def outcome(report: ET.Element) -> Outcome:
    """The counts of a JUnit report."""
    counted: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in report.iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "passed"
        kind = "skipped" if kinds == {"skipped"} else kind
        counted[kind].append(f"{case.get('classname')}::{case.get('name')}")
    passed, failed, skipped = counted.values()
    return Outcome(len(passed), tuple(failed), len(skipped))


def row(name: str, environment: Environment, versions: str, found: Outcome | str) -> str:
    """A line of the table; of an environment that cannot be had, why."""
    when = f"{datetime.date.today()}, {command(['git', 'rev-parse', '--short', 'HEAD']).strip()}"
    # Rows that were written before this one are no change.
    if command(["git", "diff", "HEAD", "--name-only", "--", ".", f":!{TABLE.relative_to(ROOT)}"]):
        when += ", changed"
    if isinstance(found, Outcome):
        failed = str(len(found.failed))
        if found.failed:
            failed += ": " + ", ".join(f"`{test}`" for test in found.failed)
        counts = [str(found.passed), failed, str(found.skipped)]
    else:
        counts = ["-", f"not run: {found}", "-"]
    cells = [name, environment.says, versions, when, *counts]
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def written(table: str, name: str, line: str) -> str:
    """The page with the row of one environment replaced, in the order of the environments."""
    rows = dict(re.findall(r"^(?=\| ([\w.-]+) \|)(.*)$", table, flags=re.MULTILINE))
    rows = {key: each for key, each in rows.items() if key in ENVIRONMENTS} | {name: line}
    good = sum(each.split("|")[6].strip() == "0" for each in rows.values())
    lines = [
        "# The suite, environment by environment",
        "",
        f"The whole suite passes in {good} of {len(rows)} environments.",
        "",
        f"Written by `make test-matrix` on {processor()}. Each row differs from the first in one "
        "thing.",
        "What is skipped says why under `pytest -rs`.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---|---|---|---|--:|---|--:|",
        *(rows[each] for each in ENVIRONMENTS if each in rows),
    ]
    return "\n".join(lines) + "\n"


def processor() -> str:
    """The machine's processor, and how many cores of it there are."""
    told = CPU_INFO.read_text() if CPU_INFO.is_file() else ""
    model = re.search(r"model name\s*: (.*)", told)
    return f"{model[1] if model else platform.machine()}, {os.cpu_count()} cores"


def main() -> int:
    """Run the environments that were asked for; whether any failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS))
    parser.add_argument("--table", type=Path, default=TABLE, help="the page to write")
    parser.add_argument("--tests", nargs="+", help="other arguments of pytest than the whole suite")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    status = 0
    for name in options.only:
        environment, versions = ENVIRONMENTS[name], "-"
        found: Outcome | str
        try:
            python = interpreter(environment)
            ask = "import platform, torch; print(platform.python_version(), torch.__version__)"
            versions = command([python, "-c", ask]).strip().replace(" ", ", ")
            found = run(environment, python, options.tests or environment.tests)
            status |= bool(found.failed)
        except CannotRunError as error:
            found = str(error)
        line = row(name, environment, versions, found)
        print(line, flush=True)
        before = options.table.read_text() if options.table.is_file() else ""
        options.table.write_text(written(before, name, line))
    print(options.table.read_text())
    return status


if __name__ == "__main__":
    sys.exit(main())
