"""JAX in double precision and Lightning without tips, for the modules that ask for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def double_precision() -> Iterator[None]:
    import jax

    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Lightning's tips are no part of what is tested."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
