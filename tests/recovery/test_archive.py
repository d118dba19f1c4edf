"""What the ranks of a run have on the disk while they write."""

from __future__ import annotations

from typing import Any

import pytest

from ebmguard.ranks import Ranks
from ebmguard.recovery.archive import Archive


class Killed(BaseException):
    """Stands in for a kill of this rank or another."""


class WaitsInVain(Ranks):
    """A rank that is killed while it waits for the others."""

    def from_all(self, value: Any) -> list[Any]:
        raise Killed


def test_a_rank_keeps_its_files_until_all_have_written_the_next_one(tmp_path):
    def steps():
        return [int(path.stem.removeprefix("snapshot-")) for path in sorted(tmp_path.iterdir())]

    archive = Archive(tmp_path, 1, Ranks())
    for step in (100, 200, 300):
        archive.write(step, {}, {})
    assert steps() == [200, 300]
    # A rollback to before all of them.
    with pytest.raises(Killed):
        Archive(tmp_path, 1, WaitsInVain()).write(150, {}, {})
    assert steps() == [150, 200, 300]
    archive.write(150, {}, {})
    assert steps() == [150]


class HearsOf(Ranks):
    """A rank among others, of which one has a problem."""

    problem = ""

    def from_all(self, value: Any) -> list[Any]:
        return [value, self.problem]


def test_what_one_rank_cannot_write_none_keeps_and_all_try_again(tmp_path, caplog):
    ranks = HearsOf()
    archive = Archive(tmp_path, 100, ranks)
    archive.write(100, {}, {})
    for step in (200, 201):
        object.__setattr__(ranks, "problem", "the disk is full")
        archive.write(step, {}, {})
        assert [path.name for path in tmp_path.iterdir()] == ["snapshot-00000100.pt"]
        assert archive.is_due(step + 1)
    object.__setattr__(ranks, "problem", "")
    archive.write(202, {}, {})
    assert not archive.is_due(203)
    assert len(list(tmp_path.iterdir())) == 2
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2  # once for all that fail, and once when they are written again
    assert said[0].startswith("No snapshot of step 200: the disk is full. Training goes on")
    assert said[1] == "Snapshots are written again, that of step 202."
