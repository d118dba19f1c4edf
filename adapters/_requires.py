"""The error for a framework that is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["requires"]


@contextmanager
def requires(package: str, *, extra: str) -> Iterator[None]:
    """Say what to install if an import inside the block fails.

    Args:
        package: the name under which the framework is installed.
        extra: the extra of ebmguard that brings it.

    Raises:
        ImportError: the block raised one; its cause is kept.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"This adapter needs the package {package}, which cannot be imported: {error}. Run "
            f'`pip install ".[{extra}]"` in a clone, or install {package} itself.',
            name=error.name,
        ) from error
