"""What a trainer has told the guard about the rest of itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..errors import ConfigError
from ..recovery.state import Run
from ..shards import check_shards
from .strength import number

__all__ = ["Attached"]


@dataclass(frozen=True)
class Attached(Run):
    """What :meth:`ebmguard.Guard.attach` was given."""

    step_size: float | None = None
    noise_std: float | None = None
    clamp: tuple[float, float] | None = None
    sgld_steps: int | None = None
    steps_argument: str | None = None

    def extended(
        self,
        *,
        energy: nn.Module | None,
        process_group: dist.ProcessGroup | None = None,
        **given: Any,
    ) -> Attached:
        """This and what is given now; None leaves a field as it was.

        Args:
            energy: the energy module that the guard knows of without an attached model.
            process_group: the ranks that the guard speaks with.
            given: new values of the fields.

        Raises:
            ConfigError: a field of another type, an optimizer that trains none of the model's
                parameters, or parameters that are sharded over other ranks; a scaler without an
                optimizer.
        """
        new = {name: value for name, value in given.items() if value is not None}
        for name, kind, wanted in (
            ("model", nn.Module, "a Module"),
            ("optimizer", Optimizer, "a torch Optimizer"),
            ("scaler", torch.amp.GradScaler, "a torch.amp.GradScaler"),
        ):
            if name in new and not isinstance(new[name], kind):
                raise ConfigError(
                    f"attach: {name}= is a {type(new[name]).__name__}; expected {wanted}."
                )
        for name in ("step_size", "noise_std"):
            if name in new:
                number(f"attach: {name}", new[name])
        if "generators" in new:
            new["generators"] = tuple(new["generators"])
            for each in new["generators"]:
                if not isinstance(each, torch.Generator):
                    raise ConfigError(
                        f"attach: generators= holds a {type(each).__name__}; expected "
                        "torch.Generators. The global ones need not be named."
                    )
        steps = new.get("sgld_steps", 1)
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(
                f"attach: sgld_steps={steps!r}; expected the number of SGLD steps of a sampler "
                "call, a whole number of 1 or more."
            )
        result = replace(self, **new)
        if result.steps_argument is not None and result.sgld_steps is None:
            raise ConfigError(
                "attach: steps_argument= needs sgld_steps=, the number that the sampler runs with."
            )
        if result.scaler is not None and result.optimizer is None:
            raise ConfigError("attach: scaler= needs the optimizer that it scales.")
        if result.optimizer is None:
            return result
        trained = [p for group in result.optimizer.param_groups for p in group["params"]]
        check_shards(trained, process_group)
        energy = new.get("model", energy)
        if energy is not None and not {*map(id, trained)} & {*map(id, energy.parameters())}:
            raise ConfigError(
                "attach: the optimizer trains none of the model's parameters; is it the "
                "optimizer of another network, or was the model rebuilt after it?"
            )
        return result
