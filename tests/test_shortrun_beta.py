"""β* on short-run training: its cells are runs, and its table says what they did."""

from __future__ import annotations

from typing import Any

from benchmarks import shortrun_beta
from benchmarks.shortrun_beta import CELLS, JUDGES, measure, slots


def test_cells_are_plain_and_adaptive_runs():
    assert len(CELLS) == 2 * (7 + 2)
    assert CELLS["mnist-b20"] == {"data": "mnist", "beta_star": 20, "most_steps": 1}
    assert CELLS["mnist-b20-most4"] == {**CELLS["mnist-b20"], "most_steps": 4}


def test_a_run_is_trained_and_judged_and_its_line_says_so(tmp_path, monkeypatch):
    for name in ("ITERATIONS", "SAMPLES"):
        small = {"ITERATIONS": {"digits": 3}, "SAMPLES": 60}[name]
        monkeypatch.setattr(shortrun_beta, name, small)
    monkeypatch.setattr(shortrun_beta, "JUDGE", {"digits": ("--iterations=2", "--valid-images=9")})
    (judge,) = (name for name, own in JUDGES.items() if own == {"data": "digits"})
    measure(tmp_path / judge, "digits")
    settings: dict[str, Any] = {"data": "digits", "beta_star": 200.0, "most_steps": 4}
    run = {**settings, **measure(tmp_path / "run", **settings)}
    again = measure(tmp_path / "run", **settings)  # the run is there, and is judged again
    assert again["scores"]["held_out"] == run["scores"]["held_out"]
    text = slots([run])["digits"]
    head, _, line = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[:3]
    )
    found = dict(zip(head, line, strict=True))
    assert found["β*"] == "200 adaptive"
    assert found["FID"] == f"{run['scores']['samples']['fid']:.3g}"
    assert 100 <= float(found["K"]) <= 400
    assert run["scores"]["held_out"]["fid"] < run["scores"]["noise"]["fid"]
    assert text.splitlines()[-1].startswith("FID of held-out images ")
