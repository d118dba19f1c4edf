"""Checkpoints survive damage to the newest one, and ranks that are killed while they write.

What the ranks of one run settle between them is in test_ranks.py, on real processes; kills while
files are written are in tests/recovery, whose files these are.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ebmguard.errors import ConfigError, DiskError
from ebmguard.recovery import save_durably
from ebmguard.reference_training.engine import checkpoints as checkpoints_module
from ebmguard.reference_training.engine.checkpoints import Checkpoints, load_all_ranks, restoring
from ebmguard.reference_training.engine.ranks import Ranks
from tests.full_disk import small_disk
from tests.parts import PATIENCE
from tests.reference_training.parts import CPU


def state_of(step):
    return {
        "x": torch.full((50,), float(step)),
        "lr": {"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "accuracy": {0: 0.1, step: 0.5},
        "diverged_at": None,
    }


@pytest.fixture
def checkpoints(tmp_path):
    """With those of two steps."""
    found = Checkpoints(tmp_path)
    for step in (3, 6):
        found.save(step, state_of(step))
    return found


def names(folder):
    return sorted(path.name for path in folder.iterdir())


RAW = random.Random(0).randbytes(3000)


def flipped(raw):
    """One bit of a tensor's data is another one."""
    place = raw.index(torch.full((50,), 6.0).numpy().tobytes()) + 9
    return raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :]


DAMAGE = {
    "all but its last byte": lambda raw: raw[:-1],
    "a page of zeros": lambda raw: raw[:512] + bytes(512) + raw[1024:],
    "noise after a pickle's first bytes": lambda raw: b"\x80\x02" + RAW,
    "one bit": flipped,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_newest_one_is_passed_over_with_a_warning(checkpoints, caplog, damage):
    file = checkpoints.file(6)
    raw = file.read_bytes()
    file.write_bytes(damage(raw))
    assert file.read_bytes() != raw
    state = checkpoints.load(CPU)
    assert torch.equal(state["x"], torch.full((50,), 3.0))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(file) in record.getMessage()
    assert "passed over" in record.getMessage()


def test_a_run_that_went_back_leaves_its_abandoned_future_behind(checkpoints):
    checkpoints.file(6).write_bytes(b"torn")
    assert checkpoints.load(CPU)["x"][0] == 3
    checkpoints.save(5, state_of(5))  # Ctrl-C, before step 6 came again
    assert names(checkpoints.folder) == ["step-00000003.pt", "step-00000005.pt"]
    assert checkpoints.load(CPU)["x"][0] == 5


def test_a_full_disk_is_a_typed_error_and_leaves_the_checkpoints_before_and_no_rest(tmp_path):
    with small_disk(tmp_path, 400) as folder:
        checkpoints = Checkpoints(folder)
        checkpoints.save(3, state_of(3))
        with pytest.raises(
            DiskError, match=r"step-00000006\.pt could not be written: the disk is full.*--resume"
        ):
            checkpoints.save(6, {"x": torch.zeros(1_000_000)})
        assert names(folder) == ["step-00000003.pt"]
        assert checkpoints.load(CPU)["x"][0] == 3
        checkpoints.save(6, state_of(6))
        assert checkpoints.load(CPU)["x"][0] == 6


def test_the_data_are_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    """Otherwise a loss of power leaves a complete name with an incomplete file."""
    events = []
    module = sys.modules[save_durably.__module__].os
    sync, rename = module.fsync, module.replace

    def seen_sync(descriptor):
        events.append("fsync")
        sync(descriptor)

    def seen_rename(old, new):
        assert zipfile.is_zipfile(old)
        events.append("rename")
        rename(old, new)

    monkeypatch.setattr(module, "fsync", seen_sync)
    monkeypatch.setattr(module, "replace", seen_rename)
    Checkpoints(tmp_path).save(1, state_of(1))
    assert events == ["fsync", "rename", "fsync"]


def test_parts_of_a_killed_run_do_not_mix_with_those_of_the_resumed_one(tmp_path, monkeypatch):
    met = threading.Barrier(2)

    class Met(Ranks):  # type: ignore[misc]  # mypy cannot follow the mapped package
        def wait(self):
            met.wait(PATIENCE)

    first, second = (Checkpoints(tmp_path, Met(rank, 2)) for rank in (0, 1))

    def save(step):
        with ThreadPoolExecutor(2) as threads:
            futures = [threads.submit(one.save, step, state_of(step)) for one in (first, second)]
        return [future.exception() for future in futures]

    assert save(4) == [None, None]
    written = checkpoints_module.save_durably

    def killed(rank):
        """Save, but for a rank that is killed when only the other has written."""
        other = threading.Event()

        def save_durably(file, state):
            if f"rank{rank}of2" in file.name:
                other.wait(PATIENCE)
                met.abort()
                raise InterruptedError
            written(file, state)
            other.set()

        return save_durably

    for rank, left in ((1, "rank0of2"), (0, "rank1of2")):
        with monkeypatch.context() as patched:
            patched.setattr(checkpoints_module, "save_durably", killed(rank))
            assert isinstance(save(8)[rank], InterruptedError)
        met.reset()
        assert [name for name in names(tmp_path) if "00008" in name] == [f"step-00000008.{left}.pt"]
        assert first.steps() == second.steps() == [4]
    assert save(8) == [None, None]
    assert first.steps() == second.steps() == [4, 8]


@pytest.mark.parametrize(("saved", "asked"), [(1, 2), (2, 1)])
def test_another_number_of_ranks_is_refused(tmp_path, saved, asked):
    for rank in range(saved):
        Checkpoints(tmp_path, Ranks(rank, saved)).save(4, state_of(4))
    before = names(tmp_path)
    with pytest.raises(ConfigError, match=f"of {saved} processes, this run has {asked}"):
        Checkpoints(tmp_path, Ranks(0, asked)).load(CPU)
    assert names(tmp_path) == before


@pytest.mark.parametrize("world", [1, 11])
def test_others_read_all_ranks_of_the_newest_whole_one(tmp_path, world):
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        load_all_ranks(tmp_path)
    ranks = [Checkpoints(tmp_path, Ranks(rank, world)) for rank in range(world)]
    for step in (4, 8):
        for one in ranks:
            one.save(step, state_of(step + 0.01 * one.ranks.rank))
    save_durably(tmp_path / f"step-00000012.rank0of{world + 1}.pt", state_of(12))
    step, parts = load_all_ranks(tmp_path)
    assert step == 8
    assert [part["x"][0].item() for part in parts] == pytest.approx(
        [8 + 0.01 * rank for rank in range(world)]
    )


@pytest.mark.parametrize(
    "take",
    [
        lambda: json.loads("{}")["network"],
        lambda: torch.nn.Linear(2, 1).load_state_dict({"weight": torch.zeros(3)}),
        lambda: json.loads("[]").network,
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, take):
    with pytest.raises(ConfigError, match="cannot be resumed") as caught, restoring(tmp_path):
        take()
    assert len(str(caught.value).splitlines()) == 1
