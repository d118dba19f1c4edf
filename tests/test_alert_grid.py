"""The grid of dying and living runs: what becomes of a run is judged by its outcome alone."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks.alerts import grid
from benchmarks.alerts_fates import TUNE, read_fates
from benchmarks.alerts_reliance import area
from benchmarks.alerts_tables import facts


@pytest.fixture
def write(tmp_path):
    """Write a run as the recorder does; its gap jumps to `peak` at `jump`."""

    def run(name, *, steps=300, jump=None, peak=3e4, accuracy=0.97, final=0.97):
        draw = random.Random(name)
        rows = [
            {
                "step": t,
                "beta_star": 0.0,
                "energy_gap": draw.gauss(0, 0.1) if jump is None or t < jump else peak,
                "f_pos/std": 1.0,
                "ref/grad_scale": 0.98,
                "ref/reweighting_angle": 0.97,
                "sampler/grad_norm": 0.2,
            }
            for t in range(steps)
        ]
        lost = None if jump is None or peak <= 1e4 else jump
        tested = [[t, accuracy if lost is None or t <= lost else 0.1] for t in range(steps)]
        result = {"name": name, "beta_star": 0.0, "diverged_at": lost, "steps": steps}
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(
            json.dumps(result | {"accuracy": [*tested, [steps, final]]})
        )
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "metrics.jsonl").write_text(lines)
        (fate,) = read_fates([name, "not run"], tmp_path)
        return fate

    return run


def test_names_are_unique_and_both_halves_have_every_kind():
    cells = grid()
    assert len({cell.name for cell in cells}) == len(cells) == 77
    for beta_star in (0.0, 1.0, 2.0):
        assert {c.setting in TUNE for c in cells if c.beta_star == beta_star} == {True, False}


def test_a_run_is_judged_by_how_it_ends(write):
    assert write("b0_base_s1").kind == "healthy"
    assert write("b0_base_s2", final=0.94).kind == "in between"
    # 100 in the last steps is an ERROR, but no divergence.
    noisy = write("b0_base_s3", jump=150, peak=100.0)
    assert (noisy.kind, noisy.error is not None) == ("in between", True)
    lost = write("b0_w2_s1", jump=250)
    assert (lost.kind, lost.diverged_at, lost.is_tune) == ("diverged", 250, False)


def test_what_is_lost_is_counted_at_the_error(write):
    lost = write("b0_base_s1", jump=250)
    assert lost.error is not None
    assert (lost.error.step, lost.accuracy_at(250), lost.field_check) == (250, 0.97, None)
    counted = facts([lost, write("b0_base_s2")])
    assert counted["diverged"] == "1"
    assert counted["... lost under 5 points by then"] == "1 of 1 (100.0%)"
    assert counted["healthy"] == "1"
    assert counted["... ERRORs in all of them"] == "0"


def test_the_area_is_the_share_of_pairs_in_order():
    assert area([2.0, 3.0], [0.0, 1.0]) == 1.0
    assert area([0.0], [1.0]) == 0.0
    assert area([1.0, 2.0], [1.0, 2.0]) == 0.5
