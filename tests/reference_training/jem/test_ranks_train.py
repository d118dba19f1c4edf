"""Two processes train one network: as one process with the joined batch, and in one folder."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebmguard.reference_training.engine.ranks import ONE_RANK
from ebmguard.reference_training.jem import trainer as jem_trainer
from ebmguard.reference_training.jem.draws import Draws
from ebmguard.sinks import read_jsonl
from tests.ranks import rank_fixtures
from tests.reference_training.jem import ranks_train_process
from tests.reference_training.jem.parts import (
    assert_same_run,
    largest_difference,
    same,
    saved,
    steps_of,
)
from tests.reference_training.jem.ranks_train_process import CASES, STEPS, UNEVEN, WORLD, trained

started, folder, seen = rank_fixtures(ranks_train_process.__name__, WORLD)


def joined(parts: list[Any]) -> Any:
    """The ranks' rows."""
    return None if parts[0] is None else torch.cat(parts)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one_process_with_the_joined_batch(seen, tmp_path, monkeypatch, case):
    ranks = [one[case] for one in seen]
    settings = {**UNEVEN, "buffer_size": 40, **CASES[case]}
    sizes = [len(one["batches"][0][0]) for one in ranks]
    if "n_pos" not in CASES[case]:
        assert sizes == [3, 4]
        assert [len(one["batches"][0][2]) for one in ranks] == (
            [2, 3] if settings["n_labelled"] else sizes
        )

    def batch(self, step):
        x_pos, x_lab, labels = (
            joined([one["batches"][step][i] for one in ranks]) for i in range(3)
        )
        return x_pos, x_lab, labels

    steps = iter(range(STEPS))

    def sampler(settings, count, generator, pace, **_):
        def sample_q(network, buffer, labels=None):
            step = next(steps)
            network(buffer.samples[:1])  # the guard is right to ask for it
            return joined([one["samples"][step] for one in ranks])

        return sample_q

    monkeypatch.setattr(Draws, "batch", batch)
    monkeypatch.setattr(jem_trainer, "make_sampler", sampler)
    one_process = trained(ONE_RANK, tmp_path, CASES[case])
    parameters, last = one_process["network"], one_process["last"]
    for one in ranks:
        assert largest_difference(one["network"], parameters) < 1e-6
        for own, whole in zip(one["numbers"], one_process["numbers"], strict=True):
            assert own == pytest.approx(whole, rel=1e-6, abs=1e-12)
    # Where the bits are equal nothing can drift apart.
    assert same(ranks[0]["network"], ranks[1]["network"])
    assert largest_difference(parameters, one_process["start"]) > 1e-3
    # The guard's row is that of the joined batch, on the rank that writes it.
    for name in ("energy_gap", "grad_scale", "ess", "f_pos/mean", "f_neg/mean"):
        if name in last:
            assert ranks[0]["last"][name] == pytest.approx(last[name], rel=1e-5), name
    assert ("grad_scale" in last) == (case != "a classifier")


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


def test_ctrl_c_on_one_rank_stops_both_after_the_same_step(seen):
    for rank, one in enumerate(seen):
        assert one["runs"]["stopped"] is None
        assert one["runs"]["stopped at"] == f"step-00000005.rank{rank}of2.pt"


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


def test_ranks_resume_to_the_same_bits(seen, folder):
    for rank in range(WORLD):
        assert_same_run(folder / "whole", folder / "cut", f".rank{rank}of2")
