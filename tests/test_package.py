"""The package as installed: what it imports, which room imports which, and what it exports."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ebmguard
from tests.rooms import (
    FACADE,
    LAYERS,
    MAIN,
    ROOT,
    House,
    circles_of_files,
    may_import,
    modules,
)

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())

README = (ROOT / "README.md").read_text()

MAPPED = {
    "ebmguard": "ebmguard",
    "adapters": "ebmguard.adapters",
    "reference_training": "ebmguard.reference_training",
}
HOUSE = House()
# 16,000 lines are the goal; it must not grow away from it.
ROOMS, LINES, LINES_OF_A_FILE = 19, 19_530, 380
# Words that stand where the name of a thing should, and how often they may: 1,945 times once.
VAGUE, MOST_VAGUE = re.compile(r"\b(own|each|found|said|told)\b"), 100
# The guard as people import it: without what stands above it and beside it.
CORE = House(without=(FACADE, MAIN, "trace"))
EXTRAS_ONLY = (
    *("tensorboard", "tyro", "rich", "sklearn", "scipy", "matplotlib", "numpy", "pandas"),
    *("torchmetrics", "jinja2", "selenium", "lightning", "pytorch_lightning", "accelerate"),
    *("torchebm", "jax", "optax", "wandb", "mlflow", "trackio", "IPython"),
)


def run(code: str, *, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_ebmguard_needs_no_extra_and_imports_nothing_but_torch() -> None:
    new = run(
        f"import sys\nfor name in {EXTRAS_ONLY}: sys.modules[name] = None\n"
        "import torch\n"
        "before = {name.split('.')[0] for name in sys.modules}\n"
        "from ebmguard import *\n"
        "after = {name.split('.')[0] for name in sys.modules}\n"
        "print(' '.join(sorted(after - before - set(sys.stdlib_module_names))))\n"
        "import ebmguard.cli"
    ).split()
    # The finder of an editable install is setuptools' own.
    assert [name for name in new if not name.startswith("__editable__")] == ["ebmguard"]


def test_needs_no_torch() -> None:
    """The facade, the words of the command line, and the rooms."""
    run(
        "import sys\nsys.modules['torch'] = None\n"
        "import ebmguard; dir(ebmguard)\n"
        "from ebmguard.cli import main\n"
        "main(['--help']); assert main(['--version']) == 0; assert main(['bogus']) == 2\n"
        "import ebmguard.errors, ebmguard.alerts, ebmguard.sinks\n"
        "import ebmguard.report.watch, ebmguard.report.page, ebmguard.report.problems"
    )


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [("alerts", "torch"), ("sinks", "torch.utils.tensorboard")],
)
def test_what_a_room_must_not_need(room: str, forbidden: str) -> None:
    for module in HOUSE.modules:
        if module.room == room:
            assert not any(seen.target.startswith(forbidden) for seen in module.imports)


def test_a_room_imports_only_what_stands_below_it() -> None:
    wrong = [
        f"{module.name} imports {seen.target}"
        for module in HOUSE.modules
        for seen in module.imports
        if (parts := (*seen.target.split("."), FACADE))[0] == "ebmguard"
        and parts[1] not in may_import(module.room) | {module.room}
    ]
    assert wrong == []


def test_no_room_imports_through_the_facade() -> None:
    """It imports all of them: type checkers lose names in such a circle."""
    for module in HOUSE.modules:
        through = [seen.target for seen in module.imports if seen.bound]
        found = [name for name in through if name.rpartition(".")[0] == "ebmguard"]
        assert module.room == FACADE or not found, (module.name, found)


def test_no_message_names_a_file_that_a_wheel_lacks() -> None:
    for folder, package in MAPPED.items():
        for module in modules(ROOT / folder, package):
            # Docstrings, and strings below attributes, are for readers of the source.
            words = {node.value for node in module.nodes if isinstance(node, ast.Expr)}
            said = [
                node.value
                for node in module.nodes
                if isinstance(node, ast.Constant) and node not in words
            ]
            assert not [text for text in said if "docs/" in str(text)], module.name


def test_the_house_is_small() -> None:
    assert HOUSE.circles() == set()
    assert HOUSE.rooms == {FACADE, MAIN, *(room for floor in LAYERS for room in floor)}
    assert len(HOUSE.rooms) <= ROOMS
    assert max(CORE.heights().values()) <= len(LAYERS)
    assert len(CORE.arrows) <= 46
    lines = {module.name: module.lines for module in HOUSE.modules}
    assert sum(lines.values()) <= LINES
    assert max(lines.values()) <= LINES_OF_A_FILE, max(lines, key=lambda name: lines[name])


def test_names_say_what_they_hold() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "ebmguard").rglob("*.py")]
    assert sum(len(VAGUE.findall(text)) for text in texts) <= MOST_VAGUE


@pytest.mark.parametrize("folder", [*MAPPED, "benchmarks"])
def test_no_files_import_each_other_in_a_circle(folder: str) -> None:
    assert circles_of_files(modules(ROOT / folder, MAPPED.get(folder, folder))) == set()


@pytest.mark.parametrize("folder", [*MAPPED, "benchmarks"])
def test_no_room_imports_the_private_names_of_another(folder: str) -> None:
    for module in modules(ROOT / folder, MAPPED.get(folder, folder)):
        own = f"ebmguard.{module.room}." if folder in MAPPED else f"{folder}."
        for seen in module.imports:
            private = re.search(r"\._(?!_)", seen.target)
            ours = seen.target.startswith("ebmguard.")
            assert not (ours and private) or seen.target.startswith(own), (module.name, seen.target)


def public_modules() -> list[ModuleType]:
    names = [
        info.name
        for info in pkgutil.walk_packages(ebmguard.__path__, "ebmguard.")
        if not any(part.startswith("_") for part in info.name.split("."))
    ]
    return [ebmguard, *(importlib.import_module(name) for name in names)]


def test_what_is_exported_exists_and_is_documented() -> None:
    for module in public_modules():
        assert len((module.__doc__ or "").strip()) > 10, f"{module.__name__} has no docstring"
        names = getattr(module, "__all__", [])
        assert len(set(names)) == len(names)
        check_docstrings(module, names)


def check_docstrings(module: ModuleType, names: list[str]) -> None:
    for name in names:
        thing = getattr(module, name)
        if inspect.isclass(thing) or inspect.isroutine(thing):
            assert inspect.getdoc(thing), f"{module.__name__}.{name} has no docstring"
        if inspect.isclass(thing) and thing.__module__.startswith("ebmguard"):
            for attribute, member in vars(thing).items():
                if inspect.isfunction(member) and not attribute.startswith("_"):
                    assert inspect.getdoc(member), f"{module.__name__}.{name}.{attribute}"


def test_the_facade_offers_the_same_to_people_and_to_type_checkers() -> None:
    (facade,) = (module for module in HOUSE.modules if module.room == FACADE)
    typed = {
        seen.target.rpartition(".")[2] for seen in facade.imports if seen.for_types and seen.bound
    }
    assert typed == set(ebmguard.__all__) <= set(dir(ebmguard))
    for name in ebmguard.__all__:
        assert getattr(ebmguard, name) is vars(ebmguard)[name]
    with pytest.raises(AttributeError, match="no attribute 'gaurd'"):
        ebmguard.gaurd  # type: ignore[attr-defined]  # noqa: B018


def test_runs_keeps_its_name_and_is_read_when_it_is_used() -> None:
    """Each way to import it in a process of its own."""
    run(
        """
import os, sys, ebmguard
names = ("torch", "pandas", "ebmguard.report")
assert not any(name in sys.modules for name in names)
for code in (
    "import ebmguard.runs; load = ebmguard.runs.load",
    "from ebmguard import runs; load = runs.load",
    "from ebmguard.runs import load",
    "from ebmguard.runs import *",
):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, code
        continue
    exec(code)
    from ebmguard.report import frames
    assert load is frames.load and ebmguard.runs.Runs is frames.Runs
    assert not hasattr(ebmguard.runs, "lood") and "torch" not in sys.modules
    break
"""
    )


def test_every_package_is_installed() -> None:
    # setuptools finds nothing by itself where folders are mapped to other names.
    found = {
        ".".join([name, *path.parent.relative_to(ROOT / folder).parts])
        for folder, name in MAPPED.items()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_mapped_packages_import_under_their_installed_names() -> None:
    # From elsewhere, so that the folders of the checkout are not found by accident.
    out = run(
        "import ebmguard.adapters, ebmguard.reference_training.jem\n"
        "print(ebmguard.reference_training.__name__)",
        cwd=Path(sys.prefix),
    )
    assert out.strip() == "ebmguard.reference_training"


def test_versions_agree() -> None:
    version = PROJECT["project"]["version"]
    assert ebmguard.__version__ == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_constraints_cover_every_requirement() -> None:
    pinned = {
        line.split("==")[0]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    project = PROJECT["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(name for extra in extras for name in extra)]
    names = {re.split(r"[\[<>=~! ]", requirement)[0].lower() for requirement in wanted}
    assert names - {"ebmguard"} <= pinned
