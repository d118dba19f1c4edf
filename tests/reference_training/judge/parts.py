"""What the tests of judging share: run folders made by hand, and a distance by its definition."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.networks import WideResNet

SETTINGS = {"sgld_steps": 2, "reinit_rate": 0.5, "eval_noise": 0.03}
SETTINGS |= {"train_images": 90, "valid_images": 20, "test_images": 40}


def jem_folder(
    path: Path,
    *,
    best: bool = True,
    stored: Mapping[str, Any] | None = None,
    network: WideResNet | None = None,
    **settings: Any,
) -> tuple[dict[str, WideResNet], Tensor]:
    """A folder of a JEM run on digits, of 12 steps; its networks are new.

    Args:
        path: made.
        best: whether there is a best network, after 4 steps.
        stored: entries of its config.json over those of a run with seed 3.
        network: the best one.
        **settings: of its scenario, over :data:`SETTINGS`.

    Returns:
        the networks "best" and "last", and the newest checkpoint's 30 chains.
    """
    (path / "checkpoints").mkdir(parents=True)
    config: dict[str, Any] = {**JemConfig(out=path, seed=3).to_json(), **(stored or {})}
    config["settings"] |= SETTINGS | settings
    (path / "config.json").write_text(json.dumps(config))
    shape = {name: config["settings"][name] for name in ("depth", "width", "early_stride")}
    networks = {name: WideResNet(**shape) for name in ("best", "last")}
    networks["best"] = network or networks["best"]
    if best:
        state = {"step": 4, "valid_accuracy": 0.2, "network": networks["best"].state_dict()}
        torch.save(state, path / "checkpoints" / "best.pt")
    chains = torch.randn(30, 1, 8, 8)
    for step in (6, 12):
        shift = 0.0 if step == 12 else 1.0
        state = {"network": networks["last"].state_dict(), "buffer": {"samples": chains + shift}}
        torch.save(state, path / "checkpoints" / f"step-{step:08d}.pt")
    return networks, chains


def frechet(one: Tensor, two: Tensor) -> float:
    """The Fréchet distance of two sets of features (Heusel et al. 2017, Eq. 6) in float64."""
    a, b = (x.flatten(1).double().numpy() for x in (one, two))
    s, t = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = scipy.linalg.sqrtm(s @ t).real
    return float(np.sum((a.mean(0) - b.mean(0)) ** 2) + np.trace(s + t - 2 * root))
