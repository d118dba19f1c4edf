"""Settings of the JEM reference trainer: one frozen dataclass, which is also its command line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from ebmguard.errors import ConfigError

from ..run_config import RunConfig

COUNTS = (
    "iterations",
    "n_pos",
    "n_neg",
    "buffer_size",
    "eval_every",
    "checkpoint_every",
    "width",
)
COUNTS_OR_NONE = ("sgld_steps", "alert_context", "alert_window", "stop_after", "threads")


@dataclass(frozen=True)
class JemConfig(RunConfig):
    """Train a joint energy-based model: a classifier that is also an EBM, watched by the guard.

    The run folder gets config.json, metrics.jsonl and alerts.jsonl (the guard's), training.jsonl
    (the trainer's), TensorBoard events, results.json, figures/ and checkpoints/.
    """

    data: Literal["digits"] = "digits"
    """Data set. The digits are scikit-learn's 1,797 real 8x8 images and need no download."""
    beta_star: float = 2.0
    """Exponent of the guard's weights on raw outputs; 0 is the standard trainer."""
    depth: int = 10
    """Depth of the wide residual network, 6 n + 4."""
    width: int = 1
    """Its channel multiplier: stages of 16, 32 and 64 times the width."""
    iterations: int = 2000
    """Training steps."""
    n_pos: int = 64
    """Images per step."""
    n_neg: int = 64
    """Samples per step."""
    lr: float = 3e-3
    """Learning rate of Adam."""
    sgld_steps: int = 5
    """Langevin steps per training step."""
    step_size: float = 1.0
    """Factor of the gradient in a Langevin step."""
    noise_std: float = 0.01
    """Standard deviation of the noise in a Langevin step."""
    buffer_size: int = 2000
    """Chains in the replay buffer."""
    reinit_rate: float = 0.05
    """Share of the drawn chains that starts afresh."""
    data_noise: float = 0.03
    """Standard deviation of the noise added to the training images."""
    eval_every: int = 50
    """Steps between evaluations on the test images."""
    alert_context: int = 10
    """Steps before the first WARN and ERROR whose test accuracy is evaluated too. Costs that many
    copies of the network's parameters; 0 turns the close look at alerts off."""
    alert_window: int = 40
    """Steps after an alert that are evaluated one by one."""
    stop_after: int = 50
    """Steps that a diverged run goes on for."""
    checkpoint_every: int = 500
    """Steps between checkpoints; the last step and Ctrl-C write one too."""
    threads: int = 1
    """CPU threads of PyTorch: one is fastest for small networks, 0 is PyTorch's own choice."""

    words: ClassVar[tuple[str, ...]] = ("ebmguard", "train", "jem")
    shown: ClassVar[tuple[str, ...]] = ("out", "data", "beta_star", "seed", "iterations")

    def check(self) -> None:
        """Refuse settings that cannot be meant, all of them in one error.

        Raises:
            ConfigError: names every wrong setting, its value and what was expected.
        """
        problems = [
            f"{name} is {getattr(self, name)}, expected at least 1"
            for name in COUNTS
            if getattr(self, name) < 1
        ]
        problems += [
            f"{name} is {getattr(self, name)}, expected 0 or more"
            for name in COUNTS_OR_NONE
            if getattr(self, name) < 0
        ]
        for name in ("lr", "step_size"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                problems.append(f"{name} is {value}, expected a positive number")
        for name in ("noise_std", "data_noise"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                problems.append(f"{name} is {value}, expected a finite number, 0 or more")
        if not math.isfinite(self.beta_star):
            problems.append(f"beta_star is {self.beta_star}, expected a finite number, such as 2")
        if not 0 <= self.reinit_rate <= 1:
            problems.append(f"reinit_rate is {self.reinit_rate}, expected a share from 0 to 1")
        if self.depth < 10 or (self.depth - 4) % 6:
            problems.append(f"depth is {self.depth}, expected 6 n + 4: 10, 16, 22, 28, ...")
        if problems:
            raise ConfigError("the settings do not make a run:\n  " + "\n  ".join(problems))

    @property
    def output_scale(self) -> float | None:
        """The factor o for which the Langevin step is correct for exp(o f); None without noise."""
        if self.noise_std == 0:
            return None
        return 2 * self.step_size / self.noise_std**2
