"""Public methods called at any time: by a signal's handler at any line, by threads, by plug-ins."""

from __future__ import annotations

import gc
import sys
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from ebmguard import guard
from ebmguard.alerts import DEFAULT_RULES, FloorRule, Level, Reading
from ebmguard.errors import ConfigError, EbmguardError
from ebmguard.retrofit import loop, rows
from ebmguard.sinks import call_queue, jsonl, read_jsonl, writer
from tests.parts import Memory

reading: Any = Reading

FILES = {module.__file__ for module in (loop, rows, jsonl, call_queue, writer)}
CALLS = {
    "flush": lambda g: g.flush(),
    "log": lambda g: g.log({"mine": 1.0}),
    "state_dict": lambda g: g.state_dict(),
    "last": lambda g: (g.last, g.members, g.alerts, g.verdict, repr(g)),
    "close": lambda g: g.close(),
}


class Training:
    """A linear energy, its guard and optimizer; rows go to a folder."""

    def __init__(self, folder, **options):
        torch.manual_seed(0)
        self.model, self.folder = nn.Linear(2, 1), folder
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        own = {"beta_star": 0.5, "flush_every": 1, "log_dir": folder} | options
        self.g = guard(None, None, model=self.model, optimizer=self.optimizer, **own)

    def steps(self, count):
        for _ in range(count):
            pos, neg = self.model(torch.randn(8, 2) + 1), self.model(torch.randn(8, 2))
            loss = self.g.loss_fn(pos, neg)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    @property
    def written(self):
        return [row["step"] for row in read_jsonl(self.folder / "metrics.jsonl")]


def interrupted(training, act, at, kind="line"):
    """Take a step, call ``act`` at its ``at``-th line in the files, as a handler; count lines."""
    seen = 0

    def line(frame, event, _):
        nonlocal seen
        if event == kind:
            seen += 1
            if seen == at:
                sys.settrace(None)
                act(training.g)
                sys.settrace(call)
        return line

    def call(frame, *_):
        return line(frame, "call", _) if frame.f_code.co_filename in FILES else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        training.steps(1)
    finally:
        sys.settrace(before)
    return seen


@pytest.mark.parametrize("name", CALLS)
def test_a_signals_handler_may_call_them_at_any_line(name, tmp_path):
    lines = interrupted(Training(tmp_path / "0"), CALLS[name], -1)
    assert lines > 100
    for at in range(1, lines + 1, 3):
        training = Training(tmp_path / str(at), thin_log=False)
        training.steps(2)
        with suppress(ConfigError):  # which says that the guard is closed
            interrupted(training, CALLS[name], at)
            training.steps(2)
        training.g.close()
        assert training.written in ([*range(training.g.step)], [*range(training.g.step + 1)]), at


def test_a_handler_may_close_and_exit_at_any_call(tmp_path):
    """Where a function begins Python does run handlers, but not between any two lines."""

    def leave(g):
        g.close()
        raise SystemExit

    calls = interrupted(Training(tmp_path / "0"), CALLS["last"], -1, "call")
    assert calls > 40
    for at in range(1, calls + 1):
        training = Training(tmp_path / str(at))
        training.steps(2)
        with suppress(SystemExit):
            interrupted(training, leave, at, "call")
        del training.g  # as at the end of the process
        gc.collect()
        assert training.written in ([0, 1], [0, 1, 2]), at


@pytest.mark.parametrize("name", CALLS)
def test_other_threads_may_call_them(name, tmp_path):
    sink, failed, is_over = Memory(), list[BaseException](), threading.Event()
    training = Training(tmp_path, flush_every=2, sinks=[sink])

    def work():
        while not is_over.wait(1e-4):
            try:
                CALLS[name](training.g)
            except ConfigError:  # which says that the guard is closed
                return
            except RuntimeError as error:
                failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    with suppress(ConfigError):
        training.steps(60)
    is_over.set()
    for thread in threads:
        thread.join()
    training.g.close()
    assert not failed
    found = [step for step, _ in sink.rows]
    assert found == training.written == [*range(len(found))]
    assert training.g.step <= len(found) <= training.g.step + 1


class Calling(Memory):
    """A sink that calls a method of its guard at everything that it is given."""

    def __init__(self, call):
        super().__init__()
        self.call, self.g = call, None

    def write_row(self, *args):
        super().write_row(*args)
        self.call(self.g)

    def flush(self):
        self.call(self.g)


@pytest.mark.parametrize("name", CALLS)
def test_sinks_may_call_them(name, tmp_path):
    sink = Calling(CALLS[name])
    training = Training(tmp_path, sinks=[sink])
    sink.g = training.g
    with suppress(ConfigError):
        training.steps(5)
    training.g.close()
    found = [step for step, _ in sink.rows]
    assert found == training.written == [*range(len(found))]
    assert len(found) == {"close": 1, "log": 6}.get(name, 5)


class Rule:
    """A rule that says at each row what it was given, or raises it, once it is asked to."""

    name, said = "mine", reading(None, True)

    def watcher(self):
        return self

    def read(self, row):
        if isinstance(self.said, Exception):
            raise self.said
        return self.said

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_a_sinks_error_names_it_and_the_row_is_in_the_files(tmp_path):
    def fail(_):
        raise KeyError("accuracy")

    training = Training(tmp_path, sinks=[Calling(fail), other := Memory()])
    with pytest.raises(ConfigError, match="Calling raised KeyError: 'accuracy'"):
        training.steps(3)
    training.g.close()
    assert training.written == [0]
    assert [step for step, _ in other.rows] == [0]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (None, "returned None"),
        (2, "returned 2"),
        (reading("LOUD", False), "raised ValueError: 'LOUD' is not a valid Level"),
        (reading(Level.WARN, False, "t", "high", 1.0), "raised ValueError"),
        (reading(Level.WARN, False, 3, 1.0, 1.0), "returned Reading"),
        (reading(Level.WARN, False, "t", 1.0, 1.0, 0, "lower it"), "returned Reading"),
        (reading(Level.WARN, False, "t", torch.zeros(2), 1.0), "raised ValueError"),
        (KeyError("energy_gap"), "raised KeyError: 'energy_gap'"),
    ],
)
def test_a_rule_that_misspeaks_is_named_at_its_first_row(said, words, tmp_path):
    rule = Rule()
    training = Training(tmp_path, rules=[*DEFAULT_RULES, rule])
    rule.said = said
    with pytest.raises(EbmguardError, match=rf"Rule 'mine': read\(row\) should .* but {words}"):
        training.steps(1)


def test_numbers_of_numpy_and_torch_are_taken(tmp_path):
    import numpy as np

    rule = Rule()
    training = Training(tmp_path, rules=[FloorRule(), rule])
    of_numpy = (np.float32(1.5), np.float64(1), np.int64(3))
    rule.said = reading(np.int64(1), np.False_, "energy_gap", *of_numpy, ["lower it"])
    training.steps(1)
    rule.said = reading(Level.ERROR, False, "t", torch.tensor(2.5), torch.tensor(1), 0)
    training.steps(1)
    training.g.state_dict()
    training.g.close()
    warned, failed = read_jsonl(tmp_path / "alerts.jsonl")
    assert (warned["level"], warned["value"], warned["window"]) == ("WARN", 1.5, 3)
    assert (failed["level"], failed["value"], failed["limit"]) == ("ERROR", 2.5, 1.0)
