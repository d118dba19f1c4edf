"""The classifier of a JEM run, and its chains, as its checkpoints hold them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ebmguard.errors import ConfigError
from ebmguard.recovery import load_durably

from ..device import autocast_type
from ..engine import run_folder
from ..engine.checkpoints import load_all_ranks
from ..networks import WideResNet
from .config import CheckpointName

BEST = "best.pt"


def read_config(run: Path) -> dict[str, Any]:
    """config.json of a JEM run."""
    config = run_folder.read_config(run)
    if not {"data", "beta_star", "scenario", "precision", "settings"} <= set(config):
        raise ConfigError(f"{run} is not a run folder of `ebmguard train jem`")
    return config


def read_last(run: Path) -> tuple[int, dict[str, Tensor], Tensor]:
    """Of the newest checkpoint, on the CPU: steps, parameters, and all ranks' chains, (N, ...)."""
    step, parts = load_all_ranks(run / "checkpoints")
    return step, parts[0]["network"], torch.cat([part["buffer"]["samples"] for part in parts])


def network_of(config: Mapping[str, Any], in_channels: int, classes: int) -> WideResNet:
    """The network that a run's config.json names, as PyTorch initialises it."""
    return WideResNet(
        in_channels=in_channels,
        classes=classes,
        autocast=autocast_type(config["precision"]),
        **{name: config["settings"][name] for name in ("depth", "width", "early_stride")},
        **{name: config[name] for name in ("activation", "norm", "dropout", "unconditional")},
    )


def load_network(
    run: Path, checkpoint: CheckpointName, device: torch.device
) -> tuple[WideResNet, int]:
    """The network of a run, in evaluation mode, and the steps that it was trained for.

    It has the arithmetic of its training; "best" is by validation accuracy, "last" the newest.
    """
    config = read_config(run)
    if checkpoint == "last":
        step, parameters, _ = read_last(run)
    else:
        file = run / "checkpoints" / BEST
        if not file.is_file():
            raise ConfigError(
                f"{run} has no checkpoint that is the best by validation accuracy: it was not "
                "evaluated yet, or has no validation images (train with --valid-images); name the "
                "newest by --checkpoint last"
            )
        state = load_durably(file, torch.device("cpu"))
        step, parameters = int(state["step"]), state["network"]
    channels, outputs = parameters["stem.weight"].shape[1], parameters["head.weight"].shape[0]
    network = network_of(config, channels, outputs - config["unconditional"])
    network.load_state_dict(parameters)
    network.requires_grad_(False)
    # As in training: the faster memory layout for these convolutions.
    network.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network.eval(), step


def spread(rows: Tensor, count: int) -> Tensor:
    """At most so many rows, from all parts: neighbours may be of one class, or of one difficulty.

    Chains of a class lie together; the first half of MNIST's test images is the easier one, say
    its authors.
    """
    count = min(count, len(rows))
    return rows[torch.arange(count, device=rows.device) * len(rows) // count]
