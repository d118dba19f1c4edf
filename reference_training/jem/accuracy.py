"""Test accuracy, step by step around alerts: what had been lost when the guard spoke."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn


class AccuracyWatch:
    """Evaluates at every step around what :meth:`look_at` points to.

    An evaluation costs a good part of a training step, so it cannot be had at each step; copies of
    the parameters of the last `context` steps make the steps *before* an alert known as well.

    Args:
        network: in training.
        measure: its test accuracy as it is.
        results: accuracy by step, which is filled in.
        context: steps before an event that are evaluated too.
        window: steps after it.
    """

    def __init__(
        self,
        network: nn.Module,
        measure: Callable[[], float],
        results: dict[int, float],
        context: int,
        window: int,
    ) -> None:
        self.network = network
        self.measure = measure
        self.window = window
        self.results = results
        self._past: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=context)
        self._watched_until = -1

    def before_step(self, step: int) -> list[int]:
        """Evaluate what `step` starts with, if watched and not known yet; its number, or none."""
        if self._past.maxlen:
            self._past.append((step, _copy(self.network)))
        if step > self._watched_until or step in self.results:
            return []
        self.results[step] = self.measure()
        return [step]

    def look_at(self, step: int) -> list[int]:
        """Evaluate the remembered steps before the current one, and watch those after `step`.

        Call it between the optimizer's update and the next :meth:`before_step`. It returns the
        steps that were evaluated now, ascending.
        """
        self._watched_until = max(self._watched_until, step + self.window)
        missing = [(past, state) for past, state in self._past if past not in self.results]
        now = _copy(self.network)
        for past, state in missing:
            self.network.load_state_dict(state)
            self.results[past] = self.measure()
        self.network.load_state_dict(now)
        return [past for past, _ in missing]

    def forget(self, step: int) -> None:
        """The run goes back to `step`: nothing is watched, and later copies are of no use."""
        self._past = deque((pair for pair in self._past if pair[0] < step), self._past.maxlen)
        self._watched_until = -1

    def state_dict(self) -> dict[str, Any]:
        """The copies and what is being watched; the results belong to the caller."""
        return {"past": list(self._past), "watched_until": self._watched_until}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state."""
        self._past = deque(map(tuple, state["past"]), self._past.maxlen)
        self._watched_until = state["watched_until"]


def _copy(network: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in network.state_dict().items()}
