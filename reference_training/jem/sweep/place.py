"""Where the runs of a grid go: this process's share of the grid, and a GPU or a core for each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from ebmguard.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""What torchrun sets beside TORCHELASTIC_*. A run that saw it would wait for the other ranks."""


@dataclass(frozen=True)
class Slot:
    """Room for one run at a time.

    Attributes:
        name: for people, such as "on GPU 3"; empty for a core.
        environment: variables of its runs.
        words: options of its runs, which those of the grid come after and override.
    """

    name: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """This process among those that share the grid.

    Attributes:
        slots: its runs at a time.
        rank: its number; it takes every `world`-th cell.
        world: how many there are.
    """

    slots: tuple[Slot, ...]
    rank: int = 0
    world: int = 1


def find_place(
    environment: Mapping[str, str], *, device: str, gpu_count: int, workers: int | None
) -> Place:
    """The place of this process: alone, or a rank of those that torchrun has started.

    Args:
        environment: that of this process.
        device: the device in the runs' settings.
        gpu_count: GPUs that PyTorch sees.
        workers: runs at a time; None is one per GPU, else one per core.

    Raises:
        ConfigError: the device is one GPU of several, torchrun's variables are there in part only,
            or `workers` is set where torchrun says how many there are.
    """
    if device not in ("auto", "cuda", "cpu"):
        raise ConfigError(
            f"device is {device!r}, but each run of a grid sees one GPU alone; expected auto, cuda "
            f"or cpu, and choose the GPUs by {VISIBLE}"
        )
    names = () if device == "cpu" else gpu_names(environment, gpu_count)
    rank_names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    missing = [name for name in rank_names if name not in environment]
    if len(missing) == len(rank_names):
        count = workers or len(names) or core_count()
        return Place(tuple(_slot(names, number) for number in range(count)))
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} is not set, though other variables of torchrun are; start "
            "several processes with torchrun, or unset them for a single one"
        )
    if workers is not None:
        raise ConfigError(
            f"workers is {workers}, but torchrun's --nproc-per-node says how many runs there are "
            "at a time; leave it out"
        )
    rank, world, local_rank = (int(environment[name]) for name in rank_names)
    return Place((_slot(names, local_rank),), rank, world)


def gpu_names(environment: Mapping[str, str], count: int) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES must be for each of the first `count` GPUs that are visible now."""
    visible = environment.get(VISIBLE)
    if visible is None:
        return tuple(str(number) for number in range(count))
    return tuple(name.strip() for name in visible.split(","))[:count]


def core_count() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_environment(environment: Mapping[str, str], slot: Slot) -> dict[str, str]:
    """The environment of a run: this process's, without torchrun's part of it."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in RANK_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    return {**kept, **slot.environment}


def _slot(gpus: tuple[str, ...], number: int) -> Slot:
    if not gpus:
        return Slot(environment={"OMP_NUM_THREADS": "1"}, words=("--threads", "1"))
    gpu = gpus[number % len(gpus)]
    return Slot(name=f"on GPU {gpu}", environment={VISIBLE: gpu})
