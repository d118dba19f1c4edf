from __future__ import annotations

import os

import pytest

from ebmguard.errors import ConfigError
from ebmguard.reference_training.jem.sweep.place import Slot, find_place, run_environment

RANK_5 = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}


def find(environment, *, device="auto", gpu_count=0, workers=None):
    return find_place(environment, device=device, gpu_count=gpu_count, workers=workers)


def gpus(place):
    return [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in place.slots]


@pytest.mark.parametrize(
    ("visible", "gpu_count", "workers", "expected"),
    [
        (None, 3, None, ["0", "1", "2"]),
        (None, 3, 2, ["0", "1"]),
        (None, 2, 5, ["0", "1", "0", "1", "0"]),
        ("4,6", 2, None, ["4", "6"]),
        ("GPU-8f, MIG-1", 2, None, ["GPU-8f", "MIG-1"]),
        ("3,9,1", 1, None, ["3"]),  # there is no 9: CUDA hides what comes after it too
    ],
)
def test_each_gpu_that_is_visible_takes_runs(visible, gpu_count, workers, expected):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpus(find(environment, gpu_count=gpu_count, workers=workers)) == expected


@pytest.mark.parametrize(("device", "gpu_count"), [("auto", 0), ("cpu", 4)])
def test_without_gpus_each_core_takes_runs(device, gpu_count):
    place = find({"CUDA_VISIBLE_DEVICES": ""}, device=device, gpu_count=gpu_count)
    assert 1 <= len(place.slots) <= (os.cpu_count() or 1)
    for slot in place.slots:
        assert slot.environment == {"OMP_NUM_THREADS": "1"}
        assert slot.words == ("--threads", "1")


def test_a_rank_takes_one_run_at_a_time_on_its_own_gpu():
    place = find({**RANK_5, "CUDA_VISIBLE_DEVICES": "2,3"}, gpu_count=2)
    assert gpus(place) == ["3"]
    assert (place.rank, place.world) == (5, 8)
    assert find(RANK_5).slots[0].words == ("--threads", "1")


@pytest.mark.parametrize(
    ("environment", "changes", "problem"),
    [
        ({}, {"device": "cuda:1", "gpu_count": 2}, "CUDA_VISIBLE_DEVICES"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {}, "LOCAL_RANK is not set"),
        (RANK_5, {"workers": 2}, "--nproc-per-node"),
    ],
)
def test_what_makes_no_place_is_refused(environment, changes, problem):
    with pytest.raises(ConfigError, match=problem):
        find(environment, **changes)


def test_a_run_has_this_environment_and_its_slot_but_is_no_rank():
    here = {**RANK_5, "MASTER_ADDR": "a", "TORCHELASTIC_RUN_ID": "b", "HOME": "c", "X": "d"}
    there = run_environment(here, Slot(environment={"X": "e"}))
    assert there == {"HOME": "c", "X": "e"}
