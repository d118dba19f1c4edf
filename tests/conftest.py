"""Set-up shared by all tests: seeds, threads, hypothesis, and where larger data sets lie."""

from __future__ import annotations

import gc
import os
import re
import signal
from pathlib import Path

import hypothesis
import pytest
import torch
from typeguard import install_import_hook

# Collecting imports two million objects that stay: to look through them again and again takes a
# fifth of that time, and half a second whenever a test collects garbage by itself.
gc.disable()

# What runs in every step checks no types; here every call of it is held to its annotations.
install_import_hook(["ebmguard.diagnostics"])

# Reproducible anywhere, and never failing because a machine is slow.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
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


HERE = Path(__file__).parent
HEAVY = (
    *("adapters", "frameworks", "never_silent", "recovery", "reference_training", "trace", "whole"),
    *("alerts/test_sampler_rules.py", "report/test_fuzz.py", "retrofit/test_bit_identity.py"),
    *("retrofit/test_ensembles.py", "sinks/test_logs.py"),
)
"""Rooms and files whose tests train, or take long otherwise."""
HEAVY_WORDS = re.compile(
    r"\b(subprocess|forks?|tests\.ranks|spawn|Popen|benchmarks|reference_training)\b"
    r"|torch\.compile|compile="
)
"""In a file: its tests train, compile or start processes."""
COVERED_ELSEWHERE = (
    *("alerts/test_conformance.py", "alerts/test_sampler_rules.py"),
    *("never_silent/test_optimizers.py", "never_silent/test_right_trainers.py"),
    *("never_silent/test_steps.py", "never_silent/test_validations.py"),
    *("never_silent/test_ties.py", "objective/test_closed_forms.py"),
    *("objective/test_double_backward.py", "objective/test_fixed_points.py"),
    *("objective/test_nonfinite.py", "objective/test_precision.py", "objective/test_properties.py"),
    *("reference_training/", "report/test_fuzz.py", "retrofit/test_bit_identity.py"),
    *("retrofit/test_any_time.py", "retrofit/test_blocks.py", "retrofit/test_ensembles.py"),
    *("sinks/test_tensorboard_page.py", "test_defaults.py", "test_examples.py"),
    *("test_gpu_benchmarks.py", "test_grid.py", "test_package.py", "test_population.py"),
    "test_rules_stamp.py",
    *("whole/test_close.py", "whole/test_files.py", "whole/test_start.py"),
)
"""What runs of the core in these runs in its own tests too; the tracer doubles a test's time."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="no file whose tests train, compile or start processes"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--fast` what takes long is not even imported."""
    if not config.getoption("--fast"):
        return None
    if any(collection_path.is_relative_to(HERE / name) for name in HEAVY):
        return True
    is_test = collection_path.match("test_*.py")
    return True if is_test and HEAVY_WORDS.search(collection_path.read_text("utf-8")) else None


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests wait for processes that they have started."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return 1 + (len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """What other tests cover is not traced."""
    if item.nodeid.removeprefix("tests/").startswith(COVERED_ELSEWHERE):
        item.add_marker("no_cover")


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
