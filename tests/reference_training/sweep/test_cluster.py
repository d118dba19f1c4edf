"""Sweeps of real runs: here, on two nodes of which one is killed, and by printed commands."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.parts import PATIENCE
from tests.reference_training.sweep.parts import environment, until

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.slow

CLUSTER = Path(__file__).with_name("cluster_process.py")
GRID = ("--scenarios", "digits", "--beta-stars", "0", "0.5", "2", "--seeds", "0", "1")
SMALL = (
    *("--", "--iterations", "16", "--depth", "10", "--width", "1", "--checkpoint-every", "1"),
    *("--eval-every", "16", "--sgld-steps", "2", "--n-pos", "8", "--n-neg", "8"),
    *("--n-labelled", "8", "--train-images", "100", "--valid-images", "50", "--test-images", "50"),
)
SIX = [f"digits_b{beta}_seed{seed}" for beta in ("0", "0.5", "2") for seed in (0, 1)]
# All of Ray on the loopback address, as a sweep's own is.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
OF_THE_TIME = ("wall_seconds", "command", "device")


@contextmanager
def two_nodes():
    """Address of a cluster, and what kills its second node."""
    process = subprocess.Popen(
        [sys.executable, str(CLUSTER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(**LOOPBACK, OMP_NUM_THREADS="1"),
    )

    given, said = process.stdin, process.stdout
    assert given is not None
    assert said is not None

    def kill():
        given.write("\n")
        given.flush()
        assert next(line for line in said if line == "killed\n")

    try:
        line = next(line for line in said if line.startswith("address "))
        yield line.split()[1], kill
    finally:
        process.communicate("\n\n", timeout=PATIENCE)
    assert process.returncode == 0


def start(*words):
    return subprocess.Popen(
        [sys.executable, "-m", "ebmguard", "sweep", "jem", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**LOOPBACK),
    )


def commands(grid, name):
    log = grid / f"{name}.log"
    lines = log.read_text().splitlines() if log.is_file() else []
    return [line for line in lines if line.startswith("$ ")]


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def assert_same_bits(one, other):
    steps = [int(file.stem[5:13]) for file in (one / "checkpoints").glob("step-*")]
    mine, its = (
        torch.load(run / "checkpoints" / f"step-{max(steps):08}.pt", weights_only=True)
        for run in (one, other)
    )
    assert mine["network"].keys() == its["network"].keys()
    for part in ("network", "buffer"):
        for name, value in mine[part].items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, its[part][name]), (part, name)
    assert rows(one / "metrics.jsonl") == rows(other / "metrics.jsonl")
    results = [json.loads((run / "results.json").read_text()) for run in (one, other)]
    for result in results:
        for name in OF_THE_TIME:
            result.pop(name, None)
    assert results[0] == results[1]


def test_a_sweep_is_single_runs_to_the_bit_even_where_a_node_is_killed(tmp_path):
    # The printed commands, two at a time, are single runs.
    single, local, cluster = (tmp_path / name for name in ("single", "local", "cluster"))
    printing = start("--out", str(single), *GRID, "--print", *SMALL)
    printed = printing.communicate(timeout=PATIENCE)[0]
    assert len(printed.splitlines()) == 6, printed
    run = f"{shlex.quote(sys.executable)} -m ebmguard"
    subprocess.run(
        ["xargs", "-d", "\n", "-n", "1", "-P", "2", "sh", "-c"],
        input="\n".join(line.replace("ebmguard", run, 1) for line in printed.splitlines()),
        text=True,
        check=True,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    sweep = start("--out", str(local), *GRID, *SMALL)
    said = sweep.communicate(timeout=PATIENCE)[0]
    assert sweep.returncode == 0, said
    print(said)

    with two_nodes() as (address, kill):
        sweep = start("--out", str(cluster), "--address", address, *GRID, *SMALL)

        def saved(name):
            return list((cluster / name / "checkpoints").glob("step-*.pt"))

        until(lambda: sweep.poll() is not None or sum(bool(saved(name)) for name in SIX) >= 2)
        kill()
        said = sweep.communicate(timeout=PATIENCE)[0]
        assert sweep.returncode == 0, said
        print(said)
    assert "one GPU each" in said
    assert said.count(": finished, ") == 6
    resumed = [name for name in SIX if len(commands(cluster, name)) > 1]
    assert len(resumed) == 1, said
    (again,) = commands(cluster, resumed[0])[1:]
    assert again.endswith(" --resume")

    for name in SIX:
        assert len(commands(local, name)) == 1
        assert_same_bits(single / name, local / name)
        assert_same_bits(single / name, cluster / name)
