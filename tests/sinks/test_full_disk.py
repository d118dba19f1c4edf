"""A real training loop whose log folder has no room left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ebmguard.sinks import read_jsonl
from tests.sinks.test_tensorboard import load, scalars

# Files of a process may be limited in size; writing beyond raises OSError, as a full disk does.
SCRIPT = """
import resource, sys
import torch
from ebmguard import guard

folder, steps, room_again = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
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
"""


def train(folder: Path, steps: int, room_again: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), str(steps), str(room_again)],
        capture_output=True,
        text=True,
        check=True,
    )


def test_a_run_outlives_a_full_disk_and_writes_all_its_rows_when_there_is_room(
    tmp_path: Path,
) -> None:
    done = train(tmp_path, steps=30, room_again=20)
    assert done.stdout == "trained 30\n"
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(30))
    assert [step for step, _ in scalars(tmp_path, "guard/energy_gap")] == list(range(30))
    assert load(tmp_path).Tags()["tensors"]
    for name in ("JsonlSink", "TensorBoardSink"):
        assert done.stderr.count(f"{name} cannot write") == 1
        assert f"{name} takes its rows again: everything was written" in done.stderr


def test_a_run_whose_disk_stays_full_ends_well_and_says_what_is_lost(tmp_path: Path) -> None:
    done = train(tmp_path, steps=30, room_again=-1)
    assert done.stdout == "trained 30\n"
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(8))
    for name in ("JsonlSink", "TensorBoardSink"):
        assert done.stderr.count(f"{name} cannot write") == 1
        assert f"{name} has not taken up to 22 rows and alerts until the end" in done.stderr
