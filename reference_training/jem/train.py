"""A JEM run: its training, its evaluations, and what is kept of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ebmguard.alerts import Alert

from ..device import set_precision
from ..engine import loop
from ..engine.record import Record
from ..engine.task import Part, Task
from ..judge.classification import accuracy_of, classification
from ..judge.features import load_features
from ..judge.quality import SampleQuality
from ..judge.stored import BEST
from ..networks import evaluation_mode
from .config import JemConfig
from .course import Course, Kept, why_lost
from .samples import SHOWN, KeptSamples
from .trainer import Trainer, make_network

HEALTHY_SHARE = 0.9
"""Samples count as healthy while the accuracy is at least this share of the best so far."""


class Jem(Task):
    """Classifier and EBM in one network, evaluated as it trains.

    The guard's row of each step has its `cross_entropy` too and, where f(x, y) is trained, that
    gap, and where the network is evaluated what was found. evaluations.jsonl has a line for each
    evaluation, accuracy.jsonl one wherever the test accuracy is known. An evaluation leaves no
    trace in the network or in PyTorch's global random numbers: a run takes the same course however
    often it is evaluated.
    """

    def __init__(self, config: JemConfig, record: Record) -> None:
        settings = config.settings
        set_precision(config.precision)
        data = config.load_data().to(record.device)
        self.title = f"beta* = {config.beta_star:g}"
        self.stop_after = settings.stop_after
        self.config = config
        self.settings = settings
        self.record = record
        self.epoch = max(1, len(data.train_x) // settings.n_pos)
        self.network = network = make_network(config, data)
        self.data = data
        self.quality = None
        if settings.quality_samples and config.has_samples:
            features = load_features(config.features, record.device, network)
            self.quality = SampleQuality(features, data)
        self.trainer = Trainer(config, network, data, ranks=record.ranks, **record.for_guard)
        measure = partial(accuracy_of, network, data, noise_std=settings.eval_noise)
        around = (settings.alert_context, settings.alert_window)
        self.course = Course(network, measure, *around)
        self.samples = KeptSamples(record.folder, data.scale(data.train_x[:SHOWN]))
        self.guards = self.trainer.guards
        self.parts: dict[str, Part] = {
            **self.trainer.parts,
            "course": Kept(self.course, "accuracy", "best"),
            "watch": Kept(self.course, "past", "watched_until"),
            "samples": Kept(self.samples, "shown", "recent"),
        }

    def before_step(self, step: int) -> None:
        """Evaluate where that is due, or alerts have drawn attention to the step."""
        found = self._evaluate(step) if self._is_due(step) else {}
        if watched := self.course.before_step(step):
            self._write_accuracy(watched)
            found["test_accuracy"] = self.course.accuracy[step]
        self.guards["p_x"].log(found)

    def step(self, step: int) -> Tensor | None:
        """Train one step."""
        return self.trainer.step(step)

    def keep(self, step: int, samples: Tensor | None) -> None:
        """Keep a step's samples, where it has some."""
        if samples is None:
            return
        accuracy, is_due = self.course.accuracy, self._is_due(step)
        lost = self.record.diverged_at is not None
        healthy = is_due and not lost
        healthy = healthy and accuracy[step] >= HEALTHY_SHARE * max(accuracy.values())
        pixels = self.samples.see(step, samples, evaluated=is_due, healthy=healthy, lost=lost)
        if pixels is not None:
            self.record.images("samples", pixels, step)

    def see(self, step: int, row: Mapping[str, float]) -> str | None:
        """Take in a step's row; at the one that diverges, look around it."""
        words = why_lost(row)
        if words is not None and self.record.diverged_at is None:
            self.samples.write_recent()
            self._write_accuracy(self.course.look_at(step))
        return words

    def first_alert(self, alert: Alert) -> None:
        """Look around it."""
        self._write_accuracy(self.course.look_at(alert.step))

    def roll_back(self, step: int) -> None:
        """Forget what came after the step."""
        self.course.roll_back(step, self.record.first_alerts)
        self.samples.forget(step)

    def shown(self, row: Mapping[str, float]) -> dict[str, float | str]:
        """The accuracy too."""
        accuracy = self.course.last_accuracy()
        return {**({} if accuracy is None else {"acc": accuracy}), **super().shown(row)}

    def results(self) -> dict[str, Any]:
        """Evaluate the final parameters and draw the figures."""
        config, record = self.config, self.record
        self._evaluate(record.next_step)
        self.samples.draw()
        return {
            "data": config.data_name,
            "scenario": config.scenario_name,
            "beta_star": config.beta_star,
            "iterations_per_epoch": self.epoch,
            **self.course.results(record.guard_rows(), record.first_alerts, record.diverged_at),
        }

    def _is_due(self, step: int) -> bool:
        return step % self.settings.eval_every == 0

    def _evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the network as it is, as that of `step`; keep the best by validation."""
        record, network, settings = self.record, self.network, self.settings
        found = classification(network, self.data, noise_std=settings.eval_noise)
        valid = found["validation"]["accuracy"] if "validation" in found else None
        row = {"step": step, "epoch": step / self.epoch, "valid_accuracy": valid}
        row |= {"test_accuracy": found["test"]["accuracy"], "ece": found["test"]["ece"]}
        if self.quality is not None:
            buffer = self.trainer.chains(settings.quality_samples)
            with evaluation_mode(network):
                scores = self.quality.measure(buffer)
            row |= {f"buffer_{name}": value for name, value in scores.items()}
            row |= self.quality.features.described()
        row |= record.attempt
        record.folder.append_rows("evaluations.jsonl", [row])
        if self.course.see_evaluation(row):
            best = {"step": step, "valid_accuracy": valid, "network": network.state_dict()}
            record.folder.save(f"checkpoints/{BEST}", best)
        self._write_accuracy([step])
        return {k: x for k, x in row.items() if isinstance(x, float) and k != "epoch"}

    def _write_accuracy(self, steps: list[int]) -> None:
        known, record = self.course.accuracy, self.record
        rows = [{"step": step, **record.attempt, "test_accuracy": known[step]} for step in steps]
        record.folder.append_rows("accuracy.jsonl", rows)


def told(results: Mapping[str, Any]) -> str:
    """How good a classifier it is, and the best samples of its buffer."""
    best = results["best_evaluations"]
    lines = [f"test accuracy {results['accuracy']:.1%}, best {results['best_accuracy']:.1%}"]
    if row := best.get("valid_accuracy"):
        lines.append(
            f"test accuracy {row['test_accuracy']:.1%} where the validation accuracy was best "
            f"({row['valid_accuracy']:.1%}, step {row['step']})"
        )
    for name, words in (("buffer_is", "Inception score"), ("buffer_fid", "FID")):
        if row := best.get(name):
            lines.append(
                f"best {words} of {row['buffer_samples']} samples of the buffer {row[name]:.4g} "
                f"(step {row['step']}; features: {row['features']})"
            )
    return "\n".join(lines)


train = partial(loop.train, Jem)
run = partial(loop.launch, train, told)
