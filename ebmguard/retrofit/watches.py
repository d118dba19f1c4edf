"""Find samples that no loss uses, losses that train nothing, and steps that never end.

If parameters change while the attached optimizer takes no step, their values show it. Tensor
versions do not: an update through ``p.data``, or by a CUDA graph, leaves the version as it was.
Reading values needs the host, so it happens only if a step has more losses than any before it: an
ordinary loop pays nothing.
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

from ..errors import ConfigError
from ..sampling import Tempering
from ..trainer import inner_optimizer, leaves, optimizers_of
from .strength import Settings

__all__ = ["UnendedSteps", "UntrainedLosses", "UnusedSamples"]

_log = logging.getLogger("ebmguard")

# Steps without a guarded loss after which something is wrong; plots need fewer sampler calls.
_STEPS = 10
_NEVER = (
    "The guarded sampler was called %d times, but the guarded loss never: tempered samples then "
    "train an unguarded loss. Use the loss that guard() returned, and draw plots inside "
    "`with g.paused():`."
)
_EVALUATION = (
    "The guarded sampler was called %s before. If this is an evaluation or a picture, its samples "
    "are those of the tempered energy: call `sampler.original` there, or put it inside `with "
    "g.paused():`."
)
_MORE = 2  # times the samples of any training step's call


class UnusedSamples:
    """Counts sampler calls until a loss comes, knows those of training steps, and warns once."""

    def __init__(self) -> None:
        self._calls = self._samples = 0  # since the latest loss; the most of a call
        self._most = self._most_samples = 0  # before any loss; 0 until the first one
        # Of calls: whether the network was in training, gradients enabled, the number of steps set.
        self._ways, self._known = set[tuple[bool, ...]](), set[tuple[bool, ...]]()
        self._steps = 0  # before the first loss
        self._moves = ParameterHistory()
        self._has_warned = False

    def loss(self) -> None:
        """Record a call of a guarded loss."""
        self._most, self._calls = max(self._most, self._calls), 0
        self._most_samples, self._samples = max(self._most_samples, self._samples), 0
        self._known |= self._ways
        self._ways.clear()

    def sample(
        self, tempering: Tempering | None, result: object, *, sets: bool, acts: bool, tempers: bool
    ) -> None:
        """Record a sampler call, tempered by this factor if its module is known.

        ``sets``: whether the caller gave it another number of steps than the usual one;
        ``acts``: whether the guard changes the loss of this step; ``tempers``: this call.
        """
        is_training = tempering is not None and tempering.module.training
        way = is_training, torch.is_grad_enabled(), sets
        count = 0
        for x in leaves(result):
            if isinstance(x, Tensor) and x.ndim:
                count = max(count, x.size(0))
        self._ways.add(way)
        self._calls, self._samples = self._calls + 1, max(self._samples, count)
        message = how = ""
        if self._most:
            if self._calls > self._most:
                how = f"{self._calls} times since the last guarded loss, against {self._most}"
            elif way not in self._known:
                how = "in evaluation mode, without gradients or for other steps, unlike"
            elif count > _MORE * self._most_samples:
                how = f"for {count} samples, against {self._most_samples}"
            message = _EVALUATION % how if how and tempers else ""
        else:
            if self._steps < _STEPS:
                # A step may need a hundred calls (of Metropolis steps, say), but moves parameters.
                weights = None if tempering is None else tempering.module.parameters()
                self._steps = 1 + (self._steps if weights is None else self._moves.see(weights))
            if acts and self._steps >= _STEPS:
                message = _NEVER % self._calls
        if message and not self._has_warned:
            self._has_warned = True
            _log.warning("%s", message)


# Losses that are looked at, and moves of the parameters among them that no validation makes.
_LOOKS, _LOOKED_MOVES = 20, 10
_NO_GRADIENT = (
    "The guarded loss was called only where gradients are disabled, while parameters move: such "
    "losses are taken for a validation's, and nothing is recorded. Call it where gradients are "
    "enabled; to log energies that need none, inside `with torch.enable_grad():`."
)


class UntrainedLosses:
    """Knows the losses that cannot train, and warns once if there are no others."""

    def __init__(self) -> None:
        self.has_trained = False  # whether a loss had a gradient
        self._left = _LOOKS
        self._moves = ParameterHistory()

    def watch(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        """Look at what moves, after a loss that cannot train while none has been recorded."""
        if not self._left:
            return
        self._left -= 1
        if self._moves.see(parameters()) >= _LOOKED_MOVES:
            self._left = 0
            _log.warning(_NO_GRADIENT)


# Losses in one step, beyond any accumulation, wherever the parameters are.
_ENDLESS = 1000

# A step with so many losses beyond twice the most that one had, and so many new places, is no
# accumulation of gradients, nor a perturbation of SAM.
_LOSSES, _MOVES = 4, 3
_ENTRIES = 16  # of a parameter


class ParameterHistory:
    """The past values of some parameters, identified by a few of their entries."""

    def __init__(self) -> None:
        self._places: list[Tensor] = []

    def see(self, parameters: Iterable[Tensor]) -> int:
        """Return how often they have moved; 0 again if they return, as SAM's perturbations do."""
        here = _place(parameters)
        # Taking a perturbation off again rounds.
        same = [
            x.shape == here.shape and torch.isclose(x, here, 1e-6, 1e-8, equal_nan=True).all()
            for x in self._places
        ]
        known = [i for i, is_same in enumerate(same) if is_same]
        if not known:
            self._places.append(here)
        elif known[-1] < len(self._places) - 1:
            self._places = [here]
        return len(self._places) - 1


class UnendedSteps:
    """Watches the losses between two steps of the attached optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.is_stepping = False  # inside its ``step``, which may call losses in a closure
        self.is_found = False  # whether it was caught not stepping; until it steps
        self._has_warned = False
        self._optimizer = optimizer
        self._most = 1  # losses of a step that it has ended
        self._moves: ParameterHistory | None = None
        self._steps_instead: list[weakref.ref[Optimizer]] = []

    def stepped(self, losses: int) -> None:
        """Record that it has taken a step with so many losses."""
        if not self.is_found:
            self._most = max(self._most, losses)
        self.is_found = False
        self.forget()

    def forget(self) -> None:
        """Stop watching other optimizers."""
        self._moves = None
        self._steps_instead.clear()

    def check(
        self,
        losses: int,
        energy_parameters: Callable[[], Sequence[Tensor]],
        settings: Settings,
        is_off: Callable[[], bool],
    ) -> Optimizer | None:
        """Find out, before a loss of a step with so many losses, if the optimizer never steps.

        From then on steps end without it. Returns the optimizer that steps, if the guard can follow
        it. Raises a ConfigError if an action waits for steps, unless the loss is the caller's own.
        """
        if self.is_stepping or self.is_found or losses < _LOSSES + 2 * self._most:
            return None
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        optimized, energy = ({id(p): p for p in x} for x in (parameters, energy_parameters()))
        if self._moves is None:
            self._moves = ParameterHistory()
            parameter_ids = optimized.keys() & energy.keys() or {*optimized}
            others, attached_ids = self._steps_instead, {*map(id, optimizers_of(self._optimizer))}

            def after(optimizer: Optimizer, *_: Any) -> None:
                """Keep the optimizer that steps; this holds nothing of the guard."""
                updated = (id(p) for group in optimizer.param_groups for p in group["params"])
                if id(optimizer) not in attached_ids and not parameter_ids.isdisjoint(updated):
                    others[:] = [weakref.ref(optimizer)]

            weakref.finalize(self._moves, register_optimizer_step_post_hook(after).remove)
        moved = self._moves.see((optimized | energy).values()) >= _MOVES
        moved = any(settings.ranks.from_all(moved))  # ranks may hold different parts of them
        if not moved and losses < _ENDLESS:
            return None
        instead = self._steps_instead[0]() if self._steps_instead else None
        inner, what = inner_optimizer(self._optimizer), "while parameters move"
        fix = "that (of a wrapper such as SAM, the inner one); where there is none, leave it out."
        if instead is not None:
            what = f"while another one of its parameters, {_name(instead)}, has stepped"
            fix = "that one wherever it is made: g.attach(optimizer=optimizer)."
        if not moved:
            what = "and parameters stay as they are (losses of an evaluation belong in g.paused())"
        if inner:
            fix = f"its inner one: g.attach(optimizer=optimizer.{inner})."
        text = (
            f"{losses} losses without a step of the attached optimizer, {_name(self._optimizer)}, "
            f"{what}. Attach the optimizer whose step() is called, {fix}"
        )
        action = settings.action
        if action in ("raise", "rollback") and moved and not is_off():
            raise ConfigError(f"{text} Else action={action!r} has no step to act on.")
        follows = action != "rollback" and instead is not None
        self.is_found, self._moves = True, None
        if not self._has_warned:
            self._has_warned = True
            as_ever = "a step ends with the next sampler call, else the next loss"
            now = "the guard follows that one" if follows else as_ever
            _log.warning("%s From here on %s.", text, now)
        return instead if follows else None


def _name(optimizer: Any) -> str:
    return " and ".join(
        f"{type(x).__name__}(lr={x.param_groups[0].get('lr', '?')})"
        for x in optimizers_of(optimizer)
    )


def _place(parameters: Iterable[Tensor]) -> Tensor:
    values = [p.detach() for p in parameters]
    flat = [(torch.view_as_real(p) if p.is_complex() else p).flatten() for p in values if p.numel()]
    few = [p[:: -(-len(p) // _ENTRIES)].cpu().double() for p in flat if not p.is_meta]
    return torch.cat(few) if few else torch.empty(0, device="cpu")
