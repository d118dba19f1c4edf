"""Sharded tensors in snapshots: this rank's part in plain values, and whole again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ebmguard import guard
from ebmguard.errors import ConfigError
from ebmguard.ranks import copies, is_sharded, local
from ebmguard.recovery import load_durably, save_durably
from ebmguard.recovery.snapshots import copied, fresh, places_of


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """One rank in two dimensions, copies and shards."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("copies", "shards"))
    dist.destroy_process_group()


def test_a_part_is_kept_as_plain_values_and_is_whole_again(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    x = distribute_tensor(torch.randn(5, 3).T, mesh, [Replicate(), Shard(1)])
    tree = {"x": x, "plain": torch.ones(2), "name": "a"}
    kept = {"tree": copied(tree), "places": places_of(tree)}
    assert not is_sharded(kept["tree"]["x"])
    wanted = x.full_tensor().clone()
    local(x).zero_()  # the copy is its own
    save_durably(tmp_path / "kept", kept)
    back: Any = load_durably(tmp_path / "kept")
    found = fresh(back["tree"], back["places"], like=[torch.ones(1), x])
    assert isinstance(found["x"], DTensor)
    assert found["x"].device_mesh == mesh
    assert found["x"].placements == x.placements
    assert (found["x"].shape, found["x"].stride()) == (x.shape, x.stride())
    assert found["x"].full_tensor().equal(wanted)
    assert found["plain"].equal(torch.ones(2))
    with pytest.raises(ConfigError, match="no parameter of the optimizer is"):
        fresh(back["tree"], back["places"], like=[torch.ones(1)])


def test_copies_are_counted() -> None:
    assert copies(torch.ones(3), world=4) == 4


def test_parts_that_are_to_be_added_are_refused(mesh: DeviceMesh) -> None:
    part = DTensor.from_local(torch.ones(3), mesh, [Replicate(), Partial()], run_check=False)
    optimizer = torch.optim.SGD([nn.Parameter(part)], lr=0.1)
    g = guard(None, None, beta_star=0.5, process_group=dist.group.WORLD)
    with pytest.raises(ConfigError, match="expected shards, or copies on every rank"):
        g.attach(optimizer=optimizer)
