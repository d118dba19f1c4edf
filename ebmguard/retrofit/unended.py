"""Notices parameters that move on while the optimizer that the guard was told takes no step.

Values are compared, not versions of tensors: an update through ``p.data``, or by a graph on a GPU,
leaves the version as it was. They are read on the host, so only where a step has more losses than
any before it: an ordinary loop pays nothing.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..ranks import local
from ..trainer import inner_optimizer

__all__ = ["ENDLESS", "Moves", "Unended"]

# Losses in one step, beyond any accumulation, wherever the parameters are.
ENDLESS = 1000

_log = logging.getLogger("ebmguard")

# Losses in a step beyond twice the most that one had, and new places, after which it is no
# accumulation of gradients, nor a perturbation of SAM.
_LOSSES, _MOVES = 4, 3
_ENTRIES = 16  # of each parameter


class Moves:
    """The places where some parameters have been, told by a few entries of each."""

    def __init__(self) -> None:
        self._places: list[Tensor] = []

    def see(self, parameters: Iterable[Tensor]) -> int:
        """How often they have moved on; back to 0 where they return, as SAM's perturbed ones do."""
        here = _place(parameters)
        known = [i for i, place in enumerate(self._places) if _is_same(place, here)]
        if not known:
            self._places.append(here)
        elif known[-1] < len(self._places) - 1:
            self._places = [here]
        return len(self._places) - 1


class Unended:
    """Watches the losses between two steps of the optimizer that was told.

    Attributes:
        is_stepping: whether it is inside its ``step``, which may call losses in a closure.
        is_found: whether it was found not to step; until it does.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.is_stepping = self.is_found = self._has_said = False
        self._optimizer = optimizer
        self._most = 1  # losses of a step that it has ended
        self._moves: Moves | None = None
        self._steps_instead: list[weakref.ref[Optimizer]] = []

    @property
    def steps_instead(self) -> Optimizer | None:
        """Another optimizer of the same parameters, which has stepped meanwhile."""
        return self._steps_instead[0]() if self._steps_instead else None

    def stepped(self, losses: int) -> None:
        """It has taken a step, which had so many losses."""
        if not self.is_found:
            self._most = max(self._most, losses)
        self.is_found, self._moves = False, None
        self._steps_instead.clear()

    def moved(self, losses: int, of_energy: Callable[[], Sequence[Tensor]]) -> bool | None:
        """Whether parameters have moved on in the step under way; None: nothing was looked at.

        Args:
            losses: how many the step has had.
            of_energy: parameters of the energy, whatever the optimizer trains.
        """
        if self.is_stepping or self.is_found or losses < _LOSSES + 2 * self._most:
            return None
        own = [p for group in self._optimizer.param_groups for p in group["params"]]
        of_optimizer, energys = ({id(p): p for p in x} for x in (own, of_energy()))
        if self._moves is None:
            self._moves = Moves()
            hook = self._instead(of_optimizer.keys() & energys.keys() or {*of_optimizer})
            weakref.finalize(self._moves, register_optimizer_step_post_hook(hook).remove)
        return self._moves.see((of_optimizer | energys).values()) >= _MOVES

    def text(self, losses: int, *, moved: bool) -> str:
        """What is wrong, and the line to write."""
        instead, inner = self.steps_instead, inner_optimizer(self._optimizer)
        what = "while parameters move"
        if not moved:
            what = "and parameters stay as they are (losses of an evaluation belong in g.paused())"
        elif instead is not None:
            what = f"while another one of its parameters, {_name(instead)}, has stepped"
        fix = "that (of a wrapper such as SAM, the inner one); where there is none, leave it out."
        if inner:
            fix = f"its inner one: g.attach(optimizer=optimizer.{inner})."
        elif instead is not None:
            fix = "that one wherever it is made: g.attach(optimizer=optimizer)."
        return (
            f"{losses} losses without a step of the attached optimizer, {_name(self._optimizer)}, "
            f"{what}. Attach the optimizer whose step() is called, {fix}"
        )

    def give_up(self, text: str, *, follows: bool) -> None:
        """Steps end without it until it takes one; said once."""
        self.is_found, self._moves = True, None
        if not self._has_said:
            self._has_said = True
            as_ever = "a step ends with the next sampler call, else the next loss"
            now = "the guard follows that one" if follows else as_ever
            _log.warning("%s From here on %s.", text, now)

    def _instead(self, parameters: set[int]) -> Callable[..., None]:
        """What keeps the optimizer that steps, and holds nothing of the guard."""
        found, told = self._steps_instead, id(self._optimizer)

        def after(optimizer: Optimizer, *_: Any) -> None:
            own = (id(p) for group in optimizer.param_groups for p in group["params"])
            if id(optimizer) != told and not parameters.isdisjoint(own):
                found[:] = [weakref.ref(optimizer)]

        return after


def _name(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__name__}(lr={optimizer.param_groups[0].get('lr', '?')})"


def _place(parameters: Iterable[Tensor]) -> Tensor:
    own = [local(p.detach()) for p in parameters]
    flat = [(torch.view_as_real(p) if p.is_complex() else p).flatten() for p in own if p.numel()]
    few = [p[:: -(-len(p) // _ENTRIES)].double() for p in flat if not p.is_meta]
    return torch.cat([p.to(few[0].device) for p in few]).cpu() if few else torch.empty(0)


def _is_same(place: Tensor, other: Tensor) -> bool:
    # Taking a perturbation off again rounds.
    near = place.shape == other.shape and torch.isclose(place, other, 1e-6, 1e-8, equal_nan=True)
    return bool(torch.as_tensor(near).all())
