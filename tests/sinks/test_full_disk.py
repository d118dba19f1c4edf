"""A real training loop whose log folder has no room left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ebmguard.sinks import read_jsonl
from tests.sinks.parts import scalars

# Files of a process may be limited in size; writing beyond raises OSError, as a full disk does.
SCRIPT = """
import os, resource, sys
import torch
from ebmguard import guard


def train(folder, room_again, steps=30):
    torch.manual_seed(0)
    f = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(f.parameters(), lr=0.01)
    g = guard(None, None, beta_star=0.5, log_dir=folder, flush_every=4)
    g.attach(model=f, optimizer=optimizer)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    for step in range(steps):
        if step == 10:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
        if step == room_again:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        optimizer.zero_grad()
        g.loss(f(torch.randn(8, 2)), f(torch.randn(8, 2))).backward()
        optimizer.step()
    print("trained", g.step)


for room_again in sys.argv[2:]:
    if os.fork() == 0:
        train(f"{sys.argv[1]}/{room_again}", int(room_again))
        break
    os.wait()
    print("over", file=sys.stderr, flush=True)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a run for each case, and what each said."""
    folder = tmp_path_factory.mktemp("runs")
    words = [sys.executable, "-c", SCRIPT, str(folder), "20", "-1"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "trained 30\n" * 2
    return folder, done.stderr.split("over\n")


@pytest.mark.parametrize(("case", "room_again"), [(0, 20), (1, -1)])
def test_a_run_outlives_a_full_disk_and_says_what_is_lost(
    ended: tuple[Path, list[str]], case: int, room_again: int
) -> None:
    folder, said = ended[0] / str(room_again), ended[1][case]
    written = 30 if room_again > 0 else 8
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl")] == list(range(written))
    for name in ("JsonlSink", "TensorBoardSink"):
        assert said.count(f"{name} cannot write") == 1
        taken = f"{name} takes its rows again: everything was written"
        lost = f"{name} has not taken up to 22 rows and alerts until the end"
        assert (taken in said, lost in said) == (room_again > 0, room_again < 0)
    if room_again > 0:
        assert [step for step, _ in scalars(folder, "guard/energy_gap")] == list(range(30))
