"""The classifier of a JEM run, and its chains, as its checkpoints hold them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ebmguard.errors import ConfigError
from ebmguard.recovery import load_durably

from ..engine import run_folder
from ..engine.checkpoints import load_all_ranks
from ..networks import WideResNet
from ..precision import autocast_type
from .config import CheckpointName

BEST = "best.pt"


def read_config(run: Path) -> dict[str, Any]:
    """config.json of a JEM run."""
    config = run_folder.read_config(run)
    if not {"data", "scenario", "precision", "settings"} <= set(config):
        raise ConfigError(f"{run} is not a run folder of `ebmguard train jem`")
    return config


def read_last(run: Path) -> tuple[int, dict[str, Tensor], Tensor]:
    """The newest checkpoint of a run, on the CPU.

    Returns:
        steps done by then, the network's parameters, and the chains of all ranks' replay buffers,
        (N, C, H, W).
    """
    step, parts = load_all_ranks(run / "checkpoints")
    return step, parts[0]["network"], torch.cat([part["buffer"]["samples"] for part in parts])


def network_of(config: Mapping[str, Any], in_channels: int, classes: int) -> WideResNet:
    """The network that a run's settings name, as PyTorch initialises it; older ones name less."""
    choices = ("activation", "norm", "dropout", "unconditional")
    return WideResNet(
        in_channels=in_channels,
        classes=classes,
        autocast=autocast_type(config["precision"]),
        **{name: config["settings"][name] for name in ("depth", "width", "early_stride")},
        **{name: config[name] for name in choices if name in config},
    )


def load_network(
    run: Path, checkpoint: CheckpointName, device: torch.device
) -> tuple[WideResNet, int]:
    """The network of a run, with the arithmetic of its training, in evaluation mode.

    Args:
        run: folder of the run.
        checkpoint: "best" is the best by validation accuracy, "last" the newest.
        device: where the network goes.

    Returns:
        the network, and the steps that it was trained for.
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
    network = network_of(config, channels, outputs - config.get("unconditional", False))
    network.load_state_dict(parameters)
    network.requires_grad_(False)
    # As in training: the faster memory layout for these convolutions.
    network.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network.eval(), step
