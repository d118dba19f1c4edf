"""Snapshots of a run: its whole state, copied and put back bit by bit, and which are kept."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..alerts import CollapsedRule
from ..errors import ConfigError
from ..trainer import Trainer, optimizers_of
from .archive import digest_of, first_difference, shapes_of
from .changes import random_state, restore_random_state

__all__ = [
    *("CONSTANT", "Snapshot", "Snapshots", "capture", "check_complete", "check_fits"),
    *("generators_of", "restore", "restore_changed", "structure_of"),
]

CONSTANT = CollapsedRule.share  # of its best spread, under which f is a constant
Health = Callable[[int], tuple[bool, float]]
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
    if left := trainer.untrained:
        raise ConfigError(
            f'action="rollback": no attached optimizer has these parameters of the model, so that '
            f"no bad step of theirs is left out: {', '.join(left)}. Pass all that train it, "
            "optimizer=[a, b]; p.requires_grad_(False) for what none does."
        )


def capture(trainer: Trainer, **more: Any) -> dict[str, Any]:
    """Copy everything that a step changes to the host, and add ``more`` to it."""
    parts = {
        name: part if _is_plain(name, part) else part.state_dict()
        for name, part in _attached(trainer).items()
    }
    return {
        **{name: copied(part) for name, part in parts.items()},
        "others": copied(_others(trainer)),
        "places": {name: devices_of(part) for name, part in parts.items()},
        "kinds": {name: _kind(name, part) for name, part in _attached(trainer).items()},
        "random": random_state(generators_of(trainer)),
        **more,
    }


def check_fits(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Refuse, with a ``ConfigError`` that names the first difference, a snapshot of another run:
    other parts, names, shapes or dtypes, another optimizer, weights that are not finite.
    """
    parts, generators = _attached(trainer), generators_of(trainer)
    unknown = [name for name in _PARTS if (name in parts) != (name in state)]
    unknown += ["generators"] * (len(generators) != len(state["random"]["own"]))
    if unknown:
        raise ConfigError(
            "A snapshot does not fit what is attached now: it was taken with other parts for "
            f"{', '.join(unknown)}. Attach the same parts as then, all before the first step."
        )
    for name, part in _attached(trainer).items():
        saved, current, change = (
            state[name],
            part,
            first_difference(state["kinds"][name], _kind(name, part)),
        )
        if isinstance(part, nn.Module | Tensor):
            current = part.state_dict() if isinstance(part, nn.Module) else part
            change = change or first_difference(shapes_of(saved), shapes_of(current))
        if change:
            raise ConfigError(
                f"The snapshot is of another {name}: {change}. Build the run as it was, or begin "
                "another one in a new folder."
            )
        for key, x in saved.items() if isinstance(part, nn.Module) else ():
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.itemsize == 1:
                continue
            # What is infinite from the start, as a mask is, may be.
            if (~x.isfinite() & current[key].isfinite().cpu()).any():
                raise ConfigError(f"The snapshot's {name} has a {key} that is not finite.")


def _kind(name: str, part: Any) -> dict[str, str]:
    """Describe the kind of a part, which loading a state does not check."""
    if name == "optimizer":
        shapes = shapes_of({"groups": [group["params"] for group in part.param_groups]})
        return {"it": " and ".join(type(x).__name__ for x in optimizers_of(part)), **shapes}
    is_known = name == "scheduler" or _is_plain(name, part)
    return {"it": type(part).__name__} if is_known else {}


def structure_of(trainer: Trainer) -> dict[str, Any]:
    """Describe what a snapshot must fit, in numbers that cost microseconds."""
    structure: dict[str, Any] = {"generators": len(generators_of(trainer))}
    for name, part in _attached(trainer).items():
        facts = structure[name] = [type(part)]
        facts += [part.shape] if isinstance(part, Tensor) else []
        facts += [len(x["params"]) for x in part.param_groups] if name == "optimizer" else []
        for module in part.modules() if isinstance(part, nn.Module) else ():
            facts += module._parameters
            facts += [key if x is None else (key, x.shape) for key, x in module._buffers.items()]
    return structure


@torch.no_grad()
def restore(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Put back the parts of what :func:`capture` copied, which stays as it is."""
    parts = {name: part for name, part in _attached(trainer).items() if name in state}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # the copies to the host have come so far
    for name, part in parts.items():
        # A module and a tensor copy what they get, but for what a set_extra_state keeps.
        copies = name == "model" or isinstance(part, Tensor)
        places = () if copies else state["places"][name]
        # Other parts may keep the very objects that they load, as optimizers do, and expect them
        # on the device where they were.
        kept = copied_back(state[name], places)
        if not _is_plain(name, part):
            part.load_state_dict(kept)
        elif isinstance(part, Tensor):
            part.copy_(kept)
        elif [x.shape for x in part] == [x.shape for x in kept]:
            for row, before in zip(part, kept, strict=True):
                row.copy_(before)
        else:  # it has grown since
            part[:] = kept
    for other, before in zip(_others(trainer), state.get("others", ()), strict=False):
        other.copy_(before)
    if "random" in state:
        restore_random_state(state["random"], generators_of(trainer))


def _others(trainer: Trainer) -> list[Tensor]:
    """Return parameters that the optimizer trains beside the model's, such as a generator's."""
    groups = [] if trainer.optimizer is None else trainer.optimizer.param_groups
    known = set() if trainer.model is None else {*map(id, trainer.model.parameters())}
    return [p for group in groups for p in group["params"] if id(p) not in known]


def restore_changed(
    trainer: Trainer, then: Mapping[str, Any], now: Mapping[str, Any]
) -> Collection[str]:
    """Put back the parts that differ between ``then`` and ``now``, at the start of one step.

    The state ``then`` includes what a loop does before it samples, so that this is not done twice.
    """
    late = {k: x for k, x in then.items() if k in now and digest_of(x) != digest_of(now[k])}
    names, current = [*late], {} if trainer.model is None else trainer.model.state_dict()
    for key, x in late.pop("model", {}).items():  # whose parameters may be in a graph already
        if isinstance(x, Tensor) and digest_of(x) != digest_of(now["model"][key]):
            current[key].data.copy_(x)
    restore(trainer, {"places": now["places"], **late})
    return names


def _is_plain(name: str, part: object) -> bool:
    """Return whether a part is its state, as a buffer of tensors; a list of schedulers is not."""
    return name == "buffer" and isinstance(part, Tensor | list)


def _attached(trainer: Trainer) -> dict[str, Any]:
    return {name: part for name in _PARTS if (part := getattr(trainer, name)) is not None}


def generators_of(trainer: Trainer) -> Sequence[torch.Generator]:
    """Return the generators that were attached, and that of the buffer."""
    generator = getattr(trainer.buffer, "generator", None)
    if isinstance(generator, torch.Generator) and generator not in trainer.generators:
        return (*trainer.generators, generator)
    return trainer.generators


def copied(tree: Any) -> Any:
    """Copy a tree to the host; copies from a GPU are complete once its stream has come so far."""

    def kept(x: Any) -> Any:
        if not isinstance(x, Tensor):
            try:
                return copy.deepcopy(x)  # plain values too are objects of the trainer
            except TypeError as error:
                raise ConfigError(f"A snapshot cannot hold {x!r}: {error}.") from error
        x = x.detach()
        # PyTorch uses the pinned memory of dropped copies again.
        host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
        return host.copy_(x, non_blocking=x.is_cuda)

    return tree_map(kept, tree)


def devices_of(tree: Any) -> list[str]:
    """Return the devices of the tensors in a tree, in the order of its leaves."""
    return [str(x.device) for x in tree_leaves(tree) if isinstance(x, Tensor)]


def copied_back(tree: Any, devices: Sequence[str] = ()) -> Any:
    """Copy what :func:`copied` returned, the tensors to ``devices`` (:func:`devices_of`)."""
    remaining = iter(devices)

    def put(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return copy.deepcopy(x)
        return x.to(_existing(next(remaining, "cpu")), copy=True)

    return tree_map(put, tree)


def _existing(device: str) -> torch.device:
    place = torch.device(device)
    lacks = place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count()
    return torch.device("cpu") if lacks else place


@dataclass(eq=False)  # its tensors have no single truth value
class Snapshot:
    """A run's whole state before a step, as :func:`capture` returned it."""

    step: int
    state: dict[str, Any]
    settled: bool = True  # GradScale was healthy before it
    # The spread of f before it; of a certified one, the largest that the run had so far.
    spread: float = 0.0


@dataclass(eq=False)
class Snapshots:
    """The snapshots of a run, oldest first: ``keep`` certified ones, whose ages grow by factors,
    and those that wait until ``certify_after`` quiet steps certify them."""

    keep: int
    certify_after: int
    certified: list[Snapshot] = field(default_factory=list)
    waiting: list[Snapshot] = field(default_factory=list)

    def drop_waiting(self, quiet_until: int) -> None:
        """Drop snapshots that were taken less than ``certify_after`` steps before an alert."""
        # The first one stays as the last resort: no other is older.
        del self.waiting[self._ripe(quiet_until) or int(not self.certified) :]

    def certify(self, step: int, health: Health = lambda _: (True, math.inf)) -> list[Snapshot]:
        """Certify snapshots that have been quiet for long enough by ``step``, and return them.

        A snapshot is dropped if, before it or after it (``health`` of the last so many steps),
        GradScale was too low or f was a constant compared to the spread that the run has had.
        """
        if not (count := self._ripe(step)):
            return []
        (settled, spread), most, ripe = health(self.certify_after), self.spread, list[Snapshot]()
        for snapshot in self.waiting[:count]:
            if settled and snapshot.settled and min(snapshot.spread, spread) >= CONSTANT * most:
                snapshot.spread = most = max(snapshot.spread, most)
                ripe.append(snapshot)
        # The first one stays as the last resort here too.
        del self.waiting[int(not (ripe or self.certified)) : count]
        for snapshot in ripe:
            self.certified.append(snapshot)
            if len(self.certified) > self.keep:
                del self.certified[self._most_crowded(step)]
        return ripe

    @property
    def spread(self) -> float:
        """The largest spread that a certified snapshot had; 0 if none is known."""
        return self.certified[-1].spread if self.certified else 0.0

    def best(self) -> Snapshot | None:
        """Return the newest certified snapshot; without any, the oldest that there is."""
        return self.certified[-1] if self.certified else next(iter(self.waiting), None)

    def condemn(self, step: int) -> tuple[int, ...]:
        """Drop the snapshots from ``step`` on, but for the oldest of all; return their steps."""
        kept = sum(snapshot.step < step for snapshot in self.certified) or 1
        condemned = self.certified[kept:]
        del self.certified[kept:]
        return tuple(snapshot.step for snapshot in condemned)

    def restart_from(self, restored: Snapshot) -> None:
        """Forget the snapshots that came after one that was restored."""
        self.certified = [snapshot for snapshot in self.certified if snapshot.step <= restored.step]
        self.waiting = [snapshot for snapshot in self.waiting if snapshot is restored]

    def _ripe(self, step: int) -> int:
        """Return how many of the waiting snapshots are old enough by ``step``."""
        return sum(snapshot.step + self.certify_after <= step for snapshot in self.waiting)

    def _most_crowded(self, step: int) -> int:
        """Return the index of the inner snapshot whose neighbours are closest for their age."""
        if len(self.certified) < 3:
            return 0
        steps = [snapshot.step for snapshot in self.certified]
        inner = range(1, len(steps) - 1)
        return min(inner, key=lambda i: (steps[i + 1] - steps[i - 1]) / (step + 1 - steps[i - 1]))
