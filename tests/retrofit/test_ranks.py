"""Two ranks train, and are watched, as one process with the joined batch."""

from __future__ import annotations

import math
from itertools import chain

import pytest
import torch

from tests.ranks import ranks_of
from tests.retrofit.ranks_training import CASES, STEPS, WORLD, train

WEIGHTS = (
    *("grad_scale", "weight_entropy", "ess", "max_weight"),
    *("positive_weight_entropy", "reweighting_angle"),
)
JOINED = {
    *(f"{prefix}{name}" for name in WEIGHTS for prefix in ("", "ref/")),
    *(f"{side}/{name}" for side in ("f_pos", "f_neg") for name in ("mean", "std", "min", "max")),
    *("energy_gap", "energy_gap_scaled", "output_scale", "beta_star", "loss"),
    *("nonfinite/pos", "nonfinite/neg", "nonfinite/energies", "nonfinite/samples"),
    *("nonfinite/gradients", "sampler/grad_norm", "sampler/grad_norm_max", "alert_level"),
    *("sampler/evaluations", "sampler/drift_to_noise", "sampler/clamped", "sampler/acceptance"),
    *("sampler/unit", "sampler/substeps", "sampler/repeated", "unpaired", "ref/unpaired"),
    *("optim/grad_norm", "optim/update_norm", "optim/amplification"),
}
AVERAGED = {
    *(f"{side}/{name}" for side in ("f_pos", "f_neg") for name in ("q05", "median", "q95")),
    *("energy_overlap", "pareto_k", "ref/pareto_k", "sampler/sharpness"),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank saw, from one start of both."""
    return ranks_of("tests.retrofit.ranks_training", WORLD, tmp_path_factory)[1]


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_rows_are_those_of_one_process(ranks, name):
    alone, first = train(CASES[name]), ranks[0][name]
    for rank in ranks:
        for found, right in zip(rank[name]["parameters"], alone["parameters"], strict=True):
            # The loss does not depend on the last layer's bias, so that Adam amplifies roundings.
            rtol = 1e-11 if right.numel() > 1 else 1e-7
            torch.testing.assert_close(found, right, rtol=rtol, atol=1e-14)
    assert len(first["rows"]) == STEPS
    rows = [*first["rows"], *chain(*first["members"])]
    expected = [*alone["rows"], *chain(*alone["members"])]
    for row, right in zip(rows, expected, strict=True):
        assert set(row) == set(right) <= JOINED | AVERAGED
        for tag in JOINED & set(right):
            # What is known of samples is float32.
            rel = 1e-6 if tag.startswith("sampler/") or tag == "nonfinite/samples" else 1e-8
            assert row[tag] == pytest.approx(right[tag], rel=rel, abs=1e-9, nan_ok=True), tag


@pytest.mark.parametrize("name", CASES)
def test_the_sharpness_is_the_mean_of_the_ranks_weighted_by_their_chains(ranks, name):
    alone = train(CASES[name])
    for found, own in ((ranks[0][name], [x[name] for x in ranks]), (alone, [alone])):
        by_step = zip(*(x["sharpness"] for x in own), strict=True)
        for row, told in zip(found["rows"], by_step, strict=True):
            right = sum(x * n for x, n in told) / sum(n for _, n in told)
            assert row["sampler/sharpness"] == pytest.approx(right, rel=1e-6, nan_ok=True)
    assert any(abs(x) > 1e-4 for x, _ in alone["sharpness"])


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_see_the_same_row(ranks, name):
    first, second = (rank[name] for rank in ranks)
    for found, other in zip(first["rows"], second["rows"], strict=True):
        assert repr(found) == repr(other)  # where NaN is NaN
    assert repr(first["members"]) == repr(second["members"])
    assert repr(first["alerts"]) == repr(second["alerts"])


def test_what_one_rank_loses_alerts_all(ranks):
    case = CASES["NaN on one rank"]
    assert case.spoiled is not None
    for rank in ranks:
        seen = rank["NaN on one rank"]
        (alert,) = seen["alerts"]
        assert (alert["rule"], alert["step"]) == ("nonfinite", case.spoiled)
        row = seen["rows"][case.spoiled]
        assert row["nonfinite/neg"] == 1
        assert row["nonfinite/energies"] == 1 / sum(map(sum, case.sizes))
        assert all(math.isnan(row[name]) for name in ("ess", "grad_scale", "f_neg/mean"))
        assert not math.isnan(row["f_pos/mean"])


def test_classes_leave_positives_out_on_all_ranks(ranks):
    """Otherwise the tests above would compare nothing but zeros."""
    unpaired = [row["unpaired"] for row in ranks[0]["default, classes"]["rows"]]
    assert any(unpaired)
    assert all(count < 10 for count in unpaired)
