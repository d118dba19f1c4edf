"""DDP on two ranks trains, and is watched, as one process with all samples."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import ranks_of
from tests.retrofit.ddp_training import CASES, STEPS, train

TAGS = {
    *("loss", "grad_scale", "ess", "energy_gap", "f_neg/std"),
    *("sampler/grad_norm", "sampler/evaluations"),
    *("optim/grad_norm", "optim/update_norm", "optim/amplification"),
}


@pytest.mark.parametrize("name", CASES)
def test_parameters_gradients_and_rows_are_those_of_one_process(tmp_path_factory, name):
    _, seen = ranks_of("tests.retrofit.ranks_actions", 2, tmp_path_factory)
    ranks = [rank["training"][name] for rank in seen]
    alone = train(CASES[name], 2)
    for found in ranks:
        assert len(found["gradients"]) == len(alone["gradients"]) == STEPS
        for step, right in enumerate(alone["gradients"]):
            for x, y in zip(found["gradients"][step], right, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-15)
        for x, y in zip(found["parameters"], alone["parameters"], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=0)
        for row, right in zip(found["rows"], alone["rows"], strict=True):
            assert row.keys() == right.keys()
            for tag in TAGS & row.keys():
                # Some are float32.
                assert row[tag] == pytest.approx(right[tag], rel=1e-6, nan_ok=True), tag
        assert repr(found["rows"]) == repr(ranks[0]["rows"])
    assert "optim/amplification" in alone["rows"][1]
