"""The seven JEM scenarios of Appendix M.1, and the digits, by name.

The published trainer moves its chains by ``x += step_size * df/dx + noise_std * z``. The paper
names the step α = noise_std**2 and the output scale o = 2 step_size / noise_std**2 instead: its
α = 1e-4 and o = 20,000 are step_size 1 and noise_std 0.01 (Appendix M.2).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ..engine.run_config import below, counts, not_positive

DataName = Literal["digits", "mnist", "cifar10", "cifar100", "svhn"]
ScenarioName = Literal["digits", "1", "2", "3", "4", "5", "6", "7"]

ITERATIONS_PER_EPOCH = 703
"""45,000 training images in batches of 64, the incomplete last one dropped."""
EPOCHS = 200
DECAY_EPOCHS = (160, 180)


@dataclass(frozen=True)
class Scenario:
    """One training setup, by the names of the options of :class:`.config.JemConfig`.

    The defaults are the published trainer's own, with the warm-up of its documented command.

    Attributes:
        early_stride: a block halves the resolution in its first convolution.
        decay_at: updates from which on the learning rate is multiplied by ``decay_rate``, once for
            each.
        epochs: images come in shuffled epochs, as in the published trainer; otherwise each batch
            is drawn with replacement.
        eval_noise: ``data_noise`` of validation and test images, where the published trainer has
            it too.
    """

    depth: int = 28
    width: int = 10
    early_stride: bool = False
    iterations: int = EPOCHS * ITERATIONS_PER_EPOCH
    lr: float = 1e-4
    warmup: int = 1000
    decay_at: tuple[int, ...] = tuple(epoch * ITERATIONS_PER_EPOCH for epoch in DECAY_EPOCHS)
    decay_rate: float = 0.3
    n_pos: int = 64
    n_neg: int = 64
    n_labelled: int = 64
    epochs: bool = True
    sgld_steps: int = 20
    step_size: float = 1.0
    noise_std: float = 0.01
    buffer_size: int = 10_000
    reinit_rate: float = 0.05
    data_noise: float = 0.03
    eval_noise: float = 0.03
    train_images: int | None = None
    valid_images: int | None = None
    test_images: int | None = None
    eval_every: int = ITERATIONS_PER_EPOCH
    quality_samples: int = 10_000
    alert_context: int = 0
    alert_window: int = 0
    stop_after: int = 2 * ITERATIONS_PER_EPOCH
    """Two epochs, as the paper went on for analysis."""

    @property
    def output_scale(self) -> float | None:
        """The factor o for which the Langevin step is correct for exp(o f); None without noise."""
        return 2 * self.step_size / self.noise_std**2 if self.noise_std else None

    def lr_at(self, step: int) -> float:
        """Adam's learning rate for update ``step``."""
        if step < self.warmup:
            return self.lr * step / self.warmup
        return self.lr * self.decay_rate ** sum(step >= at for at in self.decay_at)

    def problems(self) -> list[str]:
        """Settings that cannot be meant: the name of each, its value and what was expected."""
        may_be_0 = "n_labelled warmup valid_images quality_samples alert_context alert_window"
        problems = below(self, **counts(self, stop_after=0, **dict.fromkeys(may_be_0.split(), 0)))
        problems += not_positive(self, "lr", "step_size")
        problems += not_positive(self, "noise_std", "data_noise", "eval_noise", or_0=True)
        if not 0 <= self.reinit_rate <= 1:
            problems.append(f"reinit_rate is {self.reinit_rate}, expected a share from 0 to 1")
        if self.depth < 10 or (self.depth - 4) % 6:
            problems.append(f"depth is {self.depth}, expected 6 n + 4: 10, 16, 22, 28, ...")
        return problems

    def to_json(self) -> dict[str, Any]:
        """The settings as plain JSON values."""
        return {**asdict(self), "decay_at": list(self.decay_at)}


DEFAULT = Scenario()

DIGITS = replace(
    DEFAULT,
    depth=10,
    width=1,
    early_stride=True,
    iterations=2000,
    lr=3e-3,
    warmup=0,
    decay_at=(),
    decay_rate=1.0,
    n_labelled=0,
    epochs=False,
    sgld_steps=5,
    buffer_size=2000,
    eval_noise=0.0,
    eval_every=50,
    quality_samples=0,
    alert_context=10,
    alert_window=40,
    stop_after=50,
)
"""Not in the paper: a JEM on 8x8 images that diverges within a minute on one CPU core."""

SCENARIOS: dict[str, Scenario] = {
    "digits": DIGITS,
    "1": DEFAULT,
    "2": replace(DEFAULT, sgld_steps=5),
    "3": replace(DEFAULT, n_neg=8),
    "4": replace(DEFAULT, step_size=2.0),  # o = 40,000
    "5": replace(DEFAULT, step_size=0.5),  # o = 10,000
    # α = 4e-4. The output scale falls by 4 so that the gradient's step stays what it was, and the
    # learning rate by 4 too.
    "6": replace(DEFAULT, noise_std=0.02, lr=DEFAULT.lr / 4),
    # α = 2.5e-5. Appendix M.1 prints 0.00025, but calls it a quarter of 0.0001, as Table 2 does.
    "7": replace(DEFAULT, noise_std=0.005, step_size=0.25),
}
"""Every scenario by its name: "1" to "7" of Appendix M.1, and "digits"."""
