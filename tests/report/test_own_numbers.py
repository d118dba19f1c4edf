"""What a trainer logs itself, in the readers of its run: the page, the watch, the frames."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ebmguard import guard
from ebmguard.report.folder import RecordedRun
from ebmguard.report.page import page
from ebmguard.report.watch import WatchConfig, watch
from ebmguard.runs import load
from tests.sinks.parts import scalars

from .folders import record
from .test_page import Parsed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    g = guard(None, None, beta_star=0.5, log_dir=path)
    for step in range(30):
        torch.manual_seed(step)
        g.loss(torch.randn(8), torch.randn(8))
        g.log({"loss/classification": torch.tensor(2.0 - step / 32), "lr": 1e-3})
        if step % 10 == 0:
            g.log({"accuracy": 0.25 + step / 64})
    g.close()
    return path


def test_every_number_has_a_chart_in_a_section_of_the_page(folder: Path) -> None:
    text = page([folder])
    section = text.partition("Numbers of the trainer</h2>")[2].partition("</section>")[0]
    assert re.findall("<b>(.*?)</b>", section) == ["accuracy", "lr", "loss/classification"]
    assert re.findall("<h3>(.*?)</h3>", section) == ["loss"]
    assert "accuracy" not in Parsed(text.replace(section, "")).words


def test_ten_thousand_names_fill_no_memory(tmp_path: Path) -> None:
    own = ((step, {f"x{i}": 1.0 for i in range(10_000)}) for step in range(2))
    assert len(RecordedRun.read(record(tmp_path / "run", own), ["energy_gap"]).trainer_tags) == 200


def test_a_frame_of_the_watch_shows_the_last_values(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    watch(WatchConfig(folder, once=True))
    shown = capsys.readouterr().out
    for name, value in {
        "accuracy": "0.5625",
        "loss/classification": "1.094",
        "lr": "0.001",
    }.items():
        assert re.search(rf"^ *{name} +{value} ", shown, re.M), shown


def test_the_frames_have_a_column_each_and_tensorboard_a_chart(folder: Path) -> None:
    frame = load(folder).rows.loc[str(folder)]
    assert frame["accuracy"].dropna().to_dict() == {0: 0.25, 10: 0.40625, 20: 0.5625}
    assert frame["loss/classification"].tolist() == [2.0 - step / 32 for step in range(30)]
    assert scalars(folder, "accuracy") == [(0, 0.25), (10, 0.40625), (20, 0.5625)]
    assert len(scalars(folder, "loss/classification")) == 30
