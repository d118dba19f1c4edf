"""β* and output scale, optimizer, chains; where rows go, and what an alert leads to."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Adam, AdamW

from ..alerts import Level
from .problem import Problem, Setup, error, info, some, warn

__all__ = [
    "TYPED_IN",
    "implied_scale",
    "of_chains",
    "of_consequences",
    "of_exponents",
    "of_training",
]

# Rounding of a scale that was typed in, such as 2e4 for 2 / 0.01**2.
TYPED_IN = 0.02
_LITTLE = 0.05
# Of the data: how far start points may miss its width, and exceed it ([-1, 1] is 2 of [0, 1]).
_SLACK, _WIDE = 0.1, 1.8


def implied_scale(step_size: float, noise_std: float) -> float:
    """o of x += step_size * df/dx + noise_std * randn; infinite without noise."""
    return 2 * step_size / noise_std**2 if noise_std**2 else math.inf


def of_exponents(setup: Setup) -> Iterator[Problem]:
    """The guard's numbers against the sampler's."""
    steps, scale = setup.trainer.steps, setup.output_scale
    implied = None if steps is None else implied_scale(**steps)
    if steps and implied and scale and not math.isclose(implied, scale, rel_tol=TYPED_IN):
        if math.isinf(implied):
            said = "there is none for a sampler with no noise"
            fix = "beta_star alone, without output_scale."
        else:
            step, noise = steps.values()
            said = f"step {step:g} and noise {noise:g} mean 2 * step / noise**2 = {implied:g}"
            fix = f"output_scale={implied:g}, or the step and noise that the sampler really has."
        yield error("output_scale", "guard(output_scale=)", f"It is {scale:g}, but {said}.", fix)
    if not any(setup.beta_star):
        return
    if setup.has_sampler and not setup.tempers and implied != math.inf:
        known = "" if implied is None else f": output_scale={implied:g}"
        yield Problem(
            Level.WARN if implied is not None else Level.INFO,
            "no_output_scale",
            "guard(output_scale=)",
            "Without it the weights act, but the samples are not drawn from the tempered energy.",
            f"output_scale = 2 * step_size / noise_std**2{known}; nothing, without noise.",
        )
    lowest = min(setup.factor)
    if lowest <= 0:
        yield error(
            "sampler_factor",
            "guard(beta_star=)",
            f"1 - beta_star / output_scale is {lowest:g}: the sampler would not follow the energy.",
            "a lower beta_star (0.5 to 4 for JEM), or output_scale = 2 * step_size / noise_std**2.",
        )
    elif lowest < _LITTLE:
        yield warn(
            "sampler_factor",
            "guard(beta_star=)",
            f"The sampler runs on {lowest:.1%} of the energy, hardly more than noise.",
            "a lower beta_star, or the right output_scale.",
        )


def of_training(setup: Setup) -> Iterator[Problem]:
    """What the optimizer trains, and how."""
    optimizer, model = setup.trainer.optimizer, setup.trainer.model
    if optimizer is None:
        yield info(
            "no_optimizer",
            "g.attach",
            "Without it a step ends at the next sampler call, and NaN gradients are not skipped.",
            "g.attach(optimizer=optim).",
        )
    else:
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        own = [] if model is None else model.named_parameters()
        missing = [name for name, p in own if p.requires_grad and id(p) not in trained]
        if missing:
            yield warn(
                "not_trained",
                "the optimizer",
                f"{len(missing)} parameters of the energy module are not its ({some(missing)}).",
                "optimizer.add_param_group; nothing, if another optimizer has them.",
            )
        decay = max((group.get("weight_decay", 0) for group in optimizer.param_groups), default=0)
        if decay:
            decoupled = all(g.get("decoupled_weight_decay") for g in optimizer.param_groups)
            is_adam = isinstance(optimizer, Adam) and not isinstance(optimizer, AdamW)
            coupled = is_adam and not decoupled
            yield Problem(
                Level.WARN if coupled else Level.INFO,
                "weight_decay",
                "the optimizer",
                f"weight_decay={decay:g}: where GradScale is small, the decay is what is left of "
                "the gradient"
                + (", and Adam brings it to the size of a full step." if coupled else "."),
                "weight_decay=0, as JEM"
                + (", or AdamW, which keeps the decay apart." if coupled else ", if in doubt."),
            )
    if setup.trainer.scaler is None and any(
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.float16
        for device in ("cuda", "cpu")
    ):
        yield warn(
            "no_scaler",
            "g.attach",
            "Autocast to float16 without a GradScaler: steps that it skips look broken, or small "
            "gradients vanish.",
            "g.attach(optimizer=optim, scaler=scaler), or autocast to bfloat16.",
        )


def of_chains(setup: Setup) -> Iterator[Problem]:
    """Clamp and replay buffer against the range of the example."""
    example, clamp, buffer = setup.example, setup.trainer.clamp, setup.trainer.buffer
    data = None
    if example is not None and example.is_floating_point() and example.numel():
        low, high = _range(example)
        data = (low, high) if low < high else None
    if data is not None and clamp is not None and _misses(clamp, data):
        yield error(
            "clamp",
            "g.attach(clamp=)",
            f"Samples are kept in [{clamp[0]:g}, {clamp[1]:g}], but the data lies in "
            f"[{data[0]:.3g}, {data[1]:.3g}]: no negative gets there, and the gap grows forever.",
            "a clamp as wide as the data or none, or data scaled to it.",
        )
    samples = getattr(buffer, "samples", buffer)
    if not isinstance(samples, Tensor) or not samples.numel() or not samples.is_floating_point():
        return
    broken = int((~torch.isfinite(samples)).flatten(1).any(1).sum()) if samples.ndim > 1 else 0
    if broken:
        yield error(
            "buffer_nonfinite",
            "the replay buffer",
            f"{broken} of its {len(samples)} rows hold NaN or infinity.",
            "start it anew, or replace these rows by fresh start points.",
        )
    elif data is None or example is None:
        return
    elif samples.shape[1:] != example.shape[1:]:
        yield warn(
            "buffer_shape",
            "the replay buffer",
            f"Its rows have shape {tuple(samples.shape[1:])}, data {tuple(example.shape[1:])}.",
            "the shape of one sample; nothing, if the model takes other inputs than its sampler.",
        )
    else:
        chains = _range(samples)
        said = f"Chains start in [{chains[0]:.3g}, {chains[1]:.3g}]"
        if _misses(chains, data):
            yield warn(
                "buffer_range",
                "the replay buffer",
                f"{said}, but the data lies in [{data[0]:.3g}, {data[1]:.3g}].",
                "start points uniform over the range of the data.",
            )
        elif chains[1] - chains[0] > _WIDE * (data[1] - data[0]):
            yield info(
                "buffer_range",
                "the replay buffer",
                f"{said}, much wider than the data in [{data[0]:.3g}, {data[1]:.3g}].",
                "start points in [0, 1] for images in [0, 1]; nothing, to search beside the data.",
            )


def _range(x: Tensor) -> tuple[float, float]:
    return float(x.min()), float(x.max())


def _misses(bounds: tuple[float, float], data: tuple[float, float]) -> bool:
    slack = _SLACK * (data[1] - data[0])
    return bounds[0] > data[0] + slack or bounds[1] < data[1] - slack


def of_consequences(setup: Setup) -> Iterator[Problem]:
    """Sinks, actions, and ranks."""
    if not setup.has_sinks:
        yield info(
            "no_sinks",
            "guard(log_dir=)",
            "Rows of diagnostics are written nowhere; alerts go to the log alone.",
            'log_dir="runs/1", or sinks=[...].',
        )
    model = setup.trainer.model
    on_gpu = model is not None and any(p.is_cuda for p in model.parameters())
    if setup.judge_in_loss and on_gpu:
        yield info(
            "judge_in_loss",
            "guard(judge_in_loss=)",
            "judge_in_loss=True makes the host wait for the GPU once per step.",
            "judge_in_loss=False, unless an ERROR must act in its own step.",
        )
    if setup.is_distributed and not setup.joins_ranks:
        yield warn(
            "ranks",
            "guard(process_group=)",
            "Several ranks train, but each weighs its own samples alone.",
            "process_group=torch.distributed.group.WORLD.",
        )
    if setup.action == "rollback":
        yield from _rollback(setup, on_gpu)


def _rollback(setup: Setup, on_gpu: bool) -> Iterator[Problem]:
    missing = [name for name in ("model", "optimizer") if getattr(setup.trainer, name) is None]
    if missing:
        yield error(
            "rollback_incomplete",
            "g.attach",
            f'action="rollback" cannot take back what it does not know: {" and ".join(missing)}.',
            f"g.attach({_arguments(missing)}) before the first step.",
        )
    if setup.trainer.buffer is None and setup.has_sampler:
        yield warn(
            "rollback_incomplete",
            "g.attach",
            "No replay buffer is attached: chains of the lost run would go on after a rollback.",
            "g.attach(buffer=...); nothing, if every chain starts afresh.",
        )
    others = ("scheduler", "ema", "generators")
    unknown = [name for name in others if not getattr(setup.trainer, name)]
    if unknown:
        yield info(
            "rollback_incomplete",
            "g.attach",
            f"Not attached, so not taken back: {', '.join(unknown)}.",
            f"g.attach({_arguments(unknown)}), those that there are.",
        )
    if setup.not_followed:
        yield info(
            "recovery_changes",
            "guard(recovery=)",
            f"A rollback cannot follow all of its changes here: {'; '.join(setup.not_followed)}.",
            "g.attach(sgld_steps=20, steps_argument=...), or others by Recovery(ladder=...).",
        )
    if on_gpu and torch.backends.cudnn.benchmark:
        yield info(
            "nondeterministic",
            "torch.backends.cudnn.benchmark",
            "cuDNN picks its algorithms by measurement: steps after a rollback may differ by bits.",
            "nothing, unless runs are to be compared bit by bit.",
        )


def _arguments(names: list[str]) -> str:
    return ", ".join(f"{name}=..." for name in names)
