"""A trainer's own numbers in the guard's row, and one of them as what the run is able to do.

And what is on the disk when a run ends, however it ends; and what it says on the terminal.
"""

from __future__ import annotations

import json
import math
import random
import signal
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ebmguard import Guard, guard
from ebmguard.errors import ConfigError
from ebmguard.report.folder import RecordedRun
from ebmguard.retrofit.rows import Rows
from ebmguard.sinks import read_jsonl
from tests import forks
from tests.parts import Memory, energies
from tests.runs import Training


def train(steps: int, own: Any, **options: Any) -> Guard:
    """A guarded energy whose trainer logs ``own(step)`` before each optimizer step."""
    training = Training(**options)
    g = training.g
    training.go(steps, lambda: g.log(own(g.step)))
    return g


def test_own_numbers_stand_in_the_row_of_their_step(tmp_path):
    sink, total = Memory(), torch.zeros(())

    def own(step):
        total.add_(1)  # an accumulator that goes on counting
        return {"accuracy": 0.1 * step, "loss/sum": total, "steps": step, "bad": math.nan}

    g = train(3, own, sinks=[sink], log_dir=tmp_path / "run")
    g.close()
    assert sink.steps == [0, 1, 2]
    for step, row in sink.rows:
        found = row["accuracy"], row["loss/sum"], row["steps"], math.isnan(row["bad"])
        assert found == (0.1 * step, step + 1.0, float(step), True)
        assert "grad_scale" in row
    assert g.last["accuracy"] == 0.2
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["accuracy"] for line in lines] == [0.0, 0.1, 0.2]


def test_what_is_logged_after_a_step_is_the_next_ones_and_the_last_of_a_name_counts():
    sink = Memory()
    g = train(1, lambda _: {"x": 1.0}, sinks=[sink])
    g.log({"x": 2.0, "y": True})
    g.log({"x": torch.tensor([3.0])})
    with g.paused():
        g.log({"x": 4.0})
    g.close()
    assert [(step, row["x"]) for step, row in sink.rows] == [(0, 1.0), (1, 3.0)]
    assert sink.rows[-1][1] == {"x": 3.0, "y": 1.0}


def test_they_travel_with_the_state():
    sink = Memory()
    g = train(1, lambda _: {"x": 5.0}, judge_in_loss=False)
    again = Training(judge_in_loss=False, sinks=[sink]).g
    again.load_state_dict(json.loads(json.dumps(g.state_dict())))
    again.close()
    assert sink.column("x") == [5.0]


def test_what_a_device_has_is_not_read_before_its_row_is():
    rows = Rows(torch.Size(), in_loss=False)
    rows.log({"x": torch.ones((), device="meta"), "y": 2.0})  # reading it would raise
    with pytest.raises(NotImplementedError):
        list(rows.end_step())


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        *(({x: 1.0}, "the guard writes it itself") for x in ("ref/ess", "step", "sampler/mine")),
        ({"": 1.0}, "empty"),
        *(({x: 1.0}, "no text") for x in ("a\nb", "\ud800", 1)),
        ({"x": "0.93"}, "is a str"),
        ({"x": torch.zeros(3)}, "a mean"),
        ({"x": torch.zeros((), dtype=torch.complex64)}, "complex64"),
        ([("x", 1.0)], "by name"),
    ],
)
def test_what_is_no_number_of_the_trainers_is_refused_before_anything_is_kept(numbers, words):
    sink = Memory()
    g = guard(None, None, beta_star=0.5, sinks=[sink])
    with pytest.raises(ConfigError, match=words):
        g.log({"good": 1.0} | numbers if isinstance(numbers, dict) else numbers)
    g.close()
    assert not sink.rows


# -- skill -----------------------------------------------------------------------------------------


def run(numbers: Iterable[float | None], *, log: str = "accuracy", **options: Any) -> Guard:
    """A run that loses what it could do is to be looked at, in every place."""
    given: dict[str, Any] = {"beta_star": 0.5, "skill": "accuracy"} | options
    g = guard(None, None, **given)
    go_on(g, numbers, log)
    return g


def go_on(g: Guard, numbers: Iterable[float | None], log: str = "accuracy") -> None:
    for number in numbers:
        g.loss_fn(*energies())
        if number is not None:
            g.log({log: number})
    g.flush()


def binomial(p: float, batch: int, steps: int) -> Iterator[float]:
    chance = random.Random(0)
    return (sum(chance.random() < p for _ in range(batch)) / batch for _ in range(steps))


LEARNS = [0.1, 0.4, 0.7, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9]
# What is logged, and since when it is low.
RUNS: dict[str, tuple[list[float | None], int | None]] = {
    "learns": ([*LEARNS], None),
    "loses a third": ([*LEARNS, *[0.6] * 5], len(LEARNS) + 2),
    "loses a tenth": ([*LEARNS, *[0.8] * 20], None),
    "one bad value": ([*LEARNS, 0.1, 0.1, *[0.9] * 9], None),
    "seldom": ([x for each in [*LEARNS, *[0.6] * 5] for x in (None, each)], 2 * len(LEARNS) + 5),
    "recovers": ([*LEARNS, *[0.6] * 5, *[0.9] * 15], None),
    "noise of batches": ([0.1, 0.2, 0.3, *binomial(0.7, 64, 1500)], None),
    "not a number": ([*LEARNS, *[float("nan")] * 20], None),
    "never above 0": ([-1.0, -2.0, *[-9.0] * 20], None),
}


@pytest.mark.parametrize(("name", "by"), [*((x, 1) for x in RUNS), ("loses a third", 100)])
def test_a_fifth_that_is_lost_is_said_in_the_verdict(name: str, by: float, tmp_path: Path) -> None:
    numbers, since = RUNS[name]
    g = run([x if x is None else by * x for x in numbers], log_dir=tmp_path)
    expected = "healthy" if since is None else f"look since step {since} (skill accuracy)"
    assert str(g.verdict) == expected
    g.close()
    assert str(RecordedRun.read(tmp_path).verdict) == expected
    assert since is None or str(run([*numbers], skill=None).verdict) == "healthy"


def test_it_goes_through_a_checkpoint_and_a_new_name_begins_anew() -> None:
    state = json.loads(json.dumps(run(LEARNS).state_dict()))
    for skill, verdict in (("accuracy", "look"), ("f1", "healthy"), (None, "healthy")):
        second = guard(None, None, beta_star=0.5, skill=skill)
        second.load_state_dict(state)
        go_on(second, [0.6] * 5, skill or "accuracy")
        assert second.verdict.name == verdict


def test_a_name_that_was_never_logged_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for log, count in (("acc", 1), ("accuracy", 0)):
        caplog.clear()
        g = run(LEARNS, log=log)
        g.close()
        g.close()
        said = [x for x in caplog.messages if "given no such number" in x]
        assert len(said) == count
        assert all("skill='accuracy'" in x for x in said)


@pytest.mark.parametrize("name", ["", "a\nb", 3, "energy_gap", "guard/x"])
def test_what_g_log_would_not_take_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"no name of a number|expected a text"):
        guard(None, None, skill=name)


# -- what is on the disk when a run ends -----------------------------------------------------------

# Forks a trainer for each way to end.
TRAINERS = """
    import os, signal, sys
    import torch
    from ebmguard import guard
    from ebmguard.sinks import JsonlSink

    torch.set_num_threads(1)
    f = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(0))

    def sampler(f, x):
        x = x.clone().requires_grad_()
        return x.detach() + torch.autograd.grad(f(x).sum(), x)[0]

    def train(ending):
        g = guard(
            None, sampler, beta_star=1.0, output_scale=9.0, flush_every=10,
            sinks=[JsonlSink(os.path.join(sys.argv[1], ending))], judge_in_loss="lag" not in ending,
        )
        loss_fn, sample_q = g
        optimizer = torch.optim.SGD(f.parameters(), lr=0.0)
        if "optimizer" in ending:
            g.attach(optimizer=optimizer)
        for step in range(25):
            x = sample_q(f, torch.randn(4, 2))
            loss_fn(f(torch.randn(4, 2)), f(x)).backward()
            optimizer.step()
        if "kill" in ending:
            os.kill(os.getpid(), signal.SIGKILL)
        elif "error" in ending:
            raise RuntimeError("the trainer's own")
        elif "exit" in ending:
            sys.exit(3)
        elif "close" in ending:
            g.close()
            os._exit(0)

    for ending in sys.argv[2:]:
        child = os.fork()
        if child == 0:
            train(ending)
            break
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
ALL, TWO_FLUSHES = list(range(25)), list(range(20))
# Way to end -> exit status, and the steps whose rows are on the disk. Without an optimizer the last
# step is still open; it is written under its own number nevertheless.
ENDINGS = {
    "kill, lag, optimizer": (-signal.SIGKILL, TWO_FLUSHES),
    "normal, lag, optimizer": (0, ALL),
    "error": (1, ALL),
    "exit, lag": (3, ALL),
    "close": (0, ALL),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ends")
    result = forks.run("-c", textwrap.dedent(TRAINERS), str(folder), *ENDINGS, OMP_NUM_THREADS="1")
    codes = [int(line) for line in result.stdout.split()]
    assert len(codes) == len(ENDINGS), result.stderr
    steps = [
        [row["step"] for row in read_jsonl(folder / ending / "metrics.jsonl")] for ending in ENDINGS
    ]
    return dict(zip(ENDINGS, zip(codes, steps, strict=True), strict=True))


@pytest.mark.parametrize("ending", list(ENDINGS))
def test_rows_on_the_disk(ended, ending):
    assert ended[ending] == ENDINGS[ending]


# -- what is said where a program has not set up logging, and where it has -------------------------

RUN = """
import torch
from ebmguard import guard

def langevin(f, x):
    return x + 0 * f(x).detach()

f = torch.nn.Linear(1, 1)
loss, sample = guard(None, langevin, model=f, beta_star=0.5, output_scale=2.0, log_dir={folder!r})
for step in range(3):
    x = sample(f, torch.zeros(4, 1))
    loss(f(x), f(x) / (step - 1))
"""
BEGINS = (
    "The loss and langevin are guarded. The loss weights the negatives "
    "(beta_star=0.5, substeps=auto, output_scale=2). To watch it: ebmguard watch runs/a"
)


def said(code: str, folder: object, path: Path) -> list[str]:
    """Lines on stderr."""
    done = forks.run("-c", code + RUN.format(folder=folder), cwd=path)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_every_line_begins_with_the_name(tmp_path):
    first, *alerts = said("", "runs/a", tmp_path)
    assert first == f"ebmguard: {BEGINS}"
    assert all(line.startswith("ebmguard: ") for line in alerts), alerts
    assert "nonfinite" in alerts[0]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        # A program with logging of its own keeps its format and level, and silence.
        ("logging.basicConfig(level='INFO', format='[%(name)s] %(message)s')", BEGINS),
        ("logging.basicConfig(level='WARNING', format='[%(name)s] %(message)s')", "nonfinite"),
        ("logging.getLogger('ebmguard').addHandler(logging.NullHandler())", None),
    ],
)
def test_a_program_that_has_set_up_logging_keeps_it(tmp_path, setting, expected):
    lines = said(f"import logging; {setting}", "runs/a", tmp_path)
    assert all(line.startswith("[ebmguard] ") for line in lines)
    assert expected in lines[0] if expected else not lines
