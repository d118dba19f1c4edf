"""Two processes train one network: as one process with the joined batch, and in one folder."""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ebmguard.reference_training.engine.ranks import ONE_RANK
from ebmguard.sinks import read_jsonl
from tests.ranks import rank_fixtures
from tests.reference_training import ranks_train_process
from tests.reference_training.parts import (
    JEM,
    SHORTRUN,
    assert_same_run,
    largest_difference,
    same,
    saved,
    steps_of,
)
from tests.reference_training.ranks_train_process import CASES, WORLD, trained

started, folder, seen = rank_fixtures(ranks_train_process.__name__, WORLD)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process_with_the_joined_batch(seen, tmp_path, name):
    alone, (first, second) = trained(name, tmp_path, ONE_RANK), (rank[name] for rank in seen)
    for rank in (first, second):
        assert largest_difference(rank["network"], alone["network"]) < 1e-6
        assert rank["results"] == pytest.approx(alone["results"], rel=1e-6)
    # Where the bits are equal nothing can drift apart.
    assert same(first["network"], second["network"])
    # The first rank writes the rows of the joined batch.
    assert len(first["rows"]) == (5 if CASES[name][0] in (JEM, SHORTRUN) else 0)
    for one, other in zip(first["rows"], alone["rows"], strict=True):
        assert one == pytest.approx(other, rel=1e-5)
        assert ("grad_scale" in one) == (name != "a classifier")


def test_a_run_of_two_ranks_is_written_once(seen, folder):
    out = folder / "whole"
    assert [one["runs"]["results"] for one in seen] == [8, 8]
    assert steps_of(out, "metrics.jsonl") == list(range(8))
    assert steps_of(out, "accuracy.jsonl") == steps_of(out, "evaluations.jsonl") == [0, 3, 6, 8]
    assert all(row["buffer_samples"] == 12 for row in read_jsonl(out / "evaluations.jsonl"))
    assert len(list(out.glob("events.out.tfevents.*"))) == 1
    assert len(list((out / "trainer").glob("events.out.tfevents.*"))) == 3
    names = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
    assert names == [f"step-{step:08d}.rank{rank}of2.pt" for step in (4, 8) for rank in (0, 1)]


def test_ctrl_c_on_one_rank_stops_both_after_the_same_step_and_they_resume(seen, folder):
    for rank, one in enumerate(seen):
        assert one["runs"]["stopped"] is None
        assert one["runs"]["stopped at"] == f"step-00000005.rank{rank}of2.pt"
        assert_same_run(folder / "whole", folder / "cut", f".rank{rank}of2")


def test_ranks_go_back_together_and_go_on_with_the_same_network(seen, folder):
    for one in seen:
        (rollback,) = one["runs"]["rollbacks"]
        assert (rollback["step"], rollback["restored_step"]) == (5, 0)
        assert rollback["rule"] == "nonfinite"
    assert steps_of(folder / "back", "metrics.jsonl") == [*range(6), *range(8)]
    for run in ("whole", "back"):
        first, second = (saved(folder / run, f".rank{rank}of2") for rank in (0, 1))
        for part in ("network", "optimizer", "draws"):
            assert same(first[part], second[part]), part
        assert same(first["course"]["accuracy"], second["course"]["accuracy"])
        assert all(torch.isfinite(value).all() for value in first["network"].values())
        # Their chains are apart, after the reseeding too.
        assert [len(one["buffer"]["samples"]) for one in (first, second)] == [15, 16]
        assert not same(first["buffer"]["generator"], second["buffer"]["generator"])


# -- ranks that are killed while torchrun watches them, and start again by themselves ---------

KILLS = 3
EVERY = 10


def start(out: Path) -> subprocess.Popen[bytes]:
    """Two ranks, by torchrun."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    restarts = ["--max-restarts", str(KILLS), "-m"]
    config = SHORTRUN.config_for(out, iterations=120, sample_every=50, checkpoint_every=EVERY)
    with out.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *launcher, *restarts, *shlex.split(config.command())],
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


def steps_saved(out: Path) -> int:
    """The step of the newest checkpoint; 0 before the first."""
    return max((int(file.name[5:13]) for file in out.glob("checkpoints/step-*.pt")), default=0)


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
                wanted = steps_saved(broken) + EVERY * rng.randint(1, 4)
                while steps_saved(broken) < wanted:
                    assert launcher.poll() is None
                    time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.1 if kill else 3))
            os.kill(ranks[rng.randrange(2)], signal.SIGKILL)
            while set(ranks) & set(ranks_of(launcher.pid)):
                time.sleep(0.01)
        assert launcher.wait() == 0
    finally:
        launcher.terminate()
        launcher.wait()
    for part in (".rank0of2", ".rank1of2"):
        assert_same_run(whole, broken, part)
