"""The whole state of a run between two steps: copied to the host, and put back bit by bit.

Of sharded tensors it holds this rank's part.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..errors import ConfigError
from ..ranks import Place, joined, local, place_of
from ..trainer import Trainer
from .changes import random_state, restore_random_state

__all__ = [
    "buffer_rows",
    "capture",
    "check_complete",
    "copied",
    "fresh",
    "generators_of",
    "places_of",
    "restore",
]

_PARTS = ("model", "optimizer", "scheduler", "scaler", "ema", "buffer")


def check_complete(trainer: Trainer) -> None:
    """Refuse, with a ``ConfigError``, a run of which too little is attached to take it back."""
    missing = [f"{name}=..." for name in ("model", "optimizer") if getattr(trainer, name) is None]
    if missing:
        raise ConfigError(
            'action="rollback" takes the whole run back: before the first step call '
            f"g.attach({', '.join(missing)}), with buffer=, scheduler=, scaler=, ema=, generators= "
            "where the trainer has them."
        )


def capture(trainer: Trainer, guard: Any, into: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Copy everything that a step changes to the host, into memory of an earlier capture."""
    parts = {
        name: part if _is_plain(name, part) else part.state_dict()
        for name, part in _attached(trainer).items()
    }
    return {
        **{name: copied(part, into and into.get(name)) for name, part in parts.items()},
        "places": {name: places_of(part) for name, part in parts.items()},
        "random": random_state(generators_of(trainer)),
        "guard": guard,
    }


@torch.no_grad()
def restore(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Put back what :func:`capture` copied, but the guard's part; the copy stays as it is.

    Raises:
        ConfigError: something else is attached than when the copy was made.
    """
    parts, generators = _attached(trainer), generators_of(trainer)
    unknown = [name for name in parts if name not in state]
    unknown += ["generators"] * (len(generators) != len(state["random"]["own"]))
    if unknown:
        raise ConfigError(
            "A snapshot does not fit what is attached now: it was taken with other parts for "
            f"{', '.join(unknown)}. Attach the same parts as then, all before the first step."
        )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # the copies to the host have come so far
    assert trainer.optimizer is not None
    # The module itself may show its gathered parameters.
    parameters = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    for name, part in parts.items():
        places = state["places"][name]
        if name == "model" or isinstance(part, Tensor):
            # These copy: but for what a set_extra_state keeps, and sharded parameters.
            places = [place if isinstance(place, dict) else "cpu" for place in places]
        # Whoever else loads a state may keep the very objects that it is given, as optimizers do,
        # and expect them where they were.
        kept = fresh(state[name], places, parameters)
        if not _is_plain(name, part):
            part.load_state_dict(kept)
        elif isinstance(part, Tensor):
            part.copy_(kept)
        elif [x.shape for x in part] == [x.shape for x in kept]:
            for own, before in zip(part, kept, strict=True):
                own.copy_(before)
        else:  # it has grown since
            part[:] = kept
    restore_random_state(state["random"], generators)


def _is_plain(name: str, part: object) -> bool:
    """Whether a part is its own state: a buffer of tensors. Schedulers in a list have a state."""
    return name == "buffer" and isinstance(part, Tensor | list)


def _attached(trainer: Trainer) -> dict[str, Any]:
    parts = {name: getattr(trainer, name) for name in _PARTS}
    return {name: part for name, part in parts.items() if part is not None}


def generators_of(trainer: Trainer) -> Sequence[torch.Generator]:
    """The generators that were attached, and the buffer's own."""
    own = getattr(trainer.buffer, "generator", None)
    if isinstance(own, torch.Generator) and own not in trainer.generators:
        return (*trainer.generators, own)
    return trainer.generators


def buffer_rows(trainer: Trainer) -> Tensor | None:
    """The samples of the replay buffer, rows first; None where they are not one tensor."""
    buffer = trainer.buffer
    rows = buffer if isinstance(buffer, Tensor) else getattr(buffer, "samples", None)
    return rows if isinstance(rows, Tensor) and rows.ndim and len(rows) else None


def copied(tree: Any, into: Any = None) -> Any:
    """A copy with every tensor on the host, of sharded ones this rank's part as a plain tensor.

    Of a GPU's it is pinned, and complete when the stream has come so far. ``into`` is used again.
    """
    leaves, shape = tree_flatten(tree)
    old = tree_leaves(into)
    if len(old) != len(leaves):
        old = [None] * len(leaves)
    return tree_unflatten([_copied(x, y) for x, y in zip(leaves, old, strict=True)], shape)


def _copied(x: Any, old: Any) -> Any:
    if not isinstance(x, Tensor):
        return copy.deepcopy(x)  # plain values too are the trainer's own objects
    x = local(x.detach())
    if not (isinstance(old, Tensor) and old.shape == x.shape and old.dtype == x.dtype):
        old = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
    return old.copy_(x, non_blocking=x.is_cuda)


def places_of(tree: Any) -> list[Place]:
    """Where the tensors of a tree belong, in the order of its leaves."""
    return [place_of(x) for x in tree_leaves(tree) if isinstance(x, Tensor)]


def fresh(tree: Any, places: Sequence[Place] = (), like: Sequence[Tensor] = ()) -> Any:
    """A copy of what :func:`copied` returned: tensors in ``places``, as :func:`places_of` has them.

    Sharded ones are sharded as one of ``like``, else a ``ConfigError``.
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
