"""Names of packages that are imported when they are first used."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec

__all__ = ["lazy"]


def lazy(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package, which imports its modules and what is in them.

    Args:
        package: its name.
        homes: the module, ``.module`` within the package, of every name that is no module.
    """

    def find(name: str) -> object:
        home = homes.get(name, f".{name}")
        if name.startswith("_") or find_spec(home, package) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(home, package)
        value = getattr(module, name) if name in homes else module
        setattr(sys.modules[package], name, value)
        return value

    return find
