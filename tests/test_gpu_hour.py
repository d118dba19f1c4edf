"""The first hour on a GPU, tried on the CPU: every part's command in its smallest form."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import gpu_hour
from benchmarks.document import UNFINISHED, Part

# What each part must have printed, in the time that it has here.
MARKS = {
    "tests": r"\d+ passed",
    "overhead": r"\| MLP",
    "waits": r"Found: none\.[\s\S]*Found: none\.",
    "jem": r"--measure floor[\s\S]*\| product[\s\S]*--measure step[\s\S]*\| variant",
    "shortrun": r"--measure kernels[\s\S]*`aten::[\s\S]*--measure step[\s\S]*\| variant",
    "toys": r"### A model update",
    "train": r"results|finished|4/4",
}


PARTS = gpu_hour.parts_of("cpu", Path(), small=True)


def section(text: str, name: str) -> str:
    title = re.escape(PARTS[name].title)
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert found is not None
    return found[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_a_part_runs_alone_and_writes_its_lines(name, tmp_path):
    out = tmp_path / "results" / "gpu.md"
    words = ["--part", name, "--device", "cpu", "--small", "--minutes", "3", "--out", str(out)]
    assert gpu_hour.main(words) == 0
    text = section(out.read_text(encoding="utf-8"), name)
    assert re.match(rf"\n<!-- {name} -->\n\nCommit \S+, cpu, torch ", text)
    assert re.search(MARKS[name], text)
    assert UNFINISHED not in text


def script(monkeypatch, *bodies: str) -> None:
    """The part `toys` runs these as programs."""
    commands = [["timeit", "-n1", "-r1", body] for body in bodies]
    own = {"toys": Part("The toys", lambda _: commands)}
    monkeypatch.setattr(gpu_hour, "parts_of", lambda *_, **__: own)


def run(tmp_path, minutes="1"):
    out = tmp_path / "gpu.md"
    words = ["--part", "toys", "--device", "cpu", "--minutes", minutes, "--out", str(out)]
    return gpu_hour.main(words), out.read_text(encoding="utf-8")


def test_lines_are_written_as_they_come(monkeypatch, tmp_path):
    out = tmp_path / "gpu.md"
    seen = f"print('seen:', 'first' in open({str(out)!r}).read())"
    wait = "import time; print('first'); time.sleep(1)"
    script(monkeypatch, f"{wait}; {seen}")
    status, text = run(tmp_path)
    assert status == 0
    assert "seen: True" in text


def test_a_failure_is_said_and_the_next_command_runs(monkeypatch, tmp_path):
    script(monkeypatch, "raise SystemExit(1)", "print('## the next')")
    status, text = run(tmp_path)
    assert status == 1
    assert "**Failed** with status 1." in text
    assert "### the next" in text


def test_what_takes_too_long_is_stopped(monkeypatch, tmp_path):
    script(monkeypatch, "import time; print('begun'); time.sleep(60)")
    status, text = run(tmp_path, "0.04")
    assert status == 0
    assert "begun" in text
    assert "Stopped after 0.04 minutes." in text


def test_a_device_that_is_not_there_is_said(tmp_path, capsys):
    assert gpu_hour.main(["--device", "nowhere", "--out", str(tmp_path / "gpu.md")]) == 2
    assert "--device cpu --small" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_training_goes_on_where_it_was(tmp_path):
    train = gpu_hour.parts_of("cpu", tmp_path / "gpu.md", small=True)["train"]
    (begin,) = train.commands(1.0)
    folder = tmp_path / "gpu-small"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (again,) = train.commands(1.0)
    assert "--resume" not in begin
    assert again == ["ebmguard", "train", "jem", "--out", str(folder), "--resume"]
