"""Tensors of which each rank holds a part: the DTensors of FSDP2 (``fully_shard``)."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Shard

__all__ = ["Place", "check_shards", "copies", "is_sharded", "joined", "local", "place_of"]

Place: TypeAlias = "str | dict[str, Any]"
"""A tensor's device; of a DTensor also its mesh and parts, in plain values."""


def is_sharded(x: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor."""
    # Its module takes as long to import as the rest of torch; code with such tensors has done it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """What this rank holds of a tensor, in the same memory; a plain tensor itself."""
    if not is_sharded(x):
        return x
    with torch.no_grad():
        return x.to_local()


def copies(x: Tensor, world: int) -> int:
    """On how many of ``world`` ranks each entry of a tensor is."""
    if not is_sharded(x):
        return world
    sizes = zip(x.device_mesh.shape, x.placements, strict=True)
    return world // prod(size for size, placement in sizes if placement.is_shard())


def check_shards(parameters: Iterable[Tensor], process_group: dist.ProcessGroup | None) -> None:
    """Refuse parameters that are sharded over ranks which do not decide together.

    Raises:
        ConfigError: such parameters, or parts that are neither shards nor copies.
    """
    for x in filter(is_sharded, parameters):
        ranks = set(x.device_mesh.mesh.flatten().tolist())
        known = set() if process_group is None else set(dist.get_process_group_ranks(process_group))
        if len(ranks) > 1 and not ranks <= known:
            raise ConfigError(
                f"attach: the optimizer's parameters are sharded over {len(ranks)} ranks. Pass "
                "guard(..., process_group=...) with all of them, as torch.distributed.group.WORLD."
            )
        if not all(each.is_replicate() or _is_plain_shard(each) for each in x.placements):
            raise ConfigError(
                f"attach: a parameter is placed as {x.placements}; expected shards, or copies on "
                "every rank, as fully_shard makes them."
            )


def place_of(x: Tensor) -> Place:
    """Where a tensor belongs."""
    if not is_sharded(x):
        return str(x.device)
    return {
        "device": str(x.device),
        "ranks": x.device_mesh.mesh.tolist(),
        "sharded": [each.dim if _is_plain_shard(each) else None for each in x.placements],
        "shape": list(x.shape),
        "stride": list(x.stride()),
    }


def joined(part: Tensor, place: dict[str, Any], like: Iterable[Tensor]) -> DTensor:
    """The DTensor whose part on this rank is given, in the same memory; see :func:`place_of`.

    Raises:
        ConfigError: none of the tensors ``like`` is on its mesh.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    meshes = (x.device_mesh for x in filter(is_sharded, like))
    mesh = next((mesh for mesh in meshes if mesh.mesh.tolist() == place["ranks"]), None)
    if mesh is None:
        raise ConfigError(
            f"A part of a snapshot is sharded over the ranks {place['ranks']}, but no parameter of "
            "the optimizer is. Go on with as many ranks as took it, and shard the model alike."
        )
    return DTensor.from_local(
        part,
        mesh,
        [Replicate() if dim is None else Shard(dim) for dim in place["sharded"]],
        run_check=False,
        shape=torch.Size(place["shape"]),
        stride=tuple(place["stride"]),
    )


def _is_plain_shard(placement: object) -> TypeGuard[Shard]:
    from torch.distributed.tensor import Shard

    return type(placement) is Shard  # subclasses order the parts differently
