"""Processes that train together: their parts, and what they settle between them."""

from __future__ import annotations

import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.reference_training.engine.ranks import ONE_RANK, Ranks, joined_ranks
from tests.ranks import rank_fixtures
from tests.reference_training.engine import ranks_process

TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [7, 8, 64, 1000])
def test_parts_are_all_there_is_and_as_equal_as_can_be(world, count):
    ranks = [Ranks(rank, world) for rank in range(world)]
    things = list(range(count))
    assert [thing for one in ranks for thing in things[one.part(count)]] == things
    shares = [one.share(count) for one in ranks]
    assert shares == [len(things[one.part(count)]) for one in ranks]
    assert max(shares) - min(shares) <= 1
    # The average over ranks of their weighted means is the mean over all.
    x = torch.rand(count, dtype=torch.float64)
    weighted = [x[one.part(count)].mean() * one.weight(count) for one in ranks]
    torch.testing.assert_close(torch.stack(weighted).mean(), x.mean())
    assert [one.is_first for one in ranks] == [True] + [False] * (world - 1)


def test_without_torchrun_there_is_one_process(monkeypatch):
    for name in ("WORLD_SIZE", *TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    with joined_ranks("cuda:3") as ranks:
        assert ranks == ONE_RANK
    monkeypatch.setenv("WORLD_SIZE", "1")
    with joined_ranks("auto") as ranks:
        assert ranks == ONE_RANK


@pytest.mark.parametrize("missing", TORCHRUN)
def test_half_of_torchruns_variables_are_refused(monkeypatch, missing):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=f"WORLD_SIZE is 2 but {missing} is not set"):
        joined_ranks("cpu").__enter__()


def test_one_gpu_for_several_processes_is_refused(monkeypatch):
    for name, value in {**TORCHRUN, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"device is 'cuda:1' in one of 2 processes"):
        joined_ranks("cuda:1").__enter__()


started, folder, seen = rank_fixtures(ranks_process.__name__, 3)


def test_they_know_who_they_are(seen):
    assert [one["who"] for one in seen] == [[0, 3, True], [1, 3, False], [2, 3, False]]


def test_they_tell_each_other(seen):
    for one in seen:
        assert one["average"].tolist() == [1, float("inf")]
        # None of the first, one row of the second, two of the third.
        assert one["joined"].tolist() == [[10, 11], [20, 21], [22, 23]]
        assert one["all"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert one["first"] == {"rank": 0}


def test_the_first_rank_settles_the_settings_for_all(seen, folder):
    for rank, one in enumerate(seen):
        assert one["opened"]["new"]["seed"] == 10
        assert one["opened"]["new writes"] == (rank == 0)
        assert one["opened"]["resumed"] == one["opened"]["new"]
        assert "already holds a run" in one["opened"]["again"]
        assert "device is 'abacus', which cannot be used here" in one["opened"]["wrong"]
    assert (folder / "run" / "config.json").is_file()
    assert not (folder / "wrong").exists()


def test_checkpoints_are_those_that_all_have(seen):
    expected = [f"step-{step:08d}.rank{rank}of3.pt" for step in (12, 16) for rank in range(3)]
    for rank, one in enumerate(seen):
        found = one["checkpoints"]
        assert found["names"] == expected
        assert found["newest"] == pytest.approx(16 + rank / 10)


def test_they_go_back_together_when_one_files_is_damaged(seen):
    for rank, one in enumerate(seen):
        found = one["checkpoints"]
        assert found["back"] == pytest.approx(12 + rank / 10)
        (warning,) = found["warnings"]
        assert "step-00000016.rank1of3.pt" in warning
        assert "passed over" in warning
        # Together there is none left, also for the rank whose own files are all well.
        for name in ("step-00000016.rank1of3.pt", "step-00000012.rank2of3.pt"):
            assert name in found["lost"]
