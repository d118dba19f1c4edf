from __future__ import annotations

import json
import math

import numpy as np
import pytest

from ebmguard.errors import ConfigError
from ebmguard.reference_training.toy.config import ToyConfig
from ebmguard.reference_training.toy.figures.runs import load_run
from tests.reference_training.toy.figures.fabricate import KL_AT_ZERO, write_run


@pytest.fixture
def config(tmp_path):
    return ToyConfig(
        out=tmp_path / "run",
        scenario="circles-shifted",
        betas=("0", "0.5"),
        variants=("default", "no_pos"),
        seeds=3,
    )


def test_reads_members_numbers_grids_and_alerts(config):
    write_run(config, diverged={"0": 1200}, resolution=20, samples=50)
    run = load_run(config.out)
    assert (run.scenario, run.data, run.seeds) == ("circles-shifted", "circles", 3)
    assert run.distribution.dim == 2
    assert run.negative_energy.shape == (12, 20, 20)
    assert run.samples.shape == (12, 50, 2)
    assert run.axis.tolist() == pytest.approx(np.linspace(-4.6, 4.6, 20).tolist())
    # Variant-major, then β, then seed.
    assert [m.index for m in run.of("0.5", "no_pos")] == [9, 10, 11]
    assert [m.seed for m in run.of("0.5", "no_pos")] == [0, 1, 2]
    kl = [m.metrics["kl"] for m in run.of("0.5", "default")]
    assert kl == pytest.approx([KL_AT_ZERO * math.exp(-3) * f for f in (1, 1.1, 1.2)])
    assert len(run.evaluations) == 24

    lost = run.of("0", "default")[1]
    assert lost.diverged_at == 1200
    assert math.isnan(lost.metrics["kl"])
    alert = run.first_alert(lost)
    assert alert is not None
    # Not the INFO before it, nor the first seed's.
    assert (alert["level"], alert["step"], alert["member"]) == ("ERROR", 1198, 1)
    assert run.first_alert(run.of("0.5", "default")[0]) is None


def test_a_metric_that_the_run_lacks_is_undefined(config):
    write_run(config)
    file = config.out / "results.json"
    results = json.loads(file.read_text())
    for member in results["members"]:
        del member["mode_mass_error"]
        member["tv"] = None
        member["energy_scale"] = "-Infinity"
    file.write_text(json.dumps(results))
    metrics = load_run(config.out).members[0].metrics
    assert math.isnan(metrics["mode_mass_error"])
    assert math.isnan(metrics["tv"])
    assert metrics["energy_scale"] == -math.inf


def test_asking_for_who_is_not_there_lists_who_is(config):
    write_run(config)
    with pytest.raises(ConfigError, match=r"no member with beta 0\.9 .*0 default, 0\.5 default"):
        load_run(config.out).of("0.9", "default")


@pytest.mark.parametrize("name", ["config.json", "results.json", "figures/grids.npz"])
def test_an_unfinished_run_is_refused(config, name):
    write_run(config)
    (config.out / name).unlink()
    with pytest.raises(ConfigError, match=rf"{name} missing. Finish it"):
        load_run(config.out)


def test_files_of_two_runs_are_refused(config):
    write_run(config)
    file = config.out / "results.json"
    results = json.loads(file.read_text())
    results["members"].pop()
    file.write_text(json.dumps(results))
    with pytest.raises(ConfigError, match=r"11 members in results\.json, 12 energies"):
        load_run(config.out)
