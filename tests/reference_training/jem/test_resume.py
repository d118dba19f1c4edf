"""Real processes of `ebmguard train jem` that are killed, and end with the same bits."""

from __future__ import annotations

import json
import random
import shutil
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.scenarios import SCENARIOS
from ebmguard.sinks import read_jsonl
from tests import forks
from tests.reference_training.jem.parts import (
    assert_same_run,
    config_for,
    go,
    kill_at_a_checkpoint,
    newest,
    saved,
    steps_of,
)

KILLS = {"1": 3, "2": 3, "3": 3, "4": 3, "5": 3, "6": 3, "7": 2}
"""Random moments at which runs of each scenario are killed: 20."""


def start(config: JemConfig, log: Path) -> BaseProcess:
    words = [*config.command().split()[1:], *(["--resume"] if config.resume else [])]
    return forks.start("-m", "ebmguard", *words, stdout=log)


def killed_after(config: JemConfig, seconds: float, log: Path) -> bool:
    """Start a run and kill it that much later; whether it was still running."""
    process = start(config, log)
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        return True
    assert process.exitcode == 0, log.read_text()
    return False


def finished(config: JemConfig, log: Path) -> float:
    """Run to the end; the seconds that it took."""
    began = time.monotonic()
    assert forks.statuses(start(config, log)) == [0], log.read_text()
    return time.monotonic() - began


SMALL_RUNS: dict[str, dict[str, Any]] = {
    "digits": {
        "valid_images": 20,
        "quality_samples": 12,
        "n_labelled": 5,
        "energy_l2": 0.1,
        "clip_norm": 0.5,
        "activation": "silu",
    },
    "cifar10": {
        "scenario": "2",
        "train_images": 100,
        "valid_images": 10,
        "test_images": 20,
        "n_labelled": 4,
        "quality_samples": 8,
        "warmup": 4,
        "depth": 10,
        "width": 1,
    },
}


@pytest.mark.parametrize("data", ["digits", pytest.param("cifar10", marks=pytest.mark.slow)])
def test_a_run_killed_at_a_random_moment_resumes_to_the_same_bits(tmp_path, data, request):
    settings = {"data": data, **SMALL_RUNS[data]}
    if data != "digits":
        settings["data_root"] = str(request.getfixturevalue("data_root"))
    whole, cut, log = tmp_path / "whole", tmp_path / "cut", tmp_path / "log"
    # The length of a run changes nothing before its end.
    config = config_for(cut, iterations=100_000, **settings)
    process = start(config, log)
    kill_at_a_checkpoint(process, cut, log, random.Random(data).uniform(0, 0.5))
    at = saved(cut)["record"]["next_step"]
    written = steps_of(cut, "metrics.jsonl")
    assert at % 4 == 0
    assert len(written) >= at
    results = go(JemConfig(out=cut, resume=True, iterations=at + 5))
    assert results is not None
    assert results["steps"] == at + 5
    go(config_for(whole, iterations=at + 5, **settings))
    assert_same_run(whole, cut)
    print(f"\n{data}: killed with {len(written)} rows, resumed from step {at}")


def scenario_run(out: Path, scenario: str, data_root: Path) -> JemConfig:
    """A scenario with its own SGLD, on a small network, in batches of an eighth."""
    return JemConfig(
        out=out,
        data="cifar10",
        data_root=str(data_root),
        scenario=scenario,
        device="cpu",
        depth=10,
        width=1,
        iterations=30,
        warmup=10,
        n_pos=8,
        n_neg=SCENARIOS[scenario].n_neg // 8,
        n_labelled=8,
        buffer_size=500,
        train_images=500,
        valid_images=100,
        test_images=100,
        eval_every=15,
        quality_samples=64,
        checkpoint_every=7,
    )


@pytest.mark.slow
@pytest.mark.parametrize("scenario", KILLS)
def test_every_scenario_trains_survives_kills_and_is_in_the_table(tmp_path, data_root, scenario):
    log = tmp_path / "log"
    whole = scenario_run(tmp_path / "whole", scenario, data_root)
    seconds = finished(whole, log)
    print(f"\nscenario {scenario}: 30 steps in {seconds:.0f} s, without a stop")
    rng = random.Random(f"kills of {scenario}")
    for kill in range(KILLS[scenario]):
        cut = tmp_path / f"cut-{kill}"
        # One in each part of the run, as long as the others.
        at = (kill + rng.random()) / KILLS[scenario] * seconds
        while not killed_after(scenario_run(cut, scenario, data_root), at, log):
            shutil.rmtree(cut)  # it was over: this time it was faster
            at *= 0.7
        rows, checkpoint = 0, "none"
        if (cut / "config.json").is_file():
            metrics = cut / "metrics.jsonl"
            rows = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
            checkpoint = newest(cut).stem if any((cut / "checkpoints").glob("step-*")) else "none"
            resumed = JemConfig(out=cut, resume=True)
        else:  # killed before it had a folder
            resumed = scenario_run(cut, scenario, data_root)
        finished(resumed, log)
        assert_same_run(whole.out, cut)
        print(
            f"  killed after {at:.1f} s with {rows} rows, newest checkpoint {checkpoint}: resumed "
            "to the same bits"
        )
    # It is evaluated, and listed among the runs.
    results = json.loads((whole.out / "results.json").read_text())
    assert (results["scenario"], results["steps"]) == (scenario, 30)
    evaluations = read_jsonl(whole.out / "evaluations.jsonl")
    assert [row["step"] for row in evaluations] == [0, 15, 30]
    for row in evaluations:
        assert 0 <= row["test_accuracy"] <= 1
        assert 0 <= row["valid_accuracy"] <= 1
        assert row["buffer_samples"] == 64
        assert row["buffer_is"] >= 1
    done = forks.run("-m", "ebmguard", "table", "jem", str(whole.out))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "`whole`" in line]
    assert len(lines) == 1
    cells = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert "cifar10" in cells
    assert scenario in cells
    assert "30 of 30" in cells
    print(f"  {lines[0]}")
