"""JAX in double precision, for the modules that ask for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def double_precision() -> Iterator[None]:
    import jax

    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
