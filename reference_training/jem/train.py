"""The JEM reference trainer: classifier and EBM in one network (Grathwohl et al. 2020).

The training loop is an ordinary one; what the guard adds to it are the two marked lines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ebmguard import guard
from ebmguard.errors import ConfigError
from ebmguard.samplers import ReplayBuffer, sgld
from ebmguard.sinks import read_jsonl

from ..data import DATA_SETS
from ..interrupt import DeferredInterrupt
from ..networks import WideResNet
from ..progress import Reporter, default_reporter
from ..run_folder import RunFolder
from .config import JemConfig
from .logbook import Logbook

INTERRUPTED = 130
"""Exit status of a run that Ctrl-C stopped, as shells report it."""


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
    optimizer = torch.optim.Adam(network.parameters(), lr=config.lr)
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
    folder.drop_rows_from(state["logbook"]["record"]["next_step"] if state else 0)

    # The first line of the guard. The objects it returns are drop-in replacements.
    loss_fn, sample_q = guard(
        None,
        sample_q,
        beta_star=config.beta_star,
        output_scale=config.output_scale,
        log_dir=folder.path,
        on_alert=logbook.on_alert,
    )

    def checkpoint() -> None:
        loss_fn.guard.flush()
        folder.save_checkpoint(
            {
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
                f_pos, f_neg = logits.logsumexp(dim=1).split([config.n_pos, config.n_neg])
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
            loss_fn.guard.flush()
            checkpoint()
            if not logbook.finished:
                return None
            return logbook.finish(read_jsonl(folder.path / "metrics.jsonl"), describe(device))
    finally:
        reporter.stop()
        logbook.close()
        loss_fn.guard.close()


def run(config: JemConfig) -> int:
    """`ebmguard train jem`: open the run folder, train, and say how it went.

    Returns:
        Exit status: 0, or 130 where Ctrl-C stopped the run.

    Raises:
        ConfigError: the settings, the folder or the device cannot be meant.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config, folder = open_run(config)
    results = train(config, folder)
    if results is None:
        print(f"stopped; go on with: {config.command()} --resume")
        return INTERRUPTED
    print(summary(results, folder.path))
    return 0


def open_run(config: JemConfig) -> tuple[JemConfig, RunFolder]:
    """The settings that count and the folder to write into.

    Raises:
        ConfigError: the settings do not make a run, or the folder is not theirs.
    """
    if config.resume:
        folder = RunFolder.resume(config.out)
        config = config.resumed(folder.config)
        config.check()
        folder.write_config(config.to_json())
        return config, folder
    config.check()
    find_device(config.device)
    return config, RunFolder.create(config.out, config.to_json())


def find_device(name: str) -> torch.device:
    """The device of that name; `auto` is a GPU where there is one, else the CPU.

    Raises:
        ConfigError: PyTorch has no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        # PyTorch raises AssertionError where it was built without the device's support.
        raise ConfigError(f"device is {name!r}, which cannot be used here: {error}") from error
    return device


def describe(device: torch.device) -> str:
    """The device in words, such as "cuda (NVIDIA H200)"."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return device.type


def summary(results: dict[str, Any], path: Path) -> str:
    """How the run went, in a few lines."""
    lines = [f"results in {path}"]
    if results["diverged_at"] is None:
        lines.append(f"finished {results['steps']} steps without divergence")
    else:
        lines.append(f"DIVERGED at step {results['diverged_at']}")
    for level in ("first_warn", "first_error"):
        alert = results[level]
        if alert is not None:
            lines.append(f"{level.replace('_', ' ')}: {alert['message']}")
    best = results["best_accuracy"]
    lines.append(f"test accuracy {results['accuracy']:.1%}, best {best:.1%}")
    return "\n".join(lines)
