"""`ebmguard evaluate toy`: annealing beside quadrature, on runs trained for moments."""

from __future__ import annotations

import json

import pytest

from ebmguard.reference_training.judge import toy
from ebmguard.reference_training.judge.toy import EvaluateToy, run, table
from tests.reference_training.toy.parts import config_for, go, small_evaluations


@pytest.mark.parametrize("scenario", ["gmm-default", "mixture1d-default"])
def test_annealing_agrees_with_the_quadrature(tmp_path, capsys, monkeypatch, scenario):
    small_evaluations(monkeypatch)
    monkeypatch.setattr(toy, "POOL", 20_000)
    out = tmp_path / "run"
    go(config_for(out, scenario=scenario, betas=("0", "0.5"), seeds=1, evaluations=1))
    monkeypatch.undo()
    assert run(EvaluateToy(run=out, device="cpu")) == 0
    without = json.loads((out / "evaluation.json").read_text())["members"]
    assert "log_z" not in without[0]
    assert "KL by" not in capsys.readouterr().out
    config = EvaluateToy(run=out, device="cpu", likelihood=True, temperatures=40)
    assert run(config) == 0
    printed = capsys.readouterr().out
    stored = json.loads((out / "evaluation.json").read_text())
    assert [member["beta"] for member in stored["members"]] == ["0", "0.5"]
    for member, plain in zip(stored["members"], without, strict=True):
        assert {k: member[k] for k in plain} == plain
        low, high = member["log_z"]
        assert member["holds"], member["verdict"]
        # The ends are two standard errors away; one of many networks may need four.
        assert low - (high - low) < member["quadrature_log_z"] < high + (high - low)
        low, high = member["annealed_kl"]
        assert low - (high - low) < member["kl"] < high + (high - low)
        assert f"{low:.3f} to {high:.3f}" in printed
    assert table(stored) in printed
