"""Set-up shared by all tests: seeds, threads, hypothesis, and where larger data sets lie."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import hypothesis
import pytest
import torch
from typeguard import install_import_hook

# What runs in every step checks no types; here every call of it is held to its annotations.
install_import_hook(["ebmguard.diagnostics"])

# Reproducible anywhere, and never failing because a machine is slow.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci")

# One thread per test process where nothing else is asked for: pytest-xdist fills the cores.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

# A shell ignores these for what it starts in the background, and so would all that tests start.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Folder of the data sets that are not bundled; the test is skipped without it."""
    root = os.environ.get("EBMGUARD_DATA")
    if not root:
        pytest.skip("EBMGUARD_DATA is not set: it names the folder with CIFAR-10 and MNIST")
    if not Path(root).is_dir():
        pytest.skip(f"EBMGUARD_DATA names {root!r}, which is not a folder")
    return Path(root)
