"""The whole state of a run between two steps: copied out, and put back bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ConfigError
from .randomness import random_state, restore_random_state
from .trees import copied, fresh, places_of

__all__ = ["Run", "buffer_rows", "capture", "check_run", "generators_of", "restore"]

_STATEFUL = ("scheduler", "scaler", "ema")


@dataclass(frozen=True)
class Run:
    """The parts of a training run that a rollback takes back; None is what it does not have.

    Attributes:
        model: the energy module.
        optimizer: of its parameters.
        scheduler, scaler, ema: objects with ``state_dict`` and ``load_state_dict``.
        buffer: the replay buffer: a tensor of rows, a list of tensors, or such an object.
        generators: sources of random numbers besides the global ones.
    """

    model: nn.Module | None = None
    optimizer: Optimizer | None = None
    scheduler: Any = None
    scaler: torch.amp.GradScaler | None = None
    ema: Any = None
    buffer: Any = None
    generators: tuple[torch.Generator, ...] = ()


def check_run(run: Run) -> None:
    """Refuse a run of which too little is attached to take it back.

    Raises:
        ConfigError: with what is missing, all of it.
    """
    problems = [f"{name}=..." for name in ("model", "optimizer") if getattr(run, name) is None]
    if problems:
        raise ConfigError(
            'action="rollback" takes the whole run back, but the guard does not know all of it. '
            f"Attach what is missing before the first step: g.attach({', '.join(problems)}), and "
            "buffer=, scheduler=, scaler=, ema=, generators= where the trainer has them."
        )
    for name in _STATEFUL:
        part = getattr(run, name)
        if part is not None and not _is_stateful(part):
            raise ConfigError(
                f"attach: {name}= is a {type(part).__name__}; expected an object with state_dict() "
                "and load_state_dict(), so that a rollback can take it back."
            )
    buffer = run.buffer
    plain = buffer if isinstance(buffer, list) else [buffer]
    if not (buffer is None or _is_stateful(buffer) or all(isinstance(x, Tensor) for x in plain)):
        raise ConfigError(
            f"attach: buffer= is a {type(buffer).__name__}; expected a tensor of rows, a list of "
            "tensors, or an object with state_dict() and load_state_dict()."
        )


def capture(run: Run, guard: Any, into: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Copy everything that a step changes to the host.

    Args:
        run: what was attached.
        guard: the guard's own state, plain values of its own.
        into: an earlier capture whose memory may be used again.

    Returns:
        nested dicts of host tensors and plain values.
    """
    assert run.model is not None
    assert run.optimizer is not None
    into = into or {}
    parts = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    for name in _STATEFUL:
        if getattr(run, name) is not None:
            parts[name] = getattr(run, name).state_dict()
    if run.buffer is not None:
        is_plain = isinstance(run.buffer, Tensor | list)
        parts["buffer"] = run.buffer if is_plain else run.buffer.state_dict()
    state = {
        # Their plain values too are the trainer's own objects, such as a list of learning rates.
        name: copied(_without_shared_values(part), into.get(name))
        for name, part in parts.items()
    }
    return {
        **state,
        "places": {name: places_of(part) for name, part in parts.items()},
        "random": random_state(generators_of(run)),
        "guard": guard,
    }


@torch.no_grad()
def restore(run: Run, state: Mapping[str, Any]) -> None:
    """Put back what :func:`capture` copied, except the guard's part; the copy stays as it is."""
    assert run.model is not None
    assert run.optimizer is not None
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # the copies to the host have come so far
    # Whoever loads a state may keep the very objects that it is given, as optimizers do, and expect
    # them where they were.
    places = state["places"]
    # The module itself may show its gathered parameters.
    parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
    # Not the modules, which copy: but for what their set_extra_state keeps, and sharded parameters.
    of_model = [place if isinstance(place, dict) else "cpu" for place in places["model"]]
    run.model.load_state_dict(fresh(state["model"], of_model, parameters))
    for name in ("optimizer", *_STATEFUL):
        if getattr(run, name) is not None:
            part = fresh(state[name], places[name], parameters)
            getattr(run, name).load_state_dict(part)
    buffer = run.buffer
    if isinstance(buffer, Tensor):
        buffer.copy_(state["buffer"])
    elif isinstance(buffer, list):
        _put_back(buffer, fresh(state["buffer"], places["buffer"], parameters))
    elif buffer is not None:
        buffer.load_state_dict(fresh(state["buffer"], places["buffer"], parameters))
    restore_random_state(state["random"], generators_of(run))


def _put_back(rows: list[Tensor], kept: list[Tensor]) -> None:
    """Into the same tensors where they are the same; a list that has grown is cut again."""
    if [x.shape for x in rows] == [x.shape for x in kept]:
        for own, before in zip(rows, kept, strict=True):
            own.copy_(before)
    else:
        rows[:] = kept


def generators_of(run: Run) -> Sequence[torch.Generator]:
    """The generators that were attached, and the buffer's own."""
    own = getattr(run.buffer, "generator", None)
    if isinstance(own, torch.Generator) and not any(own is each for each in run.generators):
        return (*run.generators, own)
    return run.generators


def buffer_rows(run: Run) -> Tensor | None:
    """The samples of the replay buffer, rows first; None where they are not one tensor."""
    rows = run.buffer if isinstance(run.buffer, Tensor) else getattr(run.buffer, "samples", None)
    return rows if isinstance(rows, Tensor) and rows.ndim and len(rows) else None


def _is_stateful(part: object) -> bool:
    return all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict"))


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
