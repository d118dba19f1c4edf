"""What can be passed as a sink, and what is said about everything else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.sinks import Sink, as_sink
from tests.parts import Memory
from tests.sinks.parts import ALERT, RECOVERY


class BareLogger:
    """The smallest logger."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.calls.append((tag, value, step))


class FullLogger(BareLogger):
    def add_text(self, tag: str, text: str, step: int) -> None:
        self.calls.append((tag, text, step))

    def add_histogram(self, tag: str, values: torch.Tensor, step: int) -> None:
        self.calls.append((tag, values.tolist(), step))

    def flush(self) -> None:
        self.calls.append("flush")


def test_four_methods_make_a_sink() -> None:
    sink = Memory()
    assert as_sink(sink) is sink
    assert isinstance(sink, Sink)


@pytest.mark.parametrize("logger", [BareLogger(), FullLogger()])
def test_a_logger_with_add_scalar_is_wrapped_and_all_that_it_can_do_is_used(
    logger: BareLogger,
) -> None:
    sink = as_sink(logger)
    samples = {"f_pos": [1.0, math.nan, 2.0, math.inf], "f_neg": [math.nan]}
    sink.write_row(4, {"ess": 0.5, "loss": math.inf}, samples)
    sink.write_alert(ALERT | {"level": "WARN"})
    sink.write_recovery(RECOVERY)
    sink.flush()
    texts = [call for call in logger.calls if call[0] == "guard/alerts"]
    rest = [call for call in logger.calls if call not in texts]
    row = [("guard/ess", 0.5, 4), ("guard/loss", math.inf, 4)]
    marker = ("_alerts/WARN_energy_blowup", 1, 7)
    if not isinstance(logger, FullLogger):
        assert (rest, texts) == ([*row, marker], [])
        return
    assert rest == [*row, ("guard/f_pos", [1.0, 2.0], 4), marker, "flush"]
    ((_, text, step),) = texts
    assert step == 7
    assert "WARN energy_blowup" in text
    assert "raise beta_star" in text


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
        (Memory, r"the class Memory.*Pass Memory\(\.\.\.\)"),
        ("runs/a", r"the path 'runs/a'.*log_dir=path"),
        (Path("runs/a"), r"the path 'runs/a'.*log_dir=path"),
    ],
)
def test_everything_else_is_refused_with_the_fix(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_sink(wrong)
