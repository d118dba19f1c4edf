"""Snapshots on the disk: killed at any moment, damaged, and gone on from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ebmguard import Recovery
from ebmguard.errors import ConfigError
from ebmguard.recovery import Change
from tests import forks
from tests.recovery import kills_loop
from tests.recovery.parts import Run, Scripted, run_until


def make(folder: Path | None) -> Run:
    recovery = Recovery(every=2, certify_after=2, folder=folder, folder_every=4)
    return Run(recovery, detector=Scripted([]))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("snapshot-*"))


@pytest.mark.parametrize("kills", [18, pytest.param(60, marks=pytest.mark.slow)])
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


def test_a_new_process_goes_on_as_the_old_one_did(tmp_path: Path) -> None:
    first = make(tmp_path)
    states = run_until(first, 20)
    first.guard.close()
    assert len(files(tmp_path)) == 2  # the newest
    for newer in files(tmp_path)[1:]:
        newer.unlink()
    run = make(tmp_path)
    step = run.guard.resume()
    assert step is not None
    assert 5 < step < 18
    assert run.state() == states[step - 1]
    for later in range(2):
        run.step()
        assert run.state() == states[step + later]


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


def test_reading_a_snapshot_executes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "snapshot-00000003.pt"
    torch.save({"step": 3, "state": Recovery}, file)
    with pytest.raises(ConfigError, match="no snapshot can be read"):
        make(tmp_path).guard.resume()


FULL = """
import resource, sys
from pathlib import Path
from tests.recovery.test_files import make

folder = Path(sys.argv[1])
run, hard = make(folder), resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for step in range(40):
    # Files of a process may be limited in size; writing beyond raises OSError, as a full disk does.
    if step in (12, 30):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000 if step == 12 else hard, hard))
    run.step()
    if step == 29:
        print(*sorted(path.name for path in folder.glob("snapshot-*")))
run.guard.close()
print("trained", run.guard.step, make(folder).guard.resume())
"""


def test_a_run_outlives_a_full_disk_and_writes_its_snapshots_when_there_is_room(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)],
        cwd=forks.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    left, trained = done.stdout.splitlines()
    names = left.split()
    assert len(names) == 2  # those from before, and no rest of those that failed
    assert all(name.endswith(".pt") and int(name[9:17]) <= 12 for name in names)
    _, steps, resumed = trained.split()
    assert steps == "40"
    assert int(resumed) > 30
    assert done.stderr.count("could not be written: File too large. Training goes on") == 1
    assert done.stderr.count("Snapshots are written again") == 1
