"""Ranks that are killed while torchrun watches them, and start again by themselves."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.reference_training.parts import assert_same_run

KILLS = 3
STEPS, EVERY = 120, 10
TRAIN = (
    f"train shortrun --data digits --device cpu --iterations {STEPS} --train-images 64 "
    "--test-images 32 --batch 8 --nf 4 --sgld-steps 3 --sample-every 50 "
    f"--checkpoint-every {EVERY}"
).split()


def start(out: Path) -> subprocess.Popen[bytes]:
    """Two ranks, by torchrun."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    restarts = ["--max-restarts", str(KILLS), "-m", "ebmguard"]
    with out.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *launcher, *restarts, *TRAIN, "--out", str(out)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def ranks_of(launcher: int) -> list[int]:
    """The processes that it has started as ranks."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    found = []
    for child in children:
        try:
            is_rank = b"LOCAL_RANK=" in Path(f"/proc/{child}/environ").read_bytes()
        except OSError:  # it is over
            continue
        found += [int(child)] if is_rank else []
    return found


def newest(out: Path) -> int:
    """The step of the newest checkpoint; 0 before the first."""
    names = [file.name for file in out.glob("checkpoints/step-*.rank?of2.pt")]
    return max((int(name[5:13]) for name in names), default=0)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")
def test_killed_ranks_start_again_and_end_with_the_bits_of_an_unbroken_run(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert start(whole).wait() == 0
    rng = random.Random(0)
    launcher = start(broken)
    try:
        for kill in range(KILLS):
            while len(ranks := ranks_of(launcher.pid)) < 2:
                assert launcher.poll() is None
                time.sleep(0.05)
            # The first dies while it starts, the others when the run has come farther.
            if kill:
                wanted = newest(broken) + EVERY * rng.randint(1, 4)
                while newest(broken) < wanted:
                    assert launcher.poll() is None
                    time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.1 if kill else 3))
            step, victim = newest(broken), rng.randrange(2)
            os.kill(ranks[victim], signal.SIGKILL)
            began = time.monotonic()
            while set(ranks) & set(ranks_of(launcher.pid)):
                time.sleep(0.01)
            seconds = time.monotonic() - began
            print(
                f"\nkilled rank {victim}, newest checkpoint of step {step}: both gone after "
                f"{seconds:.1f} s"
            )
        assert launcher.wait() == 0
    finally:
        launcher.terminate()
        launcher.wait()
    for part in (".rank0of2", ".rank1of2"):
        assert_same_run(whole, broken, part)
