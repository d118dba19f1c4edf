"""The JEM reference trainer: classifier and EBM in one network (Grathwohl et al. 2020).

The training loop is an ordinary one; what the guard adds to it are the two marked lines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ebmguard import guard
from ebmguard.samplers import ReplayBuffer, sgld
from ebmguard.sinks import read_jsonl

from ..data import DATA_SETS
from ..device import describe, find_device
from ..interrupt import DeferredInterrupt
from ..networks import WideResNet
from ..progress import Reporter, default_reporter
from ..run_folder import RunFolder
from .config import JemConfig
from .logbook import Logbook


def make_sampler(
    config: JemConfig, rng: torch.Generator
) -> Callable[[WideResNet, ReplayBuffer], Tensor]:
    """JEM's sampler: persistent chains from the buffer, a few Langevin steps, written back."""

    def sample_q(f: WideResNet, buffer: ReplayBuffer) -> Tensor:
        x, rows = buffer.sample(config.n_neg)
        x = sgld(
            f,
            x,
            steps=config.sgld_steps,
            step_size=config.step_size,
            noise_std=config.noise_std,
            generator=rng,
        )
        buffer.write(rows, x)
        return x

    return sample_q


def train(
    config: JemConfig, folder: RunFolder, reporter: Reporter | None = None
) -> dict[str, Any] | None:
    """Run the training, or what is left of it, and write the run folder.

    Args:
        config: the settings, checked.
        folder: a folder of its own; if it has a checkpoint, the run goes on from there.
        reporter: what a person sees; None chooses for the terminal.

    Returns:
        What results.json holds, or None where Ctrl-C stopped the run; it can then be resumed.

    Raises:
        ConfigError: the device does not exist.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    device = find_device(config.device)
    reporter = reporter or default_reporter()
    data = DATA_SETS[config.data]().to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = WideResNet(
            in_channels=data.sample_shape[0],
            classes=data.classes,
            depth=config.depth,
            width=config.width,
        )
    # channels_last is the faster memory layout for these convolutions, on CPUs and GPUs alike.
    network.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(network.parameters(), lr=config.lr, fused=True)
    # Two streams of random numbers, so that runs of different beta* see the same batches.
    data_rng = torch.Generator(device).manual_seed(2 * config.seed)
    sampler_rng = torch.Generator(device).manual_seed(2 * config.seed + 1)
    buffer = ReplayBuffer(
        config.buffer_size,
        data.sample_shape,
        reinit_rate=config.reinit_rate,
        generator=sampler_rng,
    )
    sample_q = make_sampler(config, sampler_rng)
    logbook = Logbook(config, folder, network, data, reporter)
    state = folder.load_checkpoint(device)
    folder.cut_rows(state["row_sizes"] if state else {})

    # The first line of the guard. The objects it returns are drop-in replacements.
    loss_fn, sample_q = guard(
        None,
        sample_q,
        beta_star=config.beta_star,
        output_scale=config.output_scale,
        log_dir=folder.path,
        on_alert=logbook.on_alert,
    )
    # Optional: the guard's step then ends with the optimizer's, so that checkpoints between two
    # steps of the loop hold no half-recorded one.
    loss_fn.guard.attach(optimizer=optimizer)

    def checkpoint() -> None:
        loss_fn.guard.flush()
        logbook.flush()
        folder.save_checkpoint(
            {
                "row_sizes": folder.row_sizes(),
                "network": network.state_dict(),
                "optimizer": optimizer.state_dict(),
                "buffer": buffer.state_dict(),
                "data_rng": data_rng.get_state(),
                "guard": loss_fn.guard.state_dict(),
                "logbook": logbook.state_dict(),
            }
        )

    if state:
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        buffer.load_state_dict(state["buffer"])
        data_rng.set_state(state["data_rng"].cpu())
        loss_fn.guard.load_state_dict(state["guard"])
        logbook.load_state_dict(state["logbook"])
    first = logbook.record.next_step
    reporter.start(f"beta* = {config.beta_star:g}", first, config.iterations)
    try:
        with DeferredInterrupt() as interrupt:
            for step in range(first, config.iterations):
                if logbook.finished or interrupt.requested:
                    break
                logbook.before_step(step)
                size = (config.n_pos,)
                rows = torch.randint(len(data.train_x), size, generator=data_rng, device=device)
                images, labels = data.train_x[rows], data.train_y[rows]
                noise = torch.randn(images.shape, generator=data_rng, device=device)
                x_pos = images + config.data_noise * noise

                x_neg = sample_q(network, buffer)
                # One forward pass for both: the logits of the images also serve the classifier.
                logits = network.classify(torch.cat([x_pos, x_neg]))
                f = logits.logsumexp(dim=1)
                f_pos, f_neg = f[: config.n_pos], f[config.n_pos :]
                cross_entropy = F.cross_entropy(logits[: config.n_pos], labels)
                l_p_x = loss_fn(f_pos, f_neg)  # the second line; it was f_neg.mean() - f_pos.mean()
                optimizer.zero_grad()
                (cross_entropy + l_p_x).backward()
                optimizer.step()

                logbook.after_step(
                    step,
                    cross_entropy=float(cross_entropy.detach()),
                    gap=float(f_pos.detach().mean() - f_neg.detach().mean()),
                    x_neg=x_neg,
                    guard=loss_fn.guard.last,
                )
                if logbook.record.next_step % config.checkpoint_every == 0:
                    checkpoint()
            checkpoint()
            if not logbook.finished:
                return None
            return logbook.finish(read_jsonl(folder.path / "metrics.jsonl"), describe(device))
    finally:
        reporter.stop()
        logbook.close()
        loss_fn.guard.close()
