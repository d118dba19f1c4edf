"""What can be passed as a sink, and what is said about everything else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from ebmguard.errors import ConfigError
from ebmguard.sinks import (
    AddScalarSink,
    JsonlSink,
    Sink,
    TensorBoardSink,
    as_sink,
    open_log_dir,
    read_jsonl,
)
from tests.sinks.parts import RECOVERY

ALERT: dict[str, Any] = {
    "rule": "sampler_failing",
    "level": "WARN",
    "step": 9,
    "tag": "grad_scale",
    "value": 0.01,
    "limit": 0.05,
    "window": 50,
    "remedies": ["more SGLD steps", "lower beta_star"],
    "message": "WARN sampler_failing at step 9",
}


class Collector:
    """The smallest sink."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def write_row(
        self,
        step: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, Sequence[float]],
    ) -> None:
        self.rows.append(step)

    def write_alert(self, record: Mapping[str, Any]) -> None:
        pass

    def write_recovery(self, record: Mapping[str, Any]) -> None:
        pass

    def flush(self) -> None:
        pass


class BareLogger:
    """The smallest logger."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.calls.append((tag, value, step))


class FullLogger(BareLogger):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[tuple[str, str, int]] = []
        self.histograms: list[tuple[str, list[float], int]] = []
        self.flushes = 0

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.texts.append((tag, text, step))

    def add_histogram(self, tag: str, values: torch.Tensor, step: int) -> None:
        self.histograms.append((tag, values.tolist(), step))

    def flush(self) -> None:
        self.flushes += 1


def test_four_methods_make_a_sink() -> None:
    sink = Collector()
    assert as_sink(sink) is sink
    assert isinstance(sink, Sink)


def test_the_built_in_sinks_are_sinks(tmp_path: Path) -> None:
    for sink in (JsonlSink(tmp_path), TensorBoardSink(tmp_path), AddScalarSink(BareLogger())):
        assert as_sink(sink) is sink


def test_a_logger_with_add_scalar_is_wrapped() -> None:
    logger = BareLogger()
    sink = as_sink(logger)
    sink.write_row(4, {"ess": 0.5, "loss": math.nan}, {"f_pos": [1.0]})
    sink.write_alert(ALERT)
    sink.flush()
    assert logger.calls[0] == ("guard/ess", 0.5, 4)
    assert math.isnan(logger.calls[1][1])
    assert logger.calls[2] == ("_alerts/WARN_sampler_failing", 1.0, 9)
    sink.write_recovery(RECOVERY)
    assert len(logger.calls) == 3


def test_what_else_a_logger_can_do_is_used() -> None:
    logger = FullLogger()
    sink = as_sink(logger)
    sink.write_row(4, {}, {"f_pos": [1.0, math.nan, 2.0, math.inf], "f_neg": [math.nan]})
    sink.write_alert(ALERT)
    sink.flush()
    assert logger.histograms == [("guard/f_pos", [1.0, 2.0], 4)]
    ((tag, text, step),) = logger.texts
    assert (tag, step) == ("guard/alerts", 9)
    assert "WARN sampler_failing" in text
    assert "more SGLD steps" in text
    assert logger.flushes == 1


def test_a_summary_writer_takes_rows_and_alerts(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        sink = as_sink(writer)
        sink.write_row(4, {"ess": 0.5}, {"f_pos": [1.0, 2.0]})
        sink.write_alert(ALERT)
        sink.flush()
    tags = EventAccumulator(str(tmp_path)).Reload().Tags()["tensors"]
    assert {"guard/ess", "guard/f_pos", "_alerts/WARN_sampler_failing"} <= set(tags)


def test_log_dir_means_json_lines_and_tensorboard(tmp_path: Path) -> None:
    sinks = open_log_dir(tmp_path / "run")
    for sink in sinks:
        sink.write_row(0, {"ess": 0.5}, {})
        sink.flush()
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl") == [{"step": 0, "ess": 0.5}]
    assert list((tmp_path / "run").glob("*tfevents*"))


def test_an_unwritable_log_dir_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        open_log_dir(tmp_path / "file")


class Half:
    def write_row(self, *args: Any) -> None:
        pass

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (object(), "of type object, which is no sink"),
        (None, "of type NoneType, which is no sink"),
        (Half(), "It lacks write_alert, write_recovery"),
        (Collector, r"the class Collector.*Pass Collector\(\.\.\.\)"),
        ("runs/a", r"the path 'runs/a'.*log_dir=path"),
        (Path("runs/a"), r"the path 'runs/a'.*log_dir=path"),
    ],
)
def test_everything_else_is_refused_with_the_fix(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_sink(wrong)
