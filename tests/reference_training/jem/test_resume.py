"""Real processes of `ebmguard train jem` that are killed, and every scenario, small."""

from __future__ import annotations

import random
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.runs import load_run
from ebmguard.reference_training.jem.scenarios import SCENARIOS
from ebmguard.reference_training.studies.jem_tables import page
from ebmguard.sinks import read_jsonl
from tests import forks
from tests.reference_training.jem.parts import (
    assert_same_run,
    config_for,
    go,
    kill_at_a_checkpoint,
    saved,
    steps_of,
)


def start(config: JemConfig, log: Path) -> BaseProcess:
    words = [*config.command().split()[1:], *(["--resume"] if config.resume else [])]
    return forks.start("-m", "ebmguard", *words, stdout=log)


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
@pytest.mark.parametrize("scenario", "1234567")
def test_every_scenario_trains_and_is_in_the_table(tmp_path, data_root, scenario):
    out = tmp_path / "whole"
    results = go(scenario_run(out, scenario, data_root))
    assert results is not None
    assert (results["scenario"], results["steps"]) == (scenario, 30)
    evaluations = read_jsonl(out / "evaluations.jsonl")
    assert [row["step"] for row in evaluations] == [0, 15, 30]
    for row in evaluations:
        assert 0 <= row["test_accuracy"] <= 1
        assert 0 <= row["valid_accuracy"] <= 1
        assert row["buffer_samples"] == 64
        assert row["buffer_is"] >= 1
    (line,) = (line for line in page([load_run(out)]).splitlines() if "`whole`" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert {"cifar10", scenario, "30 of 30"} <= set(cells)
