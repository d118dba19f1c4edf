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
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.grid import commit

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "results" / "matrix.md"
FOLDER = ROOT / ".venv-matrix"
CPU_INFO = Path("/proc/cpuinfo")
SUITE = ("-m", "not slow", "tests", "--ignore=tests/frameworks")
ADAPTERS = ("-m", "not slow", "tests/adapters", "tests/frameworks")
LOWEST = "lowest-direct"
PAGE = """\
# The suite, environment by environment

The suite passed in {good} of {count} environments, each at the commit of its row;
frameworks-lowest has the adapters' tests alone.

Written by `make test-matrix` on {machine}. Each row differs from the first in one thing.
What is skipped says why under `pytest -rs`.

| environment | what differs | Python, torch | when | passed | failed | skipped |
|---|---|---|---|--:|---|--:|
{rows}
"""
FOLLOWS_JAX = {"blackjax", "optax"}  # a pin of theirs would ask for a newer jax than the lowest
# What a plain environment leaves to the machine; and where no bytecode may be kept, each process of
# the tests would compile torch again.
CHOSEN = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "PYTHONDONTWRITEBYTECODE")


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
        resolution: uv's, of what pyproject.toml asks for; "" takes the pins of constraints.txt.
        extras: those whose packages have it, with the pinned torch; else torch alone has it.
        tests: what pytest is given.
    """

    says: str
    variables: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""
    python: str = ""
    resolution: str = ""
    extras: tuple[str, ...] = ()
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
    "torch-lowest": Environment("the lowest torch", python="python3.11", resolution=LOWEST),
    "torch-newest": Environment("the newest torch", resolution="highest"),
    "extras-lowest": Environment(
        "the lowest versions of the extra train",
        python="python3.11",
        resolution=LOWEST,
        extras=("train",),
    ),
    "frameworks-lowest": Environment(
        "the lowest versions of the frameworks' extras, with the adapters' tests",
        python="python3.11",
        resolution=LOWEST,
        extras=("lightning", "accelerate", "torchebm", "jax", "wandb", "mlflow", "trackio"),
        tests=ADAPTERS,
    ),
}


def interpreter(environment: Environment) -> str:
    """A Python with what the environment asks for, installed where it is not there yet.

    Raises:
        CannotRunError: there is no such Python, or no such package for it.
    """
    own = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if environment.needs not in (CPU_INFO.read_text() if CPU_INFO.is_file() else ""):
        raise CannotRunError(f"{CPU_INFO} knows no {environment.needs} of this processor")
    if environment.python == own and not environment.resolution:
        raise CannotRunError("it is the plain environment")
    if not environment.python and not environment.resolution:
        return sys.executable
    base = shutil.which(environment.python or own)
    if base is None:
        raise CannotRunError(f"there is no {environment.python or own} on the PATH")
    folder = FOLDER / "-".join([Path(base).name, environment.resolution, *environment.extras])
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
    # What pip had not resolved after half an hour, the lowest frameworks, takes uv seconds.
    command([python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "uv"])
    pip = [python, "-m", "uv", "pip"]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    first = [pin for pin in pins if pin.startswith("torch==")]
    if environment.resolution:
        alone = ("--no-deps", "--no-header", "--no-annotate", "--quiet", "pyproject.toml")
        extras = [f"--extra={extra}" for extra in environment.extras]
        asked = [*pip, "compile", "--resolution", environment.resolution, *extras, *alone]
        found = command(asked).split()
        first = first + [x for x in found if not x.startswith("torch==")] if extras else found
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
        CannotRunError: it failed, with the first line that it said.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().partition("\n")[0]
        raise CannotRunError(said or f"{words[0]} ended with {done.returncode}")
    return done.stdout


def run(environment: Environment, python: str, arguments: Sequence[str]) -> list[str]:
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
    return counts(ET.parse(report).getroot())


def counts(report: ET.Element) -> list[str]:
    """Of a JUnit report: how many passed, how many failed and which, how many were skipped."""
    cases = [(case, {child.tag for child in case}) for case in report.iter("testcase")]
    failed = [case for case, kinds in cases if kinds & {"failure", "error"}]
    skipped = sum(kinds == {"skipped"} for _, kinds in cases)
    names = [f"`{case.get('classname')}::{case.get('name')}`" for case in failed]
    told = f"{len(names)}: {', '.join(names)}" if names else "0"
    return [str(len(cases) - len(failed) - skipped), told, str(skipped)]


def row(name: str, versions: str, found: Sequence[str]) -> str:
    """A line of the table."""
    when = f"{datetime.date.today()}, {commit()}"
    cells = [name, ENVIRONMENTS[name].says, versions, when, *found]
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def written(page: str, name: str, line: str) -> str:
    """The page with the row of one environment replaced, in the order of the environments."""
    rows = {key: each for each, key in re.findall(r"^(\| ([\w.-]+) \|.*)$", page, re.MULTILINE)}
    rows |= {name: line}
    lines = [rows[each] for each in ENVIRONMENTS if each in rows]
    good = sum(each.split("|")[6].strip() == "0" for each in lines)
    told = CPU_INFO.read_text() if CPU_INFO.is_file() else ""
    model = re.search(r"model name\s*: (.*)", told)
    machine = f"{model[1] if model else platform.machine()}, {os.cpu_count()} cores"
    return PAGE.format(good=good, count=len(lines), machine=machine, rows="\n".join(lines))


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
        try:
            python = interpreter(environment)
            ask = "import platform, torch; print(platform.python_version(), torch.__version__)"
            versions = command([python, "-c", ask]).strip().replace(" ", ", ")
            found = run(environment, python, options.tests or environment.tests)
            status |= found[1] != "0"
        except CannotRunError as error:
            found = ["-", f"not run: {error}", "-"]
        line = row(name, versions, found)
        print(line, flush=True)
        before = options.table.read_text() if options.table.is_file() else ""
        options.table.write_text(written(before, name, line))
    print(options.table.read_text())
    return status


if __name__ == "__main__":
    sys.exit(main())
