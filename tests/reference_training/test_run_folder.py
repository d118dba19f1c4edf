from __future__ import annotations

import json
import math

import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.reference_training.run_folder import RunFolder
from ebmguard.sinks import read_jsonl


def test_create_then_refuse_then_resume(tmp_path):
    out = tmp_path / "deep" / "run"
    RunFolder.create(out, {"lr": 0.1})
    with pytest.raises(ConfigError, match=r"already holds a run.*--resume"):
        RunFolder.create(out, {"lr": 0.2})
    assert RunFolder.resume(out).config == {"lr": 0.1}


def test_refuses_a_folder_with_other_files(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"thesis\.tex.*new or empty"):
        RunFolder.create(tmp_path, {})
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_refuses_what_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be a run folder"):
        RunFolder.create(tmp_path / "file", {})
    with pytest.raises(ConfigError, match="no run to resume"):
        RunFolder.resume(tmp_path)


def test_rows_and_results_survive_numbers_that_json_lacks(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {})
    folder.append_rows("training.jsonl", [{"step": 0, "a": math.nan}, {"step": 1, "a": -math.inf}])
    rows = read_jsonl(folder.path / "training.jsonl")
    assert math.isnan(rows[0]["a"])
    assert rows[1]["a"] == -math.inf
    folder.write_results({"gap": math.inf, "around": [(1, 0.5)], "first": {"value": math.nan}})
    results = json.loads((folder.path / "results.json").read_text())
    assert results == {"gap": "Infinity", "around": [[1, 0.5]], "first": {"value": "NaN"}}


def test_cuts_back_what_a_resumed_run_writes_again(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {})
    folder.append_rows("metrics.jsonl", [{"step": 0}, {"step": 1}])
    sizes = folder.row_sizes()
    assert set(sizes) == {"metrics.jsonl"}
    folder.append_rows("metrics.jsonl", [{"step": 2}])
    folder.append_rows("alerts.jsonl", [{"step": 2}])
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "to')  # killed while writing
    folder.cut_rows(sizes)
    assert read_jsonl(folder.path / "metrics.jsonl") == [{"step": 0}, {"step": 1}]
    assert read_jsonl(folder.path / "alerts.jsonl") == []
    folder.cut_rows({})
    assert read_jsonl(folder.path / "metrics.jsonl") == []


def test_checkpoint_round_trip(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {})
    cpu = torch.device("cpu")
    assert folder.load_checkpoint(cpu) is None
    for value in (1.0, 2.0):
        folder.save_checkpoint({"x": torch.full((2,), value), "steps": {3: 0.5}})
    state = folder.load_checkpoint(cpu)
    assert torch.equal(state["x"], torch.full((2,), 2.0))
    assert state["steps"] == {3: 0.5}
    assert [p.name for p in folder.checkpoint.parent.iterdir()] == ["last.pt"]
