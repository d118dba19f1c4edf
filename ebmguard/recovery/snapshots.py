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
from ..trainer import Trainer, parts_of
from .archive import described, difference, digest_of
from .changes import random_state, restore_random_state

__all__ = [
    "CONSTANT",
    "Snapshot",
    "Snapshots",
    "capture",
    "check_complete",
    "check_fits",
    "generators_of",
    "restore",
    "restore_late",
    "structure_of",
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
    """Copy everything that a step changes to the host; what is given beside it."""
    parts = {
        name: part if _is_plain(name, part) else part.state_dict()
        for name, part in _attached(trainer).items()
    }
    return {
        **{name: copied(part) for name, part in parts.items()},
        "others": copied(_others(trainer)),
        "places": {name: places_of(part) for name, part in parts.items()},
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
        saved, own, found = state[name], part, difference(state["kinds"][name], _kind(name, part))
        if isinstance(part, nn.Module | Tensor):
            own = part.state_dict() if isinstance(part, nn.Module) else part
            found = found or difference(described(saved), described(own))
        if found:
            raise ConfigError(
                f"The snapshot is of another {name}: {found}. Build the run as it was, or begin "
                "another one in a folder of its own."
            )
        for key, x in saved.items() if isinstance(part, nn.Module) else ():
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.itemsize == 1:
                continue
            # What is infinite from the start, as a mask is, may be.
            if (~x.isfinite() & own[key].isfinite().cpu()).any():
                raise ConfigError(f"The snapshot's {name} has a {key} that is not finite.")


def _kind(name: str, part: Any) -> dict[str, str]:
    """In words, what loading a state does not hold against a part of another kind."""
    if name == "optimizer":
        shapes = described({"groups": [group["params"] for group in part.param_groups]})
        return {"it": " and ".join(type(x).__name__ for x in parts_of(part)), **shapes}
    is_known = name == "scheduler" or _is_plain(name, part)
    return {"it": type(part).__name__} if is_known else {}


def structure_of(trainer: Trainer) -> dict[str, Any]:
    """What loading a state is held to, in numbers that cost microseconds."""
    found: dict[str, Any] = {"generators": len(generators_of(trainer))}
    for name, part in _attached(trainer).items():
        own = found[name] = [type(part)]
        own += [part.shape] if isinstance(part, Tensor) else []
        own += [len(x["params"]) for x in part.param_groups] if name == "optimizer" else []
        for each in part.modules() if isinstance(part, nn.Module) else ():
            own += each._parameters
            own += [key if x is None else (key, x.shape) for key, x in each._buffers.items()]
    return found


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
        # Whoever else loads a state may keep the very objects that it is given, as optimizers do,
        # and expect them where they were.
        kept = fresh(state[name], places)
        if not _is_plain(name, part):
            part.load_state_dict(kept)
        elif isinstance(part, Tensor):
            part.copy_(kept)
        elif [x.shape for x in part] == [x.shape for x in kept]:
            for own, before in zip(part, kept, strict=True):
                own.copy_(before)
        else:  # it has grown since
            part[:] = kept
    for other, before in zip(_others(trainer), state.get("others", ()), strict=False):
        other.copy_(before)
    if "random" in state:
        restore_random_state(state["random"], generators_of(trainer))


def _others(trainer: Trainer) -> list[Tensor]:
    """Parameters that the optimizer trains beside the model's, such as a generator's."""
    groups = [] if trainer.optimizer is None else trainer.optimizer.param_groups
    own = set() if trainer.model is None else {*map(id, trainer.model.parameters())}
    return [p for group in groups for p in group["params"] if id(p) not in own]


def restore_late(
    trainer: Trainer, then: Mapping[str, Any], now: Mapping[str, Any]
) -> Collection[str]:
    """Put back the parts that are another ``now`` than ``then``, where the same step began.

    What a loop does before it samples had been done there, and is not done twice.
    """
    late = {k: x for k, x in then.items() if k in now and digest_of(x) != digest_of(now[k])}
    others, own = [*late], {} if trainer.model is None else trainer.model.state_dict()
    for key, x in late.pop("model", {}).items():  # whose parameters may be in a graph already
        if isinstance(x, Tensor) and digest_of(x) != digest_of(now["model"][key]):
            own[key].data.copy_(x)
    restore(trainer, {"places": now["places"], **late})
    return others


def _is_plain(name: str, part: object) -> bool:
    """Whether a part is its own state: a buffer of tensors. Schedulers in a list have a state."""
    return name == "buffer" and isinstance(part, Tensor | list)


def _attached(trainer: Trainer) -> dict[str, Any]:
    return {name: part for name in _PARTS if (part := getattr(trainer, name)) is not None}


def generators_of(trainer: Trainer) -> Sequence[torch.Generator]:
    """The generators that were attached, and the buffer's own."""
    own = getattr(trainer.buffer, "generator", None)
    if isinstance(own, torch.Generator) and own not in trainer.generators:
        return (*trainer.generators, own)
    return trainer.generators


def copied(tree: Any) -> Any:
    """A copy with every tensor on the host; of a GPU's it is complete when the stream is so far."""

    def kept(x: Any) -> Any:
        if not isinstance(x, Tensor):
            try:
                return copy.deepcopy(x)  # plain values too are the trainer's own objects
            except TypeError as error:
                raise ConfigError(f"A snapshot cannot hold {x!r}: {error}.") from error
        x = x.detach()
        # PyTorch uses the pinned memory of dropped copies again.
        host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
        return host.copy_(x, non_blocking=x.is_cuda)

    return tree_map(kept, tree)


def places_of(tree: Any) -> list[str]:
    """Where the tensors of a tree belong, in the order of its leaves."""
    return [str(x.device) for x in tree_leaves(tree) if isinstance(x, Tensor)]


def fresh(tree: Any, places: Sequence[str] = ()) -> Any:
    """A copy of what :func:`copied` returned, its tensors where :func:`places_of` says."""
    remaining = iter(places)

    def put(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return copy.deepcopy(x)
        return x.to(_existing(next(remaining, "cpu")), copy=True)

    return tree_map(put, tree)


def _existing(device: str) -> torch.device:
    found = torch.device(device)
    lacks = found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count()
    return torch.device("cpu") if lacks else found


@dataclass(eq=False)  # its tensors have no single truth value
class Snapshot:
    """A run's whole state before a step, as :func:`capture` returned it."""

    step: int
    state: dict[str, Any]
    settled: bool = True  # GradScale was healthy before it
    # By what f told samples apart before it; of a certified one, the most that the run had so far.
    spread: float = 0.0


@dataclass(eq=False)
class Snapshots:
    """``keep`` certified ones, whose ages grow by factors, and those that ``certify_after`` quiet
    steps make so; the oldest first."""

    keep: int
    certify_after: int
    certified: list[Snapshot] = field(default_factory=list)
    waiting: list[Snapshot] = field(default_factory=list)

    def disquiet(self, quiet_until: int) -> None:
        """Drop what was taken less than ``certify_after`` steps before an alert's step."""
        # The first one stays as the last resort: there is nothing deeper.
        del self.waiting[self._ripe(quiet_until) or int(not self.certified) :]

    def certify(self, step: int, health: Health = lambda _: (True, math.inf)) -> list[Snapshot]:
        """Certify what has been quiet for long enough by ``step``; return the new ones.

        Those are dropped before which, or after which (``health`` of the last so many steps),
        GradScale was too low or f had become a constant by the measure of the run.
        """
        if not (count := self._ripe(step)):
            return []
        (settled, spread), most, ripe = health(self.certify_after), self.spread, list[Snapshot]()
        for each in self.waiting[:count]:
            if settled and each.settled and min(each.spread, spread) >= CONSTANT * most:
                each.spread = most = max(each.spread, most)
                ripe.append(each)
        # The first one stays as the last resort here too.
        del self.waiting[int(not (ripe or self.certified)) : count]
        for each in ripe:
            self.certified.append(each)
            if len(self.certified) > self.keep:
                del self.certified[self._superfluous(step)]
        return ripe

    @property
    def spread(self) -> float:
        """The largest that a certified one had; 0 where none is known."""
        return self.certified[-1].spread if self.certified else 0.0

    def best(self) -> Snapshot | None:
        """The newest certified one; without any, the oldest that there is."""
        return self.certified[-1] if self.certified else next(iter(self.waiting), None)

    def condemn(self, step: int) -> tuple[int, ...]:
        """Drop the snapshots from ``step`` on, but for the oldest of all; return their steps."""
        kept = sum(each.step < step for each in self.certified) or 1
        condemned = self.certified[kept:]
        del self.certified[kept:]
        return tuple(each.step for each in condemned)

    def restart_from(self, snapshot: Snapshot) -> None:
        """Forget what came after a snapshot that was restored."""
        self.certified = [each for each in self.certified if each.step <= snapshot.step]
        self.waiting = [each for each in self.waiting if each is snapshot]

    def _ripe(self, step: int) -> int:
        """How many of the waiting ones, the oldest, are old enough by ``step``."""
        return sum(each.step + self.certify_after <= step for each in self.waiting)

    def _superfluous(self, step: int) -> int:
        """Of the inner ones, that whose neighbours are nearest to each other for their age."""
        if len(self.certified) < 3:
            return 0
        steps = [each.step for each in self.certified]
        inner = range(1, len(steps) - 1)
        return min(inner, key=lambda i: (steps[i + 1] - steps[i - 1]) / (step + 1 - steps[i - 1]))
