"""Nested containers of tensors, copied to the host and back bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = ["copied", "devices_of", "fresh"]


def copied(tree: Any, into: Any = None) -> Any:
    """A copy of every tensor on the host; pinned, and without waiting, where it is on a GPU.

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


def devices_of(tree: Any) -> list[str]:
    """Where the tensors of a tree are, in the order of its leaves."""
    return [str(x.device) for x in tree_leaves(tree) if isinstance(x, Tensor)]


def fresh(tree: Any, devices: Sequence[str] = ()) -> Any:
    """The same tree with leaves of its own, so that who keeps them cannot change the original.

    Args:
        tree: what :func:`copied` returned.
        devices: where its tensors go, as :func:`devices_of` listed them. None are given, or one
            that this machine lacks: they stay on the host.
    """
    leaves, shape = tree_flatten(tree)
    places = iter(devices)
    return tree_unflatten(
        [
            x.to(_existing(next(places, "cpu")), copy=True)
            if isinstance(x, Tensor)
            else copy.deepcopy(x)
            for x in leaves
        ],
        shape,
    )


def _existing(device: str) -> torch.device:
    found = torch.device(device)
    lacks = found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count()
    return torch.device("cpu") if lacks else found


def _copied(x: Tensor, old: Any) -> Tensor:
    x = x.detach()
    same = isinstance(old, Tensor) and old.shape == x.shape and old.dtype == x.dtype
    if not same:
        old = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
    result: Tensor = old
    return result.copy_(x, non_blocking=x.is_cuda)
