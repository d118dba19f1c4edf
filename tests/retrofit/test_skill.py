"""``guard(skill=)``: a run that loses what it could do is to be looked at, in every place."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebmguard import Guard, guard
from ebmguard.errors import ConfigError
from ebmguard.report.folder import RecordedRun
from tests.parts import energies


def run(numbers: Iterable[float | None], *, log: str = "accuracy", **options: Any) -> Guard:
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
RUNS: dict[
    str, tuple[list[float | None], int | None]
] = {  # what is logged, and since when it is low
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


@pytest.mark.parametrize("by", [1, 100])
@pytest.mark.parametrize("name", RUNS)
def test_a_fifth_that_is_lost_is_said_in_the_verdict(name: str, by: float, tmp_path: Path) -> None:
    numbers, since = RUNS[name]
    g = run([x if x is None else by * x for x in numbers], log_dir=tmp_path)
    expected = "healthy" if since is None else f"look since step {since} (skill accuracy)"
    assert str(g.verdict) == expected
    g.close()
    assert str(RecordedRun.read(tmp_path).verdict) == expected
    assert str(run([*numbers], skill=None).verdict) == "healthy"


def test_it_goes_through_a_checkpoint_and_a_new_name_begins_anew() -> None:
    first = run(LEARNS)
    state = json.loads(json.dumps(first.state_dict()))
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


@pytest.mark.parametrize("name", ["", "a\nb", 3, ["accuracy"], "energy_gap", "guard/x", b"acc"])
def test_what_g_log_would_not_take_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"no name of a number|expected a text"):
        guard(None, None, skill=name)
