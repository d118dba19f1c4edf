"""What a run keeps: when it looks, who is lost, and means that hide nothing."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ebmguard.reference_training.engine.ranks import ONE_RANK
from ebmguard.reference_training.engine.record import Record
from ebmguard.reference_training.toy.train import Ensemble
from ebmguard.sinks import read_jsonl
from tests.reference_training.toy.parts import config_for, small_evaluations

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    small_evaluations(monkeypatch)


class Script:
    """Stands for an evaluator, and says what it is told."""

    grid = SimpleNamespace(axis=torch.linspace(-1, 1, 3), shape=(3,))

    def __init__(self, evaluations) -> None:
        self.evaluations = iter(evaluations)
        self.sampled_at: list[int] = []

    def log_density(self, network: Any) -> torch.Tensor:
        return torch.arange(12.0).reshape(4, 3)

    def samples(self, network: Any, step: int) -> torch.Tensor:
        self.sampled_at.append(step)
        return torch.full((4, 5, 1), float(step))

    def measure(self, log_density: torch.Tensor) -> list[dict[str, float]]:
        return [{"kl": value} for value in next(self.evaluations)]

    def measure_samples(self, samples: torch.Tensor) -> list[dict[str, float]]:
        return [{"kl_sgld": value} for value in samples[:, 0, 0].tolist()]


def run_of(tmp_path, iterations, evaluations=((),)) -> Ensemble:
    """Four members that are not trained, whose KL are those of the evaluations."""
    count = {"iterations": iterations, "evaluations": len(evaluations)}
    config, folder = config_for(tmp_path / "run", betas=("0", "0.5"), **count).open()
    ensemble = Ensemble(config, Record(config, folder, CPU, ONE_RANK))
    ensemble.evaluator = Script(evaluations)
    return ensemble


def looked_at(ensemble: Ensemble, updates: int) -> list[int]:
    ensemble.record.next_step = updates
    return [step for step in range(1, updates + 1) if ensemble.evaluate(step)]


@pytest.mark.parametrize(("n", "count"), [(1, 1), (7, 7), (13, 5), (60, 7)])
def test_evaluations_are_evenly_spread_and_the_last_is_at_the_end(tmp_path, n, count):
    due = looked_at(run_of(tmp_path, n, [[1.0] * 4] * count), n)
    assert due == [math.ceil(k * n / count) for k in range(1, count + 1)]


@pytest.mark.parametrize("gap", [1.1e4, -1.1e4, math.nan, math.inf, -math.inf])
def test_a_member_is_lost_at_its_first_wide_gap(tmp_path, gap):
    ensemble = run_of(tmp_path, 5)
    f_neg = torch.zeros(4, 2)
    for step, own in enumerate((1e4, -1e4, gap, 0.0, gap)):
        # Two positives that say so in their mean alone, and one lost negative of another member.
        f_pos = torch.tensor([[0.0, 0.0], [2 * own, 0.0], [1.0, -1.0], [0.0, 0.0]])
        f_neg[3, 1] = math.nan if step == 1 else 0.0
        ensemble.take_in(step, f_pos, f_neg)
    assert ensemble.diverged_at.tolist() == [-1, 2, -1, 1]


def test_means_are_over_the_last_five_and_keep_what_is_not_finite(tmp_path):
    evaluations = [[100.0, math.nan, 1.0, 1.0], [100.0, math.inf, 2.0, 2.0]]
    evaluations += [[float(k), float(k), float(k), math.inf] for k in range(4)]
    evaluations.append([4.0, 4.0, math.nan, math.inf])
    ensemble = run_of(tmp_path, 13, evaluations)
    looked_at(ensemble, 13)
    assert ensemble.evaluator.sampled_at == [6, 8, 10, 12, 13]
    ensemble.diverged_at = torch.tensor([-1, 7, -1, 5])
    results, folder = ensemble.results(), ensemble.record.folder
    # What the first two evaluations saw is past; what the last five saw stays.
    kl = [member["kl"] for member in results["members"]]
    assert kl == pytest.approx([2.0, 2.0, math.nan, math.inf], nan_ok=True)
    assert {member["kl_sgld"] for member in results["members"]} == {(6 + 8 + 10 + 12 + 13) / 5}
    assert [member["diverged_at"] for member in results["members"]] == [None, 7, None, 5]
    assert results["diverged_at"] == 5
    assert all(set(m).isdisjoint({"step", "member"}) for m in results["members"])
    who = [(m["beta"], m["variant"], m["seed"]) for m in results["members"]]
    assert who == [(b, "default", s) for b in ("0", "0.5") for s in (0, 1)]
    rows = read_jsonl(folder.path / "members.jsonl")
    assert [row["member"] for row in rows] == [0, 1, 2, 3] * 7
    with np.load(folder.figures / "grids.npz") as grids:
        np.testing.assert_array_equal(grids["axis"], [-1.0, 0.0, 1.0])
        np.testing.assert_array_equal(grids["negative_energy"], np.arange(12.0).reshape(4, 3))
        assert grids["negative_energy"].dtype == grids["samples"].dtype == np.float32
        assert (grids["samples"] == 13).all()


def test_a_lost_member_ranks_last_and_a_run_without_a_loss_says_so(tmp_path):
    ensemble = run_of(tmp_path, 1, [[3.0, math.nan, 1.0, 2.0]])
    assert math.isnan(ensemble.kl)
    looked_at(ensemble, 1)
    assert ensemble.kl == 3.0
    assert ensemble.results()["diverged_at"] is None
