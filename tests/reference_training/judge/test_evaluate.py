"""What every `ebmguard evaluate` does the same way, and what it refuses."""

from __future__ import annotations

import json

import pytest

from ebmguard.errors import ConfigError, DiskError
from ebmguard.reference_training.judge import jem, shortrun, toy
from ebmguard.reference_training.judge.evaluate import EvaluateConfig, run
from tests.reference_training.judge.parts import jem_folder
from tests.reference_training.shortrun.parts import trained_folder

COMMANDS = {
    "jem": (jem.run, jem.EvaluateJem, {}),
    "shortrun": (shortrun.run, shortrun.EvaluateShortRun, {"likelihood": True}),
    "toy": (toy.run, toy.EvaluateToy, {}),
}


def found(config, device):
    return {"device": device.type, "score": float("nan")}


def say(results):
    return f"score {results['score']}"


@pytest.mark.parametrize("name", COMMANDS)
def test_what_cannot_be_evaluated_is_refused(tmp_path, name):
    evaluate, settings, least = COMMANDS[name]

    def refused(path, says, **more):
        with pytest.raises(ConfigError, match=says):
            evaluate(settings(run=path, **{"device": "cpu", **least, **more}))
        assert not (path / "evaluation.json").exists()

    refused(tmp_path, "temperatures is 0, expected 1 or more", temperatures=0)
    refused(tmp_path, "ais_chains is 1, expected 2 or more", ais_chains=1)
    refused(tmp_path, "device is 'abacus', which cannot be used here", device="abacus")
    refused(tmp_path / "no", "no holds no run")
    jem_folder(tmp_path / "jem")
    trained_folder(tmp_path / "shortrun", iterations=1)
    for other in {"jem", "shortrun"} - {name}:
        refused(tmp_path / other, f"{other} is not a run.* of `ebmguard train {name}`")
    if name != "toy":
        for file in (tmp_path / name / "checkpoints").iterdir():
            file.unlink()
        refused(tmp_path / name, "has no checkpoint")


def test_results_are_printed_and_stored(tmp_path, capsys):
    assert run(found, say, EvaluateConfig(run=tmp_path, device="cpu")) == 0
    file = tmp_path / "evaluation.json"
    assert json.loads(file.read_text()) == {"device": "cpu", "score": "NaN"}
    assert capsys.readouterr().out == f"score nan\n\nwritten to {file}\n"


@pytest.mark.parametrize("why", ["a folder is in its place", "the folder is gone"])
def test_results_that_cannot_be_stored_are_printed(tmp_path, capsys, why):
    path = tmp_path / "run"
    if why == "a folder is in its place":
        (path / "evaluation.json").mkdir(parents=True)
    with pytest.raises(DiskError, match=r"run/evaluation\.json could not be written"):
        run(found, say, EvaluateConfig(run=path, device="cpu"))
    assert capsys.readouterr().out == "score nan\n"
