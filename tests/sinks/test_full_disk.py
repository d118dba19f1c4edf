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


@pytest.mark.parametrize("room_again", [20, -1])
def test_a_run_outlives_a_full_disk_and_says_what_is_lost(tmp_path: Path, room_again: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), "30", str(room_again)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "trained 30\n"
    written = 30 if room_again > 0 else 8
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(written))
    for name in ("JsonlSink", "TensorBoardSink"):
        assert done.stderr.count(f"{name} cannot write") == 1
        taken = f"{name} takes its rows again: everything was written"
        lost = f"{name} has not taken up to 22 rows and alerts until the end"
        assert (taken in done.stderr, lost in done.stderr) == (room_again > 0, room_again < 0)
    if room_again > 0:
        assert [step for step, _ in scalars(tmp_path, "guard/energy_gap")] == list(range(30))
