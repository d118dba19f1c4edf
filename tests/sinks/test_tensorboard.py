"""Event files, read back by TensorBoard's own reader."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c as slow_crc32c
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.util.tensor_util import make_ndarray
from torch.utils.tensorboard import SummaryWriter

from ebmguard import Recovery
from ebmguard.errors import ConfigError
from ebmguard.sinks import TensorBoardSink, Writer
from ebmguard.sinks.events import crc32c
from tests.parts import Memory
from tests.recovery.parts import Run, Scripted
from tests.sinks.parts import ALERT, RECOVERY, load, scalars, texts


def event_file(folder: Path) -> Path:
    (path,) = folder.glob("*tfevents*")
    return path


@given(st.binary(max_size=9000))
def test_checksums_agree_with_tensorboard(record: bytes) -> None:
    assert crc32c(record) == slow_crc32c(record)


def test_a_row_is_one_event(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write_row(5, {f"tag{i}": float(i) for i in range(60)}, {"f_pos": [1.0, 2.0]})
    sink.flush()
    events = [
        Event.FromString(data) for data in RawEventFileLoader(str(event_file(tmp_path))).Load()
    ]
    assert [len(event.summary.value) for event in events if event.step == 5] == [61]


@pytest.mark.parametrize("beta_star", [0.0, 0.5])
def test_the_first_page_has_alerts_gap_and_the_grad_scale_that_says_something(
    tmp_path: Path, beta_star: float
) -> None:
    row = {"energy_gap": 3.0, "grad_scale": 0.9, "ref/grad_scale": 0.2, "beta_star": beta_star}
    sink = TensorBoardSink(tmp_path)
    sink.write_row(5, row, {})
    sink.write_alert(ALERT)
    sink.write_alert(ALERT | {"level": "INFO"})
    sink.flush()
    first = {tag for tag in load(tmp_path).Tags()["tensors"] if tag.startswith("_alerts/")}
    scale = "grad_scale" if beta_star else "ref/grad_scale"
    assert first == {"_alerts/ERROR_energy_blowup", "_alerts/energy_gap", f"_alerts/{scale}"}
    ((step, value),) = scalars(tmp_path, f"_alerts/{scale}")
    assert step == 5
    assert value == pytest.approx(row[scale])
    assert len(texts(load(tmp_path), "guard/alerts")) == 2


def test_histograms_agree_with_numpy(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=200)
    sink = TensorBoardSink(tmp_path)
    sink.write_row(3, {}, {"f_pos": values.tolist(), "f_neg": (values - 5).tolist()})
    sink.flush()
    accumulator = load(tmp_path)
    for tag, expected in (("guard/f_pos", values), ("guard/f_neg", values - 5)):
        (event,) = accumulator.Tensors(tag)
        left, right, count = make_ndarray(event.tensor_proto).T
        counts, edges = np.histogram(expected, bins=30)
        assert event.step == 3
        np.testing.assert_array_equal(count, counts)
        np.testing.assert_allclose(left, edges[:-1], atol=1e-12)
        np.testing.assert_allclose(right, edges[1:], atol=1e-12)


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([1.0, math.nan, 2.0, math.inf, -math.inf], 2),
        ([3.0, 3.0, 3.0], 3),
        ([1e37, -1e37], 2),
        ([1e308, -1e308, 1.0], 1),
        # Neighbouring numbers: no thirty bins lie between them.
        ([1.0, math.nextafter(1.0, 2.0)], 2),
        ([0.0, 5e-324], 2),
    ],
)
def test_histograms_of_extreme_values(tmp_path: Path, values: list[float], drawn: int) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write_row(0, {}, {"f_pos": values})
    sink.flush()
    events = RawEventFileLoader(str(event_file(tmp_path))).Load()
    (histogram,) = (
        value.histo
        for data in events
        for value in Event.FromString(data).summary.value
        if value.tag == "guard/f_pos"
    )
    assert histogram.num == drawn
    assert sum(histogram.bucket) == drawn
    assert list(histogram.bucket_limit) == sorted(histogram.bucket_limit)
    assert load(tmp_path).Tensors("guard/f_pos")


def test_the_layout_names_what_belongs_together(tmp_path: Path) -> None:
    # Present as soon as the sink is there: before the first flush.
    TensorBoardSink(tmp_path)
    accumulator = load(tmp_path)
    (event,) = accumulator.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    charts = {chart.title: chart for category in layout.category for chart in category.chart}
    groups = [set(chart.multiline.tag) for chart in charts.values()]
    assert {"guard/f_pos/median$", "guard/f_neg/median$"} in groups
    assert {"guard/grad_scale$", "guard/ref/grad_scale$"} in groups
    assert {"guard/sampler/grad_norm$", "guard/sampler/grad_norm_max$"} in groups
    bands = [chart.margin.series[0] for chart in charts.values() if chart.margin.series]
    assert [(band.lower, band.value, band.upper) for band in bands] == [
        (f"guard/{f}/q05", f"guard/{f}/median", f"guard/{f}/q95") for f in ("f_pos", "f_neg")
    ]
    # The page matches from the start only, so "guard/loss" would also take "guard/loss_weight".
    patterns = [re.compile(tag) for chart in charts.values() for tag in chart.multiline.tag]
    assert not any(p.match("guard/energy_gap_scaled") for p in patterns)
    assert any(p.match("_alerts/ERROR_energy_blowup") for p in patterns)


def test_without_the_package_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ebmguard.sinks.events")
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match=r'pip install "\.\[tensorboard\]"') as caught:
        Writer([], flush_every=1, folder=folder)
    assert "JsonlSink(dir)" in str(caught.value)
    assert not folder.exists()


REWOUND = [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6]


def rewound(folder: Path) -> TensorBoardSink:
    """Steps 0 to 5, a rollback to 2, and on to 6; the second time values are 10 higher."""
    sink = TensorBoardSink(folder)
    for i, step in enumerate(REWOUND):
        if i == 6:
            sink.write_alert(ALERT | {"step": 5, "message": "what was abandoned"})
            sink.write_recovery(RECOVERY | {"step": 5, "restored_step": 2})
        if i == 1:
            sink.write_alert(ALERT | {"step": 1, "message": "what stays"})
        sink.write_row(step, {"ess": step + 10.0 * (i >= 6)}, {"f_pos": [1.0, float(i)]})
    sink.flush()
    return sink


def test_after_a_rollback_only_what_counts_is_drawn(tmp_path: Path) -> None:
    rewound(tmp_path)
    assert scalars(tmp_path, "guard/ess") == [
        (0, 0.0), (1, 1.0), (2, 12.0), (3, 13.0), (4, 14.0), (5, 15.0), (6, 16.0)
    ]  # fmt: skip
    accumulator = load(tmp_path)
    assert [event.step for event in accumulator.Tensors("guard/f_pos")] == list(range(7))
    assert [event.step for event in accumulator.Tensors("_alerts/ERROR_energy_blowup")] == [1]
    assert [event.step for event in accumulator.Tensors("guard/alerts")] == [1]
    (text,) = texts(accumulator, "guard/recovery")
    assert "what was abandoned" in text
    assert "what stays" not in text


def test_what_others_wrote_into_the_folder_is_never_voided(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(6):
            writer.add_scalar("theirs", 1.0, step)
    rewound(tmp_path)
    assert [step for step, _ in scalars(tmp_path, "theirs")] == list(range(6))
    assert [step for step, _ in scalars(tmp_path, "guard/ess")] == REWOUND


@pytest.mark.parametrize("judge_in_loss", [True, False])
def test_rollbacks_of_a_real_run(tmp_path: Path, judge_in_loss: bool) -> None:
    quick = Recovery(every=4, certify_after=4, relapse_within=6)
    memory = Memory()
    run = Run(
        quick,
        detector=Scripted([18, 44]),
        judge_in_loss=judge_in_loss,
        sinks=[memory, TensorBoardSink(tmp_path)],
    )
    for _ in range(60):
        run.step()
    run.guard.close()
    assert len(run.guard.rollbacks) == 2
    assert len(memory.steps) > len(set(memory.steps))
    later = {step: row["energy_gap"] for step, row in memory.rows}  # of equal steps the last
    drawn = scalars(tmp_path, "guard/energy_gap")
    assert [step for step, _ in drawn] == list(range(run.guard.step))
    expected = np.array([later[step] for step, _ in drawn], dtype=np.float32)
    np.testing.assert_array_equal([value for _, value in drawn], expected)
    events = load(tmp_path)
    told = [event.step for event in events.Tensors("guard/recovery")]
    assert told == [rollback.step for rollback in run.guard.rollbacks]
    text = texts(events, "guard/recovery")[-1]
    for rollback in run.guard.rollbacks:
        assert rollback.message in text
        assert f"- ERROR energy_blowup at step {rollback.alert.step}" in text
