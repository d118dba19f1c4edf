"""Parameters of which each rank holds a part are refused, wherever the guard first meets them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ebmguard import guard
from ebmguard.errors import ConfigError
from tests.parts import Energy, climb


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Energy]:
    """One that is sharded over a single rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    network = Energy()
    fully_shard(network, mesh=init_device_mesh("cpu", (1,)))
    yield network
    dist.destroy_process_group()


def test_shards_are_refused_at_every_door(network: Energy) -> None:
    g = guard(None, climb)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for call in (
        lambda: guard(None, climb, model=network),
        lambda: guard(None, climb, optimizer=optimizer, process_group=dist.group.WORLD),
        lambda: g.attach(optimizer=optimizer),
        lambda: g.sampler(network, torch.zeros(3, 2)),
    ):
        with pytest.raises(ConfigError, match=r"DistributedDataParallel.*contrastive_loss"):
            call()
    assert g.trainer.optimizer is None
    # What a network in one piece does.
    assert g.sampler(Energy(), torch.zeros(3, 2)).shape == (3, 2)
