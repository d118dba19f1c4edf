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
