"""A JEM run from its settings to its folder: training, evaluation, checkpoints, resume."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ebmguard.errors import DivergenceError
from ebmguard.sinks import read_jsonl

from ..data import ImageData
from ..device import describe, find_device
from ..engine.interrupt import DeferredInterrupt
from ..engine.progress import Reporter, SilentReporter, default_reporter
from ..engine.ranks import ONE_RANK, Ranks
from ..engine.restoring import restoring
from ..engine.run_folder import RunFolder
from ..networks import WideResNet
from ..precision import set_precision
from .config import JemConfig
from .evaluation import Evaluator, SampleQuality, load_features
from .logbook import Logbook
from .record import last_course
from .trainer import Trainer, make_network


def train(
    config: JemConfig,
    folder: RunFolder,
    reporter: Reporter | None = None,
    ranks: Ranks = ONE_RANK,
) -> dict[str, Any] | None:
    """Run the training, or what is left of it, and write the run folder.

    Args:
        config: the settings, checked for these ranks.
        folder: a folder of its own; if it has a checkpoint, the run goes on from there.
        reporter: what a person sees; None chooses for the terminal.
        ranks: the processes that train together.

    Returns:
        What results.json holds, or None where Ctrl-C stopped the run; it can then be resumed.

    Raises:
        ConfigError: the device does not exist, or no checkpoint of the run can be read.
    """
    settings = config.settings
    if config.threads:
        torch.set_num_threads(config.threads)
    device = find_device(config.device)
    set_precision(config.precision)
    reporter = (reporter or default_reporter()) if ranks.is_first else SilentReporter()
    data = config.load_data().to(device)
    state = folder.checkpoints.load(device)
    network = make_network(config, data)
    evaluator = make_evaluator(config, data, network)
    logbook = Logbook(config, folder, network, data, evaluator, reporter=reporter)
    with restoring(folder.path):
        folder.cut_rows(state["row_sizes"] if state else {})
    trainer = Trainer(
        config,
        network,
        data,
        ranks=ranks,
        log_dir=folder.path if ranks.is_first else None,
        on_alert=logbook.on_alert,
    )
    if state:
        with restoring(folder.path):
            trainer.load_state_dict(state)
            logbook.load_state_dict(state["logbook"])
    del state
    record = logbook.record

    def checkpoint() -> None:
        trainer.flush()
        logbook.flush()
        folder.checkpoints.save(
            record.next_step,
            {
                **trainer.state_dict(),
                "row_sizes": folder.row_sizes(),
                "logbook": logbook.state_dict(),
            },
        )

    def judged() -> Tensor | None:
        count = settings.quality_samples
        return trainer.chains(count) if count and config.has_samples else None

    reporter.start(f"beta* = {config.beta_star:g}", record.next_step, settings.iterations)
    try:
        with DeferredInterrupt() as interrupt:
            while not (logbook.finished or logbook.interrupted):
                step = record.next_step
                if logbook.is_due(step):
                    logbook.evaluate(step, judged())
                logbook.before_step(step)
                try:
                    numbers, x_neg = trainer.step(step)
                except DivergenceError as error:
                    logbook.end(trainer.steps, str(error))
                    break
                stopped = torch.full_like(numbers[:1], float(interrupt.requested))
                logbook.after_step(
                    step,
                    # Ctrl-C on any rank stops all of them, after the same step.
                    ranks.average(torch.cat((numbers, stopped))),
                    x_neg=x_neg,
                    guard=trainer.loss_fn.guard.last,
                )
                rollback = trainer.rollback(step)
                if rollback is not None:
                    logbook.roll_back(rollback)
                # Checkpoints of the course that a rollback gives up are not to be resumed.
                if rollback is not None or record.next_step % config.checkpoint_every == 0:
                    checkpoint()
            if record.ended is None:  # else it may be the middle of a step
                checkpoint()
            if not logbook.finished:
                return None
            trainer.close()
            metrics = folder.path / "metrics.jsonl"
            rows = read_jsonl(metrics) if folder.writes and metrics.is_file() else []
            return logbook.finish(last_course(rows), describe(device), judged())
    finally:
        reporter.stop()
        logbook.close()
        trainer.close()


def make_evaluator(config: JemConfig, data: ImageData, network: WideResNet) -> Evaluator:
    """What an evaluation of the run measures.

    Raises:
        ConfigError: the network of the features cannot be had.
    """
    settings, device = config.settings, data.train_x.device
    quality = None
    if settings.quality_samples and config.has_samples:
        features = load_features(
            config.features, sha256=config.features_sha256, network=network, device=device
        )
        quality = SampleQuality(features, data.train_x, data.scale, device)
    return Evaluator(data, noise_std=settings.eval_noise, quality=quality)
