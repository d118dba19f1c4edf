"""Training steps of the trainers on :mod:`tests.gpu_on_meta`: what waits, what is launched."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

from torch import Tensor

from ebmguard.alerts import Alert, Judge, Level
from ebmguard.reference_training.engine.progress import Reporter
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.train import train as train_jem
from ebmguard.reference_training.shortrun.config import ShortRunConfig
from ebmguard.reference_training.shortrun.train import train as train_shortrun
from ebmguard.reference_training.toy.config import ToyConfig
from ebmguard.reference_training.toy.train import train as train_toy
from ebmguard.retrofit import rows
from tests.gpu_on_meta import META, MetaGpu, gpu_on_meta

SLOW_EVERY = 3
"""Steps from one slow tier to the next; it is 50 in earnest."""
FIRST, LAST = 2 * SLOW_EVERY, 3 * SLOW_EVERY + 1
"""Good steps, from the first to before the last: graphs are captured, the sampler measured."""
NEVER = 10**6
_TRAINERS: dict[str, tuple[type, Callable[..., object], dict[str, Any]]] = {
    "jem": (
        JemConfig,
        train_jem,
        {
            "data": "digits",
            "n_pos": 8,
            "n_neg": 6,
            "sgld_steps": 3,
            "buffer_size": 30,
            "test_images": 20,
            "eval_every": NEVER,
            "alert_context": 0,
            "alert_window": 0,
        },
    ),
    "shortrun": (
        ShortRunConfig,
        train_shortrun,
        {"data": "digits", "nf": 4, "batch": 8, "sgld_steps": 3, "sample_every": NEVER},
    ),
    "toy": (ToyConfig, train_toy, {"betas": ("0", "0.5"), "seeds": 2, "evaluations": 1}),
}
XY: dict[str, Any] = {"p_x_weight": 0.0, "p_x_y_weight": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "jem": {},
    "jem beta* 0": {"beta_star": 0.0},
    "jem class-conditional": {"class_conditional": True},
    "jem p(x, y)": XY,
    "jem p(x) and p(x, y)": {"p_x_y_weight": 1.0},
    "jem clip": {"clip_norm": 1.0},
    "jem L2": {"energy_l2": 0.1},
    "jem most_steps": {"most_steps": 4},
    "jem rollback": {"action": "rollback"},
    "jem raise": {"action": "raise"},
    "jem bfloat16": {"precision": "bfloat16"},
    "jem classifier": {"p_x_weight": 0.0},
    "shortrun": {},
    "shortrun random K": {"most_sgld_steps": 6},
    "shortrun persistent": {"init": "persistent", "buffer_size": 30},
    "shortrun bfloat16": {"precision": "bfloat16"},
    "toy": {},
    "toy all variants": {"variants": ("default", "no_pos", "batch", "true")},
    "toy average": {"betas": ("0.1+0.5",)},
    "toy proposal": {"scenario": "gmm-proposal"},
    "toy two samplers": {"scenario": "gmm-good+lost"},
}
"""By name, whose first word is the trainer's: the settings that differ from its own."""


@dataclass
class Steps:
    """What was found in the steps of a run.

    Attributes:
        wrong: as in :class:`~tests.gpu_on_meta.MetaGpu`.
        waits, launches: of each step, from the first one on, by place and by file.
        captured: kernels in graphs, by operation.
    """

    wrong: Counter[str]
    waits: list[Counter[str]] = field(default_factory=list)
    launches: list[Counter[str]] = field(default_factory=list)
    captured: Counter[str] = field(default_factory=Counter)

    @property
    def usual(self) -> Counter[str]:
        """Launches of the dearest good step without the slow tier."""
        own = [x for i, x in enumerate(self.launches) if i >= FIRST and i % SLOW_EVERY]
        return max(own, key=Counter.total)

    @property
    def slow(self) -> Counter[str]:
        """Launches of a good step with the slow tier."""
        return self.launches[FIRST]

    @property
    def good_waits(self) -> Counter[str]:
        """Waits of all good steps."""
        return sum(self.waits[FIRST:], Counter())


def of_guard(launches: Mapping[str, int]) -> int:
    """Those that the guard's own files have asked for; samplers are the trainer's."""
    own = {x: n for x, n in launches.items() if x.startswith("ebmguard/")}
    return sum(n for x, n in own.items() if not x.startswith("ebmguard/samplers/"))


class _Writer(MagicMock):
    """TensorBoard's writer, which itself takes images of `meta` for none."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def add_images(self, tag: str, images: Tensor, step: int) -> None:
        """Bring them to the host."""
        images.cpu()


class _Enough(Exception):
    """The steps that were asked for are over."""


class _Reporter(Reporter):  # type: ignore[misc]
    def __init__(self, gpu: MetaGpu, steps: Steps, last: int) -> None:
        self._gpu, self._steps, self._last = gpu, steps, last
        self._launches, self._waits = Counter[str](), Counter[str]()

    def step(self, done: int, state: Mapping[str, float | str]) -> None:
        """A step is over."""
        gpu, steps = self._gpu, self._steps
        steps.launches.append(gpu.launches - self._launches)
        steps.waits.append(gpu.waits - self._waits)
        self._launches, self._waits = Counter(gpu.launches), Counter(gpu.waits)
        gpu.step += 1
        if gpu.step == self._last:
            raise _Enough


@contextmanager
def _judged(alerts: Mapping[int, Level]) -> Iterator[None]:
    """The rules say this, and nothing else: what they would say of made-up numbers is no matter."""
    waiting = dict(alerts)

    def observe(_: Judge, step: int, *__: object) -> list[Alert]:
        level = waiting.pop(step, None)
        what = ("nonfinite", level, step, "nonfinite/f_neg") if level is not None else None
        return [] if what is None else [Alert(*what, value=1.0, limit=0.0, window=0)]

    with patch.object(Judge, "observe", observe):
        yield


def steps_of(name: str, alerts: Mapping[int, Level] | None = None, **more: Any) -> Steps:
    """Train the case of that name for a few steps.

    Args:
        name: one of :data:`CASES`.
        alerts: by step, what the rules say of its row.
        more: further settings.
    """
    kind, train, small = _TRAINERS[name.split()[0]]
    settings = {"iterations": NEVER, "checkpoint_every": NEVER, "threads": 0, "seed": 0}
    with ExitStack() as stack:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        config, folder, *_ = kind(
            out=out, device=str(META), **{**settings, **small, **CASES[name], **more}
        ).open()
        stack.enter_context(_judged(alerts or {}))
        stack.enter_context(patch("torch.utils.tensorboard.SummaryWriter", _Writer))
        stack.enter_context(patch.object(rows, "_SLOW_EVERY", SLOW_EVERY))
        gpu = stack.enter_context(gpu_on_meta())
        found = Steps(gpu.wrong)
        with suppress(_Enough):
            train(config, folder, _Reporter(gpu, found, LAST))
        found.captured = gpu.captured
    return found
