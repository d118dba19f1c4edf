"""The package as installed: what it imports, which room imports which, and what it exports."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ebmguard

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Room -> what it may import of ours. `errors` and `energies` (the shapes that energies have) are
# the floor that all may stand on. See CONTRIBUTING.md.
FLOOR = {"errors", "energies"}
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "energies": set(),
    "objective": set(),
    "difference": {"objective"},
    "strength": set(),
    "evaluations": set(),
    "temper": {"evaluations"},
    "diagnostics": {"objective"},
    "sinks": set(),
    "samplers": set(),
    "faults": set(),
    "alerts": set(),
    "recovery": {"alerts"},
    "steering": set(),
    "check": {"alerts"},
    "monitor": {"diagnostics", "sinks"},
    # The stateful shell: all private modules.
    "_guard": {
        "objective",
        "difference",
        "strength",
        "evaluations",
        "temper",
        "diagnostics",
        "sinks",
        "samplers",
        "alerts",
        "monitor",
        "check",
        "recovery",
        "steering",
    },
    "doctor": {"alerts", "check", "sinks"},
    "report": {"alerts", "sinks"},
    "cli": {"alerts", "doctor", "report", "sinks", "reference_training"},
}
EXTRAS_ONLY = (
    "tensorboard",
    "tyro",
    "rich",
    "sklearn",
    "scipy",
    "matplotlib",
    "numpy",
    "pandas",
    "torchmetrics",
    "jinja2",
    "selenium",
    "lightning",
    "pytorch_lightning",
    "accelerate",
    "torchebm",
    "jax",
    "optax",
    "wandb",
    "mlflow",
    "trackio",
)


def run(code: str, *, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def room_of(module: str) -> str:
    """The room of a module below ebmguard; private modules are the guard's."""
    first = module.split(".")[0]
    if first == "__main__":
        return "cli"
    return "_guard" if first.startswith("_") else first


def modules() -> list[tuple[str, Path]]:
    """Every module of ebmguard/ by its name below the package, the facade left out."""
    paths = sorted((ROOT / "ebmguard").rglob("*.py"))
    parts = [path.relative_to(ROOT / "ebmguard").with_suffix("").parts for path in paths]
    names = [".".join(part for part in own if part != "__init__") for own in parts]
    return [(name, path) for name, path in zip(names, paths, strict=True) if name]


def imports(path: Path, name: str) -> Iterator[str]:
    """Absolute names that a module imports anywhere in it, but for the type checker alone."""
    tree = ast.parse(path.read_text())
    for_types: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for_types.update(child for part in node.body for child in ast.walk(part))
    package = ["ebmguard", *name.split(".")]
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def test_importing_ebmguard_imports_nothing_but_torch() -> None:
    new = run(
        "import sys, torch\n"
        "before = {name.split('.')[0] for name in sys.modules}\n"
        "import ebmguard\n"
        "after = {name.split('.')[0] for name in sys.modules}\n"
        "print(' '.join(sorted(after - before - set(sys.stdlib_module_names))))"
    ).split()
    # The finder of an editable install is setuptools' own.
    assert [name for name in new if not name.startswith("__editable__")] == ["ebmguard"]


def test_ebmguard_can_be_imported_without_any_extra() -> None:
    run(f"import sys\nfor name in {EXTRAS_ONLY}: sys.modules[name] = None\nimport ebmguard")


@pytest.mark.parametrize(("name", "path"), modules(), ids=[name for name, _ in modules()])
def test_every_module_imports_only_what_its_room_may(name: str, path: Path) -> None:
    room = room_of(name)
    assert room in ROOMS, f"{room} has no entry in ROOMS: say there what it may import"
    allowed = ROOMS[room] | FLOOR | {room}
    ours = [target for target in imports(path, name) if target.split(".")[0] == "ebmguard"]
    wrong = [
        target
        for target in ours
        if len(parts := target.split(".")) == 1 or room_of(parts[1]) not in allowed
    ]
    assert not wrong, f"ebmguard.{name} imports {wrong}; {room} may import {sorted(allowed)}"


def test_every_room_in_the_table_exists() -> None:
    assert {room_of(name) for name, _ in modules()} == set(ROOMS)


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [("alerts", "torch"), ("steering", "torch"), ("sinks", "torch.utils.tensorboard")],
)
def test_what_a_room_must_not_need(room: str, forbidden: str) -> None:
    for name, path in modules():
        if room_of(name) == room:
            assert not any(target.startswith(forbidden) for target in imports(path, name)), name


def test_reference_training_uses_only_public_names() -> None:
    for path in sorted((ROOT / "reference_training").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for target in imports(path, name):
            parts = target.split(".")
            if parts[0] == "ebmguard" and parts[1] not in ("reference_training", "adapters"):
                assert not any(part.startswith("_") for part in parts), f"{path}: {target}"


def public_modules() -> list[ModuleType]:
    names = [
        info.name
        for info in pkgutil.walk_packages(ebmguard.__path__, "ebmguard.")
        if not any(part.startswith("_") for part in info.name.split("."))
    ]
    return [ebmguard, *(importlib.import_module(name) for name in names)]


@pytest.mark.parametrize("module", public_modules(), ids=lambda module: module.__name__)
def test_what_is_exported_exists_and_is_documented(module: ModuleType) -> None:
    assert len((module.__doc__ or "").strip()) > 10, f"{module.__name__} has no docstring"
    names = getattr(module, "__all__", [])
    assert len(set(names)) == len(names)
    for name in names:
        thing = getattr(module, name)
        if inspect.isclass(thing) or inspect.isroutine(thing):
            assert inspect.getdoc(thing), f"{module.__name__}.{name} has no docstring"
        if inspect.isclass(thing) and thing.__module__.startswith("ebmguard"):
            for attribute, member in vars(thing).items():
                if inspect.isfunction(member) and not attribute.startswith("_"):
                    assert inspect.getdoc(member), f"{module.__name__}.{name}.{attribute}"


def test_the_facade_names_everything_it_offers() -> None:
    offered = {
        name
        for name, thing in vars(ebmguard).items()
        if not name.startswith("_") and not inspect.ismodule(thing)
    }
    assert offered <= set(ebmguard.__all__)


def test_every_package_is_installed() -> None:
    # setuptools finds nothing by itself where folders are mapped to other names.
    mapping = {
        "ebmguard": "ebmguard",
        "adapters": "ebmguard.adapters",
        "reference_training": "ebmguard.reference_training",
    }
    found = {
        ".".join([name, *path.parent.relative_to(ROOT / folder).parts])
        for folder, name in mapping.items()
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


@pytest.mark.slow
def test_a_wheel_holds_everything(tmp_path: Path) -> None:
    source = tmp_path / "source"
    keep = ("ebmguard", "adapters", "reference_training", "pyproject.toml", "README.md", "LICENSE")
    source.mkdir()
    for entry in keep:
        if (ROOT / entry).is_dir():
            shutil.copytree(
                ROOT / entry, source / entry, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / entry, source / entry)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("ebmguard-*.whl")
    target = tmp_path / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--target", target, wheel], check=True)
    out = run(
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import pathlib, ebmguard, ebmguard.adapters, ebmguard.reference_training.jem as jem\n"
        "print(ebmguard.__file__)\n"
        "print(jem.__file__)\n"
        "print((pathlib.Path(ebmguard.__file__).parent / 'py.typed').exists())",
        cwd=tmp_path,
    ).split()
    assert out[0].startswith(str(target))
    assert out[1].startswith(str(target / "ebmguard" / "reference_training"))
    assert out[2] == "True"
