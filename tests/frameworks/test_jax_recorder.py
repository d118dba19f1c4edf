"""What JAX's recorder makes of its rows, and the trainer of the page."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ebmguard
from ebmguard import Level
from ebmguard.adapters.jax import Recorder, contrastive_loss, diagnostics
from ebmguard.errors import NonFiniteError, ShapeError
from ebmguard.report import RecordedRun
from ebmguard.sinks import read_jsonl

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.usefixtures("double_precision")


@jax.jit
def _row(f_pos: Any, f_neg: Any) -> dict[str, Any]:
    return {**diagnostics(f_pos, f_neg, 0.5), "loss": contrastive_loss(f_pos, f_neg, 0.5)}


def row_of(gap: float, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = _row(rng.normal(gap, 1, 32), rng.normal(0, 1, 32))
    return found


def test_rows_and_alerts_are_those_of_a_torch_run_with_these_energies(tmp_path, caplog):
    """The same energies through the guard and through the recorder: the same files."""
    g = ebmguard.guard(None, None, beta_star=0.5, log_dir=tmp_path / "torch", on_alert=None)
    recorder = Recorder(log_dir=tmp_path / "jax")
    for step in range(60):
        rng = np.random.default_rng(step)
        sides = rng.normal(100.0 * (step > 54), 1, 32), rng.normal(0, 1, 32)
        if step == 58:
            sides[1][3] = np.nan
        g.loss(torch.tensor(sides[0]), torch.tensor(sides[1]))
        recorder.record(step, _row(*sides))
    g.close()
    recorder.close()
    assert {alert.rule for alert in recorder.alerts} >= {"energy_blowup", "nonfinite"}
    assert [(a.rule, a.step, a.level) for a in recorder.alerts] == [
        (a.rule, a.step, a.level) for a in g.alerts
    ]
    theirs, mine = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("torch", "jax"))
    assert len(mine) == len(theirs) == 60
    for one, other in zip(mine, theirs, strict=True):
        # What pools the energies of several steps, and what needs a sampler, is torch's alone.
        assert other.keys() - one.keys() <= {"pareto_k", "ref/pareto_k"}
        assert not one.keys() - other.keys()
        for name, value in one.items():
            np.testing.assert_allclose(value, other[name], rtol=1e-6, atol=1e-6, err_msg=name)
    ours, original = (read_jsonl(tmp_path / run / "alerts.jsonl") for run in ("jax", "torch"))
    # What JAX trains cannot be rolled back, and its alerts do not say so.
    said = [x["message"].replace('; action="rollback" next time', "") for x in original]
    assert [x["message"] for x in ours] == said
    run = RecordedRun.read(tmp_path / "jax", ["energy_gap", "ess"])  # as `ebmguard watch` does
    assert (run.row_count, run.step) == (60, 59)
    assert run.level("energy_gap") is Level.ERROR
    assert scalars_of(tmp_path / "jax").keys() == scalars_of(tmp_path / "torch").keys()


def scalars_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard's own reader finds in a folder's events."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if not tag.endswith("pareto_k")
    }


def test_an_error_ends_the_run_where_that_is_asked_for(caplog):
    seen: list[str] = []
    recorder = Recorder(action="raise", on_alert=lambda alert: seen.append(alert.rule))
    recorder.record(0, row_of(0.0, 0))
    lost = {**row_of(0.0, 1), "nonfinite/neg": jnp.float32(2.0)}
    with pytest.raises(NonFiniteError, match="step 1"):
        recorder.record(1, lost)
    assert seen == ["nonfinite"]
    recorder.record(2, row_of(0.0, 2))  # said once


def test_a_device_of_its_own_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    recorder = Recorder(log_dir=tmp_path, flush_every=1)

    def written() -> int:
        file = tmp_path / "metrics.jsonl"
        return len(read_jsonl(file))

    counts = []
    for step in range(4):
        recorder.record(step, row_of(0.0, step))
        counts.append(written())
    assert counts == [0, 0, 1, 2]
    recorder.close()
    assert written() == 4


def test_rows_of_several_models_are_refused_before_anything_is_recorded(tmp_path):
    recorder = Recorder(log_dir=tmp_path)
    rows = jax.vmap(diagnostics)(jnp.ones((2, 3)), jnp.zeros((2, 3)), jnp.array([0.0, 0.5]))
    with pytest.raises(ShapeError, match=r"has shape \(2,\)"):
        recorder.record(0, rows)
    recorder.record(0, {name: value[1] for name, value in rows.items()})
    recorder.close()
    (row,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert row["beta_star"] == 0.5


def test_the_trainer_of_the_page_runs_and_learns(tmp_path, monkeypatch):
    jax.config.update("jax_enable_x64", False)  # as its reader has it
    (program,) = re.findall(
        r"```python\n(.*?)```",
        (DOCS / "frameworks.md").read_text().split("\n## JAX\n")[1],
        flags=re.DOTALL,
    )
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    exec(compile(program, "frameworks.md", "exec"), namespace)
    rows = read_jsonl(tmp_path / "runs" / "rings" / "metrics.jsonl")
    assert len(rows) == namespace["STEPS"]
    assert all(alert.level < Level.ERROR for alert in namespace["recorder"].alerts)
    # High on both rings, and low inside, between and outside of them.
    f, params = namespace["f"], namespace["params"]
    angle = jnp.linspace(0, 2 * math.pi, 64)
    circle = jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1)
    radii = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
    centre, inside, first, between, second, outside = (f(params, r * circle).mean() for r in radii)
    assert min(first, second) > max(centre, inside, between, outside) + 1
