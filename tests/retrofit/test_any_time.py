"""Public methods called at any time, by handlers, threads and plug-ins; and Ctrl-C at any line."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import ebmguard
from ebmguard.alerts import DEFAULT_RULES, Level, Reading
from ebmguard.errors import ConfigError, EbmguardError
from ebmguard.recovery import Recovery
from ebmguard.sinks import read_jsonl
from tests.parts import Energy, Memory, unit_langevin
from tests.runs import Training

reading: Any = Reading
ROOT = f"{Path(ebmguard.__file__).parent}/"
CALLS: dict[str, Callable[[Any], Any]] = {
    "flush": lambda g: g.flush(),
    "log": lambda g: g.log({"mine": 1.0}),
    "state_dict": lambda g: g.state_dict(),
    "last": lambda g: (g.last, g.members, g.alerts, g.verdict, repr(g)),
    "close": lambda g: g.close(),
}


def traced(act: Callable[[], object], visit: Callable[[str, int, str], Any], files: Any) -> None:
    """Call ``act``, and in every line of these files ``visit`` with its file, number and event.

    If that returns a function, this is called there, as a signal's handler would be.
    """

    def each(frame: FrameType, event: str, _: Any) -> Any:
        handler = visit(frame.f_code.co_filename.removeprefix(ROOT), frame.f_lineno, event)
        if handler is not None:
            sys.settrace(None)
            handler()
            sys.settrace(called)
        return each

    def called(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        is_ours = file.startswith(ROOT) and file.removeprefix(ROOT) in files
        return each(frame, event, _) if is_ours else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        act()
    finally:
        sys.settrace(before)


def places_of(training: Training, kind: str, files: Any) -> list[tuple[str, int]]:
    """Every line of these files that a step begins, or calls."""
    seen = dict[tuple[str, int], None]()
    traced(training.go, lambda *at: seen.setdefault(at[:2]) if at[2] == kind else None, files)
    return [*seen]


def interrupted(training: Training, at: tuple[str, int], kind: str, act: Any) -> None:
    """A step, in which this is done where it first comes to a place."""
    once = iter([act])
    traced(training.go, lambda *now: next(once, None) if now == (*at, kind) else None, at[:1])


# -- handlers ------------------------------------------------------------------------------------

FILES = {f"retrofit/{name}.py" for name in ("loop", "rows")}
FILES |= {f"sinks/{name}.py" for name in ("jsonl", "call_queue", "writer")}
EVERY = {str(path.relative_to(ROOT)) for path in Path(ROOT).rglob("*.py")}


def written(folder: Path) -> list[int]:
    return [row["step"] for row in read_jsonl(folder / "metrics.jsonl")]


def begun(folder: Path, **options: Any) -> Training:
    return Training(log_dir=folder, **{"flush_every": 1, **options})


@pytest.mark.parametrize("first", [0, 2])
def test_a_signals_handler_may_call_them_at_any_line(first, tmp_path):
    """One of them at each line, in turns."""
    places = places_of(begun(tmp_path), "line", FILES)
    assert len(places) > 100
    turns = itertools.cycle([*CALLS.values()][first:] + [*CALLS.values()][:first])
    for i, (at, call) in enumerate(zip(places, turns, strict=False)):
        training = begun(tmp_path / str(i), thin_log=False)
        training.go(2)
        with suppress(ConfigError):  # which says that the guard is closed
            interrupted(training, at, "line", lambda g=training.g, call=call: call(g))
            training.go(2)
        training.g.close()
        steps = training.g.step
        assert written(tmp_path / str(i)) in ([*range(steps)], [*range(steps + 1)]), at


def test_a_handler_may_close_and_exit_at_any_call(tmp_path):
    """Where a function begins Python does run handlers, but not between any two lines."""

    def leave(g):
        g.close()
        raise SystemExit

    places = places_of(begun(tmp_path), "call", FILES)
    assert len(places) > 20
    for i, at in enumerate(places):
        training = begun(tmp_path / str(i))
        training.go(2)
        with suppress(SystemExit):
            interrupted(training, at, "call", lambda g=training.g: leave(g))
        del training  # as at the end of the process
        gc.collect()
        assert written(tmp_path / str(i)) in ([0, 1], [0, 1, 2]), at


# -- Ctrl-C --------------------------------------------------------------------------------------


def stop() -> None:
    raise KeyboardInterrupt


def trained(steps: int, **options: Any) -> Training:
    told = {"output_scale": 1, "buffer": torch.zeros(1, 2), **options}
    training = Training(unit_langevin, make=lambda ps: torch.optim.Adam(ps, lr=0.01), **told)
    training.go(steps)
    return training


def check(training: Training) -> None:
    """Nothing of a call is left, and the run goes on."""
    f, x = training.f, torch.randn(3, 2)
    assert torch.equal(f(x), Energy.forward(f, x))
    assert {*vars(f)} == {*vars(Energy())}
    assert torch.is_grad_enabled()
    assert not torch.overrides._get_current_function_mode_stack()
    assert len(f._forward_hooks) <= 1
    assert [group["lr"] for group in training.optimizer.param_groups] == [0.01]
    step = training.g.step
    training.go(2)
    assert training.g.step - step in (2, 3)  # an optimizer's step that was made may end late


def test_ctrl_c_before_each_line_of_a_step() -> None:
    """Each line once: of another kind of run those that the ones before it do not have."""
    tried = set[tuple[str, int]]()
    for options in ({}, {"beta_star": 0}, {"substeps": 4}):
        training = trained(6, **options)
        for at in places_of(training, "line", EVERY):
            if at not in tried:
                tried.add(at)
                with suppress(KeyboardInterrupt):
                    interrupted(training, at, "line", stop)
                check(training)
    assert len(tried) > 500


def lost() -> Training:
    """Its next step is a rollback."""
    recovery = Recovery(every=5, certify_after=5)
    training = trained(12, action="rollback", recovery=recovery)
    state = [x["exp_avg"] for x in training.optimizer.state.values()]
    for x in (*state, *training.f.parameters()):
        x.data.fill_(torch.nan)
    return training


def test_ctrl_c_before_lines_of_a_rollback() -> None:
    """What is put back is put back whole, by the step that follows where the first could not."""
    places = places_of(lost(), "line", {"recovery/snapshots.py"})
    assert len(places) > 20
    for at in places:
        training = lost()
        with suppress(KeyboardInterrupt):
            interrupted(training, at, "line", stop)
        training.go(2)
        assert training.g.rollbacks
        moments = [x["exp_avg"] for x in training.optimizer.state.values()]
        assert all(x.isfinite().all() for x in (*moments, *training.f.parameters()))


# -- threads, sinks and rules --------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_other_threads_may_call_them(name, tmp_path):
    sink, failed, is_over = Memory(), list[BaseException](), threading.Event()
    training = begun(tmp_path, flush_every=2, sinks=[sink])

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
        training.go(60)
    is_over.set()
    for thread in threads:
        thread.join()
    training.g.close()
    assert not failed
    assert sink.steps == written(tmp_path) == [*range(len(sink.steps))]
    assert training.g.step <= len(sink.steps) <= training.g.step + 1


class Failing(Memory):
    def write_row(self, *args):
        raise KeyError("accuracy")


def test_a_sinks_error_names_it_and_the_row_is_in_the_files(tmp_path):
    training = begun(tmp_path, sinks=[Failing(), other := Memory()])
    with pytest.raises(ConfigError, match="Failing raised KeyError: 'accuracy'"):
        training.go(3)
    training.g.close()
    assert written(tmp_path) == other.steps == [0]


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


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (None, "returned None"),
        (reading("LOUD", False), "raised ValueError: 'LOUD' is not a valid Level"),
        (reading(Level.WARN, False, "t", "high", 1.0), "raised ValueError"),
        (reading(Level.WARN, False, "t", 1.0, 1.0, 0, "lower it"), "returned Reading"),
        (KeyError("energy_gap"), "raised KeyError: 'energy_gap'"),
    ],
)
def test_a_rule_that_misspeaks_is_named_at_its_first_row(said, words, tmp_path):
    rule = Rule()
    training = begun(tmp_path, rules=[*DEFAULT_RULES, rule])
    rule.said = said
    with pytest.raises(EbmguardError, match=rf"Rule 'mine': read\(row\) should .* but {words}"):
        training.go()
