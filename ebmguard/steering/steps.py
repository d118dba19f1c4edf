"""How many SGLD steps the sampler should run: more while no negative is competitive.

Appendix H: where GradScale is near 0, "proactive measures should be taken. This involves adjusting
the procedure for generating negative examples". The additional steps are finer ones. A sampler gets
lost where its step has become too long for the energy, and more such steps change nothing. In r
steps of a step size divided by r, and noise_std by the root of r, the same diffusion runs for the
same time and with the same output scale, 2 step_size / noise_std**2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import ConfigError, check_keys, typed, undamaged
from ..tags import BETA_STAR, GRAD_SCALE, weight_tag

__all__ = ["AdaptiveSteps", "StepsController"]


@typed
@dataclass(frozen=True)
class AdaptiveSteps:
    """Settings of the adaptive number of SGLD steps; all default values are those measured.

    The number is base * 2**level, and 2**level the refinement by which each step is finer. It is
    doubled after ``rise_after`` rows in a row under ``floor``, and halved after ``fall_after`` rows
    over ``clear``. A halving that had to be taken back was too early: each one doubles the patience
    of the next, so that the number settles. Rising has to be quick: an energy that is trained on
    with each level grows as steep as that level just bears (``docs/results/steering.md``). Powers
    of two keep the CUDA graphs of a captured sampler few.

    What it reads is ``grad_scale``, and ``ref/grad_scale`` where β* = 0, whose weights say nothing.
    At a negative β* nothing changes: a low GradScale there means negatives that are too likely.

    Attributes:
        most: largest multiple of the base number of steps; a power of two.
        floor: GradScale under which more steps are run.
        clear: GradScale over which the sampler counts as healthy. Its value for a sampler that is
            right is M/(M+1) for M negatives: for fewer than 10, lower both by that factor.
        rise_after: rows in a row under the floor that double the number.
        fall_after: rows over ``clear`` since the last change that halve it.
        longest: rows to which the patience may grow.
        give_up_after: rows under the floor with the most steps, after which the base is run again,
            until a row over ``clear``: what has not helped by then is not paid for any longer. Such
            a run needs a rollback.

    Raises:
        ConfigError: names a setting out of range and what was expected.
    """

    most: int = 16
    floor: float = 0.8
    clear: float = 0.9
    rise_after: int = 1
    fall_after: int = 100
    longest: int = 10_000
    give_up_after: int = 100

    def __post_init__(self) -> None:
        for name in ("most", "rise_after", "fall_after", "longest", "give_up_after"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"AdaptiveSteps: {name}={value!r}; expected a whole number >= 1.")
        if self.most & (self.most - 1):
            raise ConfigError(f"AdaptiveSteps: most={self.most}; expected a power of two.")
        if not 0 < self.floor <= self.clear < 1:
            raise ConfigError(
                f"AdaptiveSteps: floor={self.floor!r} and clear={self.clear!r}; expected "
                "0 < floor <= clear < 1, as GradScale lies between 0 and 1."
            )
        if self.longest < self.fall_after:
            raise ConfigError(
                f"AdaptiveSteps: longest={self.longest} is less than fall_after={self.fall_after}."
            )

    @typed
    def start(self, base: int) -> StepsController:
        """A controller at the base number of steps.

        Raises:
            ConfigError: a base that is no whole number of 1 or more.
        """
        if base < 1:
            raise ConfigError(
                f"AdaptiveSteps: the base number of steps is {base!r}; expected a whole number of "
                "1 or more (sgld_steps= of attach)."
            )
        return StepsController(self, base)


@typed
@dataclass
class _State:
    """What the decision on the next row rests on, all of it saved."""

    level: int = 0  # the number of steps is base * 2**level
    low: int = 0  # rows under the floor since the last doubling or row over it
    healthy: int = 0  # rows over ``clear`` since the last halving or row under the floor
    patience: int = 0  # healthy rows that the next halving waits for; 0 for ``fall_after``
    since_fall: int | None = None  # rows since the last halving, until it has proved right
    in_vain: int = 0  # rows under the floor with the most steps; nothing rises after give_up_after
    rows: int = 0
    factors: int = 0  # sum of 2**level over all rows


class StepsController:
    """The adaptive number of steps of one run.

    Attributes:
        settings: what it was started with.
        base: the number of steps that the trainer would run; recovery may change it.
    """

    def __init__(self, settings: AdaptiveSteps, base: int) -> None:
        self.settings = settings
        self.base = base
        self._state = _State()

    def observe(self, row: Mapping[str, float]) -> None:
        """Take one judged row; one in which GradScale is unknown only counts as spent."""
        settings, state = self.settings, self._state
        state.rows += 1
        state.factors += self.factor
        beta_star = row.get(BETA_STAR, 1.0)
        scale = row.get(weight_tag(GRAD_SCALE, beta_star), math.nan)
        if not math.isfinite(scale) or not beta_star >= 0:
            return
        if state.since_fall is not None:
            # A halving has proved right once it has lasted as long as it had been waited for.
            proved = state.since_fall >= (state.patience or settings.fall_after)
            state.since_fall = None if proved else state.since_fall + 1
        if scale >= settings.floor:
            state.low = 0
            if scale > settings.clear:
                state.healthy, state.in_vain = state.healthy + 1, 0
                if state.level and state.healthy >= (state.patience or settings.fall_after):
                    state.level, state.healthy, state.since_fall = state.level - 1, 0, 0
            return
        state.low, state.healthy = state.low + 1, 0
        if self.factor >= settings.most:
            state.in_vain += 1
            if state.in_vain >= settings.give_up_after:
                state.level, state.low, state.since_fall = 0, 0, None
        elif state.low >= settings.rise_after and state.in_vain < settings.give_up_after:
            state.patience = state.patience or settings.fall_after
            if state.since_fall is not None:
                state.patience = min(2 * state.patience, settings.longest)
            state.level, state.low, state.since_fall = state.level + 1, 0, None

    @property
    def factor(self) -> int:
        """By how much the base is multiplied, and each step to be finer: a power of two."""
        return int(2**self._state.level)

    @property
    def value(self) -> int:
        """SGLD steps to run now, between base and base * most."""
        return self.base * self.factor

    @property
    def extra_compute(self) -> float:
        """All steps so far over those that the base would have taken; 1 where none was added."""
        return self._state.factors / self._state.rows if self._state.rows else 1.0

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON-able data."""
        return asdict(self._state)

    @undamaged("AdaptiveSteps")
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ConfigError: not such a state, or one beyond this controller's ``most``.
        """
        check_keys("a state of AdaptiveSteps", state, self.state_dict())
        loaded = _State(**state)
        if not 1 <= 2**loaded.level <= self.settings.most:
            raise ConfigError(
                f"The state of AdaptiveSteps runs {2**loaded.level} times the base number of "
                f"steps, but most={self.settings.most}; start the run with the settings of the "
                "saved one."
            )
        self._state = loaded
