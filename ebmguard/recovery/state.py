"""The whole state of a run between two steps: copied out, and put back bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..trainer import Trainer
from .randomness import random_state, restore_random_state
from .trees import copied, fresh, places_of

__all__ = ["buffer_rows", "capture", "check_complete", "generators_of", "restore"]

_STATEFUL = ("scheduler", "scaler", "ema")


def check_complete(trainer: Trainer) -> None:
    """Refuse a run of which too little is attached to take it back.

    Raises:
        ConfigError: with what is missing, all of it.
    """
    missing = [f"{name}=..." for name in ("model", "optimizer") if getattr(trainer, name) is None]
    if missing:
        raise ConfigError(
            'action="rollback" takes the whole run back, but the guard does not know all of it. '
            f"Attach what is missing before the first step: g.attach({', '.join(missing)}), and "
            "buffer=, scheduler=, scaler=, ema=, generators= where the trainer has them."
        )


def capture(trainer: Trainer, guard: Any, into: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Copy everything that a step changes to the host.

    Args:
        trainer: what was attached.
        guard: the guard's own state, plain values of its own.
        into: an earlier capture whose memory may be used again.

    Returns:
        nested dicts of host tensors and plain values.
    """
    assert trainer.model is not None
    assert trainer.optimizer is not None
    into = into or {}
    parts = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    for name in _STATEFUL:
        if getattr(trainer, name) is not None:
            parts[name] = getattr(trainer, name).state_dict()
    if trainer.buffer is not None:
        is_plain = isinstance(trainer.buffer, Tensor | list)
        parts["buffer"] = trainer.buffer if is_plain else trainer.buffer.state_dict()
    state = {
        # Their plain values too are the trainer's own objects, such as a list of learning rates.
        name: copied(_without_shared_values(part), into.get(name))
        for name, part in parts.items()
    }
    return {
        **state,
        "places": {name: places_of(part) for name, part in parts.items()},
        "random": random_state(generators_of(trainer)),
        "guard": guard,
    }


@torch.no_grad()
def restore(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Put back what :func:`capture` copied, except the guard's part; the copy stays as it is."""
    assert trainer.model is not None
    assert trainer.optimizer is not None
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # the copies to the host have come so far
    # Whoever loads a state may keep the very objects that it is given, as optimizers do, and expect
    # them where they were.
    places = state["places"]
    # The module itself may show its gathered parameters.
    parameters = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    # Not the modules, which copy: but for what their set_extra_state keeps, and sharded parameters.
    of_model = [place if isinstance(place, dict) else "cpu" for place in places["model"]]
    trainer.model.load_state_dict(fresh(state["model"], of_model, parameters))
    for name in ("optimizer", *_STATEFUL):
        if getattr(trainer, name) is not None:
            part = fresh(state[name], places[name], parameters)
            getattr(trainer, name).load_state_dict(part)
    buffer = trainer.buffer
    if isinstance(buffer, Tensor):
        buffer.copy_(state["buffer"])
    elif isinstance(buffer, list):
        _put_back(buffer, fresh(state["buffer"], places["buffer"], parameters))
    elif buffer is not None:
        buffer.load_state_dict(fresh(state["buffer"], places["buffer"], parameters))
    restore_random_state(state["random"], generators_of(trainer))


def _put_back(rows: list[Tensor], kept: list[Tensor]) -> None:
    """Into the same tensors where they are the same; a list that has grown is cut again."""
    if [x.shape for x in rows] == [x.shape for x in kept]:
        for own, before in zip(rows, kept, strict=True):
            own.copy_(before)
    else:
        rows[:] = kept


def generators_of(trainer: Trainer) -> Sequence[torch.Generator]:
    """The generators that were attached, and the buffer's own."""
    own = getattr(trainer.buffer, "generator", None)
    if isinstance(own, torch.Generator) and not any(own is each for each in trainer.generators):
        return (*trainer.generators, own)
    return trainer.generators


def buffer_rows(trainer: Trainer) -> Tensor | None:
    """The samples of the replay buffer, rows first; None where they are not one tensor."""
    rows = (
        trainer.buffer
        if isinstance(trainer.buffer, Tensor)
        else getattr(trainer.buffer, "samples", None)
    )
    return rows if isinstance(rows, Tensor) and rows.ndim and len(rows) else None


def _without_shared_values(tree: Any) -> Any:
    """The same tree with containers of its own; tensors are the very same."""
    memo: dict[int, Any] = {}

    def keep(x: Any) -> None:
        if isinstance(x, Tensor):
            memo[id(x)] = x
        elif isinstance(x, dict):
            for value in x.values():
                keep(value)
        elif isinstance(x, list | tuple):
            for value in x:
                keep(value)

    keep(tree)
    return copy.deepcopy(tree, memo)
