"""A short-run training from its settings to its folder: updates, checkpoints, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ebmguard import guard
from ebmguard.errors import DivergenceError
from ebmguard.samplers import ReplayBuffer
from ebmguard.sinks import read_jsonl
from ebmguard.steering import AdaptiveSteps

from ..compiling import compile_modules
from ..device import describe, find_device
from ..engine.interrupt import DeferredInterrupt
from ..engine.progress import Reporter, SilentReporter, default_reporter
from ..engine.ranks import ONE_RANK, Ranks
from ..engine.restoring import restoring
from ..engine.run_folder import RunFolder
from ..precision import set_precision
from .config import ShortRunConfig
from .draws import Draws
from .record import SHOWN, Record
from .sampler import make_sampler
from .start import make_network, start_from


def train(
    config: ShortRunConfig,
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
        ConfigError: the device does not exist, no checkpoint of the run can be read, or there is
            no network to start from.
    """
    settings = config.settings
    if config.threads:
        torch.set_num_threads(config.threads)
    device = find_device(config.device)
    set_precision(config.precision)
    reporter = (reporter or default_reporter()) if ranks.is_first else SilentReporter()
    data = config.load_data().to(device)
    state = folder.checkpoints.load(device)
    with restoring(folder.path):
        folder.cut_rows(state["row_sizes"] if state else {})

    network = make_network(config, data)
    if config.start_from is not None and state is None:
        start_from(network, Path(config.start_from), settings.activation)
    compile_modules(config.compile, config.precision, device, network)
    energies = ranks.parallel(network)
    make_optimizer = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[settings.optimizer]
    optimizer = make_optimizer(network.parameters(), lr=settings.lr, fused=True)
    draws = Draws(data, settings, config.seed, ranks)
    count = ranks.share(settings.batch)
    buffer = None
    if settings.init == "persistent":
        buffer = ReplayBuffer(
            ranks.share(settings.buffer_size),
            data.sample_shape,
            reinit_rate=0.0,
            generator=draws.chains,
        )
    record = Record(config, folder, data.scale(data.train_x[:SHOWN]), reporter)

    def refinement() -> int:
        if config.most_steps == 1:
            return 1
        finer: int = loss_fn.guard.next_steps().refinement
        return finer

    loss_fn, sample_q = guard(
        None,
        make_sampler(settings, device, refinement),
        beta_star=config.beta_star,
        output_scale=settings.output_scale,
        action=config.action,
        log_dir=folder.path if ranks.is_first else None,
        on_alert=record.on_alert,
        process_group=ranks.group,
        adapt=AdaptiveSteps(most=config.most_steps) if config.most_steps > 1 else None,
    )
    loss_fn.guard.attach(
        model=network,
        optimizer=optimizer,
        buffer=buffer,
        step_size=settings.step_size,
        noise_std=settings.noise_std,
        sgld_steps=settings.sgld_steps,
    )

    parts: dict[str, Any] = {
        "network": network,
        "optimizer": optimizer,
        "draws": draws,
        "guard": loss_fn.guard,
        "record": record,
    }
    if buffer is not None:
        parts["buffer"] = buffer

    def checkpoint() -> None:
        loss_fn.guard.flush()
        record.flush()
        folder.checkpoints.save(
            record.next_step,
            {
                **{name: part.state_dict() for name, part in parts.items()},
                "row_sizes": folder.row_sizes(),
            },
        )

    def update() -> tuple[Tensor, Tensor, int]:
        x_pos = draws.positives()
        steps = draws.sgld_steps()
        if config.most_steps > 1:  # the guard knows the smallest K, and by what it multiplies it
            steps = steps * loss_fn.guard.sgld_steps // settings.sgld_steps
        if buffer is None:
            x0 = draws.starts(count)
        else:
            x0, rows = buffer.sample(count)
        x_neg = sample_q(network, x0, draws.noise(count, steps))
        if buffer is not None:
            buffer.write(rows, x_neg)
        f_pos, f_neg = energies(torch.cat((x_pos, x_neg))).split(count)
        loss = loss_fn(f_pos, f_neg)  # it was f_neg.mean() - f_pos.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        gap = f_pos.detach().mean() - f_neg.detach().mean()
        outside = (x_neg.abs() > 1).float().mean()
        return torch.stack((gap, outside, x_neg.std())), x_neg, steps

    if state is not None:
        with restoring(folder.path):
            for name, part in parts.items():
                part.load_state_dict(state[name])
    del state
    reporter.start(f"beta* = {config.beta_star:g}", record.next_step, settings.iterations)
    try:
        with DeferredInterrupt() as interrupt:
            while not (record.finished or record.interrupted):
                try:
                    numbers, x_neg, steps = update()
                except DivergenceError as error:
                    record.end(loss_fn.guard.step, str(error))
                    break
                # Ctrl-C on any rank stops all of them, after the same update.
                stopped = torch.full_like(numbers[:1], float(interrupt.requested))
                numbers = ranks.average(torch.cat((numbers, stopped)))
                record.after_update(numbers, x_neg, steps, loss_fn.guard.last)
                if record.next_step % config.checkpoint_every == 0:
                    checkpoint()
            if record.ended is None:  # else it may be the middle of an update
                checkpoint()
            if not record.finished:
                return None
            loss_fn.guard.close()
            metrics = folder.path / "metrics.jsonl"
            found = read_jsonl(metrics) if folder.writes and metrics.is_file() else []
            return record.finish(found, describe(device))
    finally:
        reporter.stop()
        record.close()
        loss_fn.guard.close()
