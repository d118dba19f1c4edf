"""Every public name has its entry on the API pages; `make docs` checks the built ones too."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "reference" / "api"


def hook() -> Any:
    """What mkdocs calls while it builds the site."""
    spec = importlib.util.spec_from_file_location("api_hook", ROOT / "docs" / "hooks" / "api.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


API = hook()
ROOMS: list[str] = API.rooms()


def entries(page: Path) -> list[str]:
    """The names whose entries a page has, by the file that defines each."""
    return re.findall(r"^::: (\S+)$", API.expanded(page.read_text()), re.MULTILINE)


def is_room(thing: object) -> bool:
    return isinstance(thing, ModuleType)


def test_all_subpackages_are_rooms_of_the_pages():
    packages = {
        f"ebmguard.{path.parent.name}" for path in (ROOT / "ebmguard").glob("*/__init__.py")
    }
    assert packages - {*ROOMS} == {"ebmguard.trace"}  # a command, which exports no name
    assert {"ebmguard", "ebmguard.runs", "ebmguard.errors"} <= {*ROOMS}


@pytest.mark.parametrize("room", ROOMS)
def test_names_are_followed_to_where_they_are_defined(room):
    module = importlib.import_module(room)
    names = [name for name in module.__all__ if not is_room(getattr(module, name))]
    assert {*API.exports(room)} == {*names}
    for name, path in API.exports(room).items():
        file, _, last = path.rpartition(".")
        found = getattr(importlib.import_module(file), last)
        assert found is getattr(module, name)
        if inspect.isclass(found) or inspect.isfunction(found):
            assert found.__module__ == file


def test_every_public_name_has_one_entry():
    found = [name for page in sorted(PAGES.glob("*.md")) for name in entries(page)]
    wanted = {path for room in ROOMS for path in API.exports(room).values()}
    assert wanted <= {*found}
    assert len(found) == len({*found})
