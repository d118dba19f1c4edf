"""The optimizer and the AMP scaler."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.optim import Adam, AdamW

from ..alerts import Level
from .problem import Problem, some
from .setup import Setup

__all__ = ["of_training"]


def of_training(setup: Setup) -> Iterator[Problem]:
    """What the optimizer trains, and how."""
    optimizer, model = setup.trainer.optimizer, setup.model
    if optimizer is None:
        yield Problem(
            Level.INFO,
            "no_optimizer",
            "g.attach",
            "Without the optimizer a step ends at the next sampler call, and a step whose "
            "gradients are not finite is not skipped.",
            "g.attach(optimizer=optim).",
        )
    else:
        if model is not None:
            trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
            missing = [
                name
                for name, p in model.named_parameters()
                if p.requires_grad and id(p) not in trained
            ]
            if missing:
                yield Problem(
                    Level.WARN,
                    "not_trained",
                    "the optimizer",
                    f"{len(missing)} parameters of the energy module are not among its own "
                    f"({some(missing)}).",
                    "optimizer.add_param_group, or build it from f.parameters() after the last "
                    "layer was made; nothing, if another optimizer has them.",
                )
        decays = {group.get("weight_decay", 0) for group in optimizer.param_groups} - {0}
        if decays:
            coupled = isinstance(optimizer, Adam) and not isinstance(optimizer, AdamW)
            coupled = coupled and not all(
                group.get("decoupled_weight_decay") for group in optimizer.param_groups
            )
            yield Problem(
                Level.WARN if coupled else Level.INFO,
                "weight_decay",
                "the optimizer",
                f"weight_decay={max(decays):g}: where GradScale is small, the decay is what is "
                "left of the gradient"
                + (", and Adam brings it to the size of a full step." if coupled else "."),
                "weight_decay=0, as JEM"
                + (", or AdamW, which keeps the decay apart." if coupled else ", if in doubt."),
            )
    if setup.trainer.scaler is None and _autocasts_to_float16():
        yield Problem(
            Level.WARN,
            "no_scaler",
            "g.attach",
            "Autocast to float16 is on, but no GradScaler is attached: steps that it skips would "
            "be taken for broken ones, or small gradients vanish without one.",
            "g.attach(optimizer=optim, scaler=scaler), or autocast to bfloat16.",
        )


def _autocasts_to_float16() -> bool:
    return any(
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.float16
        for device in ("cuda", "cpu")
    )
