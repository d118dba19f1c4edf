"""Nested containers of tensors, copied to the host and back bit by bit; of sharded ones the part
that this rank holds."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..shards import Place, joined, local, place_of

__all__ = ["copied", "fresh", "places_of"]


def copied(tree: Any, into: Any = None) -> Any:
    """A copy of every tensor on the host; pinned, and without waiting, where it is on a GPU.

    Of a sharded tensor it is that of this rank's part, as a plain tensor.

    Args:
        tree: nested dicts, lists and tuples of tensors and plain values.
        into: an earlier copy that nobody needs any more, whose memory is used again where its
            tensors have the same shapes.

    Returns:
        the copy; of a GPU's tensors it is complete when the stream has come so far.
    """
    old: list[Any] = [] if into is None else tree_flatten(into)[0]
    leaves, shape = tree_flatten(tree)
    if len(old) != len(leaves):
        old = [None] * len(leaves)
    pairs = zip(leaves, old, strict=True)
    return tree_unflatten([_copied(x, y) if isinstance(x, Tensor) else x for x, y in pairs], shape)


def places_of(tree: Any) -> list[Place]:
    """Where the tensors of a tree belong, in the order of its leaves."""
    return [place_of(x) for x in tree_leaves(tree) if isinstance(x, Tensor)]


def fresh(tree: Any, places: Sequence[Place] = (), like: Sequence[Tensor] = ()) -> Any:
    """The same tree with leaves of its own, so that who keeps them cannot change the original.

    Args:
        tree: what :func:`copied` returned.
        places: where its tensors go, as :func:`places_of` listed them. None are given, or a device
            that this machine lacks: they stay on the host.
        like: tensors of the run, on whose ranks the sharded ones are.

    Raises:
        ConfigError: a tensor was sharded in another way than any of the run's.
    """
    leaves, shape = tree_flatten(tree)
    remaining = iter(places)

    def put(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return copy.deepcopy(x)
        place = next(remaining, "cpu")
        if isinstance(place, str):
            return x.to(_existing(place), copy=True)
        return joined(x.to(_existing(place["device"]), copy=True), place, like)

    return tree_unflatten([put(x) for x in leaves], shape)


def _existing(device: str) -> torch.device:
    found = torch.device(device)
    lacks = found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count()
    return torch.device("cpu") if lacks else found


def _copied(x: Tensor, old: Any) -> Tensor:
    x = local(x.detach())
    same = isinstance(old, Tensor) and old.shape == x.shape and old.dtype == x.dtype
    if not same:
        old = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
    result: Tensor = old
    return result.copy_(x, non_blocking=x.is_cuda)
