"""What the benchmarks of a GPU share: how they measure, watch and write, tried on the CPU."""

from __future__ import annotations

import re
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from functools import partial

import pytest
import torch

from benchmarks import document
from benchmarks.document import FAILED, UNFINISHED, Part, put, run_parts
from benchmarks.timing import Clock, Turn, alternate, compilations, warmed_up
from benchmarks.watching import Window, synchronising_calls
from ebmguard.reference_training.precision import PrecisionName

CPU = torch.device("cpu")
HEADER = "# What a GPU does"
TITLES = {"step": "Time of a step", "memory": "Peak memory"}
SHARES = {"step": 3, "floor": 1, "sync": 1, "memory": 2}


# -- how it is measured ------------------------------------------------------------------------


def test_turns_alternate_there_and_back():
    calls: list[str] = []
    turns = {
        name: Turn(partial(calls.append, name), 2, partial(calls.append, "|")) for name in "ab"
    }
    found = alternate(turns, Clock(0), CPU)
    assert "".join(calls) == "|aa|bb|bb|aa|aa|bb"
    assert {name: len(values) for name, values in found.items()} == {"a": 3, "b": 3}


def test_compilations_are_counted():
    before = compilations()
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2))
    assert compilations() == before + 1


class Stumbling:
    """Fails in its second step."""

    precision: PrecisionName = "float32"

    def __init__(self):
        self.calls: list[str] = []

    def step(self):
        self.calls.append("step")
        if len(self.calls) == 2:
            raise RuntimeError("stumbled")

    def close(self):
        self.calls.append("close")


def test_what_fails_in_its_first_steps_is_closed():
    steps = Stumbling()
    with pytest.raises(RuntimeError, match="stumbled"):
        warmed_up(lambda: steps, CPU)
    assert steps.calls == ["step", "step", "close"]


# -- what is watched ---------------------------------------------------------------------------


def waits():
    warnings.warn("called a synchronizing CUDA operation", stacklevel=1)


def test_synchronising_calls_are_found_with_their_place():
    with synchronising_calls() as places:
        for _ in range(3):
            waits()
    ((place, times),) = places.items()
    assert times == 3
    assert "warnings.warn(" in place
    assert "test_gpu_benchmarks.py" in place


def test_the_place_is_the_projects_own_line():
    within: dict[str, Callable[..., None]] = {}
    exec(compile("def call(f):\n    f()\n", "/at/reference_training/some.py", "exec"), within)
    with synchronising_calls() as places:
        within["call"](waits)
    assert [place.endswith("at/reference_training/some.py:2)") for place in places] == [True]


def test_other_warnings_are_shown():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with synchronising_calls() as places:
            warnings.warn("something else", stacklevel=1)
    assert not places
    assert [str(warning.message) for warning in shown] == ["something else"]


def test_a_window_opens_and_closes_between_iterations():
    calls: list[tuple[int, str]] = []
    now = 0
    window = Window(2, 3, lambda: calls.append((now, "begin")), lambda: calls.append((now, "end")))
    for now in range(1, 9):
        window.step(now, {})
    assert calls == [(2, "begin"), (5, "end")]


# -- what is written ---------------------------------------------------------------------------


def test_a_section_is_filled_and_all_else_is_kept(tmp_path):
    file = tmp_path / "results" / "jem.md"
    parts = {name: Part(title, lambda _: []) for name, title in TITLES.items()}
    put(file, "memory", "old", parts, HEADER)
    text = file.read_text().replace(HEADER, HEADER + "\n\nA word before.")
    file.write_text(text + "\n## What it means\n\nBy hand.\n")
    put(file, "step", "first", parts, HEADER)
    put(file, "memory", "new", parts, HEADER)
    assert re.sub("<!-- .* -->\n\n", "", file.read_text()) == (
        "# What a GPU does\n\nA word before.\n\n## Time of a step\n\nfirst\n\n"
        "## Peak memory\n\nnew\n\n## What it means\n\nBy hand.\n"
    )


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run parts whose commands are fakes; the exit status, their minutes, and the file."""

    def run(shares, minutes, lines=()):
        asked: dict[str, float] = {}

        def commands(name, _):
            return [[name]]

        def printed(commands, minutes, **_):
            ((name,),) = commands
            asked[name] = minutes
            yield from (FAILED,) if name == "floor" else lines

        monkeypatch.setattr(document, "printed", printed)
        file = tmp_path / "gpu.md"
        given = Namespace(part="all", device="cpu", out=file)
        parts = {n: Part(n, partial(commands, n), share) for n, share in shares.items()}
        status = run_parts(parts, given, minutes, HEADER, "benchmarks.fake")
        return status, asked, file.read_text() if file.is_file() else ""

    return run


def test_all_parts_share_the_time(run, monkeypatch, capsys):
    # Time stands still, so that every part gets its first share of all of it.
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    status, asked, text = run(SHARES, 7, ["one\n", "two\n"])
    assert status == 1
    assert capsys.readouterr().out.endswith("\nfloor: failed\n")
    assert asked["step"] == pytest.approx(7 * 3 / 7)
    assert list(asked) == list(SHARES)
    assert (
        "`python -m benchmarks.fake --part sync`\n\none\ntwo\n\n<!-- /sync -->\n\n## memory" in text
    )


def test_a_part_that_is_cut_short_leaves_what_it_had(run):
    def lines():
        yield "known\n"
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        run({"step": 1}, 7, lines())
    assert f"known\n\n{UNFINISHED}\n" in run({}, 7)[2]


def test_what_finds_no_time_is_said(run, capsys):
    assert run(SHARES, 0) == (1, {}, "")
    assert capsys.readouterr().out == "".join(f"{part}: no time\n" for part in SHARES)
