"""Snapshots on the disk: killed at any moment, damaged, gone on from; and whose a folder is."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ebmguard import Level, Recovery, guard
from ebmguard.errors import ConfigError
from ebmguard.recovery import Change
from tests import forks
from tests.full_disk import room_of
from tests.parts import Memory, gradient_at
from tests.recovery import kills_loop
from tests.recovery.parts import Loop, Run, Scripted, kept, run_until, scale_last_layer


def make(folder: Path | None) -> Run:
    recovery = Recovery(every=2, certify_after=2, folder=folder, folder_every=4)
    return Run(recovery, detector=Scripted([]))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("snapshot-*"))


@pytest.mark.parametrize("kills", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_an_ordinary_loop_that_is_killed_is_the_one_that_nobody_killed(
    kills: int, tmp_path: Path
) -> None:
    done = forks.run("-m", kills_loop.__name__, str(tmp_path), str(kills))
    assert done.returncode == 0, done.stderr
    killed, later, torn, steps, *wrong = done.stdout.split("\n")
    assert [killed, wrong] == [f"{kills}", [""]]
    assert int(later) > kills // 4
    assert int(torn) > 0  # some kills hit the writing itself
    assert int(steps) > 10


def test_a_process_that_dies_after_a_rollback_does_not_begin_it_again(tmp_path: Path) -> None:
    recovery = Recovery(
        ladder=(Change(beta_star=2.0),),
        every=4,
        certify_after=4,
        relapse_within=30,
        folder=tmp_path,
        folder_every=1,
    )
    run = Run(recovery, detector=Scripted([24, 27]))
    while len(run.guard.rollbacks) < 2:
        run.step()
    restored = run.guard.rollbacks[-1].restored_step
    assert run.guard.rollbacks[-1].condemned
    wanted = []
    for _ in range(3):
        wanted.append(run.state())
        run.step()
    run.guard.close()
    other = Run(recovery, detector=Scripted([]))
    assert other.guard.resume() == restored
    assert other.guard.attempt == 2
    for state in wanted:
        assert other.state() == state  # with the same new random numbers
        other.step()
    assert other.guard.last["beta_star"] == 2.0


def test_a_folder_with_another_runs_snapshots_is_refused(tmp_path: Path) -> None:
    early = make(folder := tmp_path / "early")
    while not files(folder):
        early.step()
    early.guard.close()
    with pytest.raises(ConfigError, match="the newest of step 0"):
        make(folder).step()
    tmp_path = tmp_path / "whole"
    run = make(tmp_path)
    run_until(run, 20)
    run.guard.close()
    before = files(tmp_path)
    for _ in range(2):
        other = make(tmp_path)
        with pytest.raises(ConfigError, match=r"holds snapshots of a run.*g\.resume\(\)"):
            other.step()
        other.guard.close()
    assert files(tmp_path) == before
    # A trainer with checkpoints of its own goes on; what came later than those is given up.
    other = make(tmp_path)
    other.guard.load_state_dict({**run.guard.state_dict(), "step": 8})
    for _ in range(6):
        other.step()
    assert all(int(path.stem.removeprefix("snapshot-")) <= 14 for path in files(tmp_path))


def test_without_snapshots_or_a_folder(tmp_path: Path) -> None:
    assert make(tmp_path / "empty").guard.resume() is None
    for other in (make(None), Run(None)):
        with pytest.raises(ConfigError, match=r"Recovery\(folder="):
            other.guard.resume()


def test_a_run_outlives_a_full_disk_and_writes_its_snapshots_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make(tmp_path)
    run_until(run, 12)
    with room_of(2000):
        run_until(run, 18)
    names = [path.name for path in files(tmp_path)]
    assert len(names) == 2  # those from before, and no rest of those that failed
    assert all(name.endswith(".pt") and int(name[9:17]) <= 12 for name in names)
    run_until(run, 10)
    run.guard.close()
    assert run.guard.step == 40
    assert (make(tmp_path).guard.resume() or 0) > 30
    said = "could not be written: File too large. Training goes on"
    assert caplog.text.count(said) == caplog.text.count("Snapshots are written again") == 1


# -- whose a folder is -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["relative", "link", "log_dir"])
def test_a_folder_has_one_run(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("run")
    other = {"relative": Path("run"), "link": tmp_path / "link"}.get(way, folder)
    first = kept(folder, **({"log_dir": folder} if way == "log_dir" else {}))
    first.step()
    second = kept(other)
    for act in (second.step, second.g.resume):
        with pytest.raises(ConfigError, match=r"folder=.*in use by another guard of this process"):
            act()
    assert second.g.step == 0
    first.steps(10)
    first.g.close()
    assert second.g.resume() == 4
    second.step()
    first.g.attach()
    with pytest.raises(ConfigError, match="in use by another guard"):
        first.step()


TRAINS = """
import sys, time
from pathlib import Path
from tests.recovery.parts import kept
loop = kept(Path(sys.argv[1]))
loop.steps(10)
print("trained", flush=True)
time.sleep(600)
"""


def test_another_process_has_the_folder_until_it_is_over(tmp_path: Path) -> None:
    said = tmp_path / "said"
    os.mkfifo(said)
    process = forks.start("-c", TRAINS, str(tmp_path / "run"), stdout=said, stderr=os.devnull)
    try:
        with said.open() as file:
            assert file.readline() == "trained\n"
        loop = kept(tmp_path / "run")
        for act in (loop.step, loop.g.resume):
            with pytest.raises(ConfigError, match=f"in use by process {process.pid}"):
                act()
    finally:
        process.kill()
        process.join()
    assert loop.g.resume() == 4


def test_rows_that_a_sink_refuses_before_a_snapshot_end_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Once(Memory):
        flushes = 0

        def flush(self) -> None:
            self.flushes += 1
            if self.flushes == 3:
                raise ValueError("refused")

    loop = kept(tmp_path, sinks=[Once()], flush_every=1000)
    loop.steps(40)
    said = [text for text in caplog.messages if text.startswith("No snapshot of step")]
    assert len(said) == 1
    assert "Once raised ValueError: refused" in said[0]
    loop.g.close()
    assert (kept(tmp_path).g.resume() or 0) > 20


# -- where nobody has asked for a rollback, and where it cannot be meant ---------------------------


class Broken:
    """A buffer that cannot be copied."""

    def state_dict(self) -> Any:
        raise RuntimeError("it is on another machine")

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def test_a_run_that_can_be_taken_back_is() -> None:
    plain, asked = Loop(), Loop(action="rollback")
    for each in (plain, asked):
        each.steps(60)
        each.step(1e9)
        each.steps(10)
        assert [x.step for x in each.g.rollbacks] == [60]
    assert all(map(torch.equal, plain.f.parameters(), asked.f.parameters()))


CANNOT: dict[str, tuple[dict[str, Any], str]] = {
    "no optimizer": ({"optimizer": None}, ""),
    "asked not to": ({"action": "warn"}, ""),
    "what cannot be copied": ({"buffer": Broken()}, "it is on another machine"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_taken_back_goes_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    told, said = CANNOT[name]
    plain = Loop(**told)
    plain.steps(20)
    assert ("no ERROR takes the run back" in caplog.text) == bool(said)
    assert said in caplog.text
    plain.step(1e9)
    plain.steps(10)
    assert plain.g.attempt == 0
    assert any(alert.level is Level.ERROR for alert in plain.g.alerts)


def test_parameters_of_no_optimizer_and_a_second_guard_end_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, one = Loop(), Loop()
    plain.f.register_parameter("more", nn.Parameter(torch.ones(1)))
    plain.steps(3)
    assert "no attached optimizer has these parameters of the model" in caplog.text
    other = guard(None, gradient_at, beta_star=0.5, model=one.f, optimizer=one.optimizer)
    one.steps(3)
    assert "another guard has the optimizer, too" in caplog.text
    del other


def test_a_spent_budget_ends_no_run_that_did_not_ask() -> None:
    plain = Loop()
    for _ in range(8):
        plain.steps(60)
        plain.step(1e9)
    scale_last_layer(plain.f, 1e12)
    plain.steps(120)
    assert plain.g.attempt == Recovery().budget


# -- what is refused ---------------------------------------------------------------------------


def test_what_is_missing_is_named_before_the_first_step() -> None:
    model = torch.nn.Linear(2, 1)
    g = guard(None, None, beta_star=0.5, action="rollback")
    f = model(torch.ones(3, 2)).squeeze(1)
    with pytest.raises(ConfigError, match=r"g\.attach\(model=\.\.\., optimizer=\.\.\.\)"):
        g.loss_fn(f, f.clone())
    assert g.step == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (partial(guard, None, recovery=Recovery(), action="warn"), "settings of action"),
        (
            partial(guard, None, None, action="rollback", beta_star=torch.ones(2)),
            "one member of an ensemble",
        ),
        (partial(Recovery, budget=-1), "Recovery"),
        (partial(Recovery, keep=True), "Recovery"),
        (partial(Recovery, ladder=()), "Recovery"),
        (partial(Recovery, certify_after=-1), "Recovery"),
        (partial(Change, lr=0.0), "Change"),
        (partial(Change, beta_star=0.0), "Change"),
        (partial(Change, substeps=0), "Change"),
    ],
)
def test_settings_that_cannot_be_meant(call: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


def test_a_sampler_without_that_parameter_cannot_be_given_its_steps() -> None:
    model = torch.nn.Linear(2, 1)
    g = guard(None, lambda f: torch.ones(3, 2), beta_star=0.5, action="rollback")
    g.attach(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="no parameter of that name"):
        g.attach(steps_argument="n_steps", sgld_steps=3).sampler(model)
