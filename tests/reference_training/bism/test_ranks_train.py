"""Two processes train one model: as one process does, and in one folder."""

from __future__ import annotations

import pytest

from ebmguard.cli import main
from ebmguard.errors import ConfigError
from ebmguard.reference_training.engine.ranks import ONE_RANK
from tests.ranks import rank_fixtures
from tests.reference_training.bism import ranks_train_process
from tests.reference_training.bism.parts import go
from tests.reference_training.bism.ranks_train_process import CASES, RUNS, WORLD, trained
from tests.reference_training.jem.parts import largest_difference, rows_of, same, saved, steps_of

started, folder, seen = rank_fixtures(ranks_train_process.__name__, WORLD)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process(seen, tmp_path, name):
    alone = trained(name, tmp_path / "alone", ONE_RANK)
    for rank in seen:
        assert largest_difference(rank[name]["network"], alone["network"]) < 1e-6
        assert rank[name]["results"] == pytest.approx(alone["results"], rel=1e-6)
    # Where the bits are equal nothing can drift apart.
    assert same(seen[0][name]["network"], seen[1][name]["network"])


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_two_ranks_is_written_once_and_read_by_all(seen, folder, name, tmp_path, capsys):
    out, steps = folder / name / "whole", seen[0][name]["steps"]
    assert [one[name]["steps"] for one in seen] == [steps, steps]
    assert steps_of(out, "metrics.jsonl") == list(range(steps))
    first, second = (saved(out, f".rank{rank}of2") for rank in (0, 1))
    assert same(first["draws"]["data"], second["draws"]["data"])
    assert not same(first["draws"]["chains"], second["draws"]["chains"])
    assert first["chains"].shape == second["chains"].shape
    assert (first["chains"] - second["chains"]).abs().mean() > 0.01
    assert main(["report", str(out), "--out", str(tmp_path / "report.html")]) == 0
    assert main(["watch", str(out), "--once"]) == 0
    assert "energy gap" in capsys.readouterr().out


@pytest.mark.parametrize("name", RUNS)
def test_ctrl_c_on_one_rank_stops_both_and_they_resume_to_the_same_bits(seen, folder, name):
    for rank, one in enumerate(seen):
        assert one[name]["stopped"] is None
        assert one[name]["stopped at"] == f"step-00000003.rank{rank}of2.pt"
        whole, cut = (saved(folder / name / run, f".rank{rank}of2") for run in ("whole", "cut"))
        for part in whole.keys() - {"record", "row_sizes", "clock"}:
            assert same(whole[part], cut[part]), part
    for file in ("metrics.jsonl", "evaluations.jsonl"):
        assert rows_of(folder / name / "whole", file) == rows_of(folder / name / "cut", file)


@pytest.mark.parametrize("name", RUNS)
def test_what_ranks_cannot_do_is_refused_on_all_of_them(seen, folder, name):
    for one in seen:
        assert "batch is 9, expected a multiple of the 2 processes" in one[name]["refused"]
    assert not (folder / name / "wrong").exists()
    make, options = RUNS[name]
    with pytest.raises(ConfigError, match="of 2 processes, this run has 1"):
        go(make, folder / name / "whole", resume=True, **options)
