"""Checks of β* and output scale, optimizer, chains, sinks, ranks and rollbacks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Adam

from ..alerts import Level
from ..trainer import TYPED_IN, implied_scale, optimizers_of
from .problem import CHAINS, Problem, Setup, brief, error, info, warn

__all__ = ["CHECKS", "check_rollback"]

_LITTLE = 0.05
# Shares of the data's width that start points may miss, and exceed ([-1, 1] is 2 of [0, 1]).
_SLACK, _WIDE = 0.1, 1.8


def _check_exponents(setup: Setup) -> Iterator[Problem]:
    """Compare the guard's numbers with the sampler's."""
    steps, scale = setup.trainer.steps, setup.output_scale
    implied = steps and implied_scale(**steps)
    if steps and implied and scale and not math.isclose(implied, scale, rel_tol=TYPED_IN):
        what = f"It is {scale:g}, but "
        if math.isinf(implied):
            what += "there is none for a sampler with no noise."
            fix = "beta_star alone, without output_scale."
        else:
            what += "step {step_size:g} and noise {noise_std:g} mean ".format(**steps)
            what += f"2 * step / noise**2 = {implied:g}."
            fix = f"output_scale={implied:g}, or the step and noise that the sampler really has."
        yield error("output_scale", "guard(output_scale=)", what, fix)
    if not any(setup.beta_star):
        return
    if setup.has_sampler and not setup.tempers and implied != math.inf:
        level, known = (Level.INFO, "") if implied is None else (Level.WARN, f" = {implied:g}")
        what = "Without it the weights act, but the samples do not follow the tempered energy."
        what = f"{setup.measured} {what}".lstrip()
        fix = f"output_scale = 2 * step_size / noise_std**2{known}; nothing, without noise."
        yield Problem(level, "no_output_scale", "guard(output_scale=)", what, fix)
    lowest = min(setup.factor)
    if lowest <= 0:
        what = f"1 - beta_star / output_scale is {lowest:g}: the sampler would not follow f."
        fix = "a lower beta_star, or none; or output_scale = 2 * step_size / noise_std**2."
        yield error("sampler_factor", "guard(beta_star=)", what, fix)
    elif lowest < _LITTLE:
        what = f"The sampler runs on {lowest:.1%} of the energy, hardly more than noise."
        fix = "a lower beta_star, or the right output_scale."
        yield warn("sampler_factor", "guard(beta_star=)", what, fix)


def _check_training(setup: Setup) -> Iterator[Problem]:
    """Check what the optimizer trains, and how."""
    optimizer = setup.trainer.optimizer
    if optimizer is None:
        what = "Without it a step ends at the next sampler call, and NaN gradients are not skipped."
        yield info("no_optimizer", "g.attach", what, "g.attach(optimizer=optim).")
    else:
        if missing := setup.trainer.untrained:
            what = f"{len(missing)} parameters of the module do not train ({brief(missing)})."
            fix = "optimizer=[a, b], all that train it; p.requires_grad_(False) where none does."
            yield warn("not_trained", "the optimizer", what, fix)
        for part in optimizers_of(optimizer):
            groups = part.param_groups
            decay = max((group.get("weight_decay", 0) for group in groups), default=0)
            if not decay:
                continue
            what = f"weight_decay={decay:g}: where GradScale is small, the decay is what is left "
            what += "of the gradient"
            decoupled = all(group.get("decoupled_weight_decay") for group in groups)
            if isinstance(part, Adam) and not decoupled:
                what += ", and Adam brings it to the size of a full step."
                fix = "weight_decay=0, as JEM, or AdamW, which keeps the decay apart."
                yield warn("weight_decay", "the optimizer", what, fix)
            else:
                fix = "weight_decay=0, as JEM, if in doubt."
                yield info("weight_decay", "the optimizer", f"{what}.", fix)
    if setup.trainer.scaler is None and any(
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.float16
        for device in ("cuda", "cpu")
    ):
        what = "Autocast to float16, but no GradScaler is attached: steps that one skips look "
        what += "broken, and without one small gradients vanish."
        fix = "g.attach(optimizer=optim, scaler=scaler), or autocast to bfloat16."
        yield warn("no_scaler", "g.attach", what, fix)


def _check_chains(setup: Setup) -> Iterator[Problem]:
    """Compare clamp and replay buffer with the range of the example."""
    example, clamp, buffer = setup.example, setup.trainer.clamp, setup.trainer.buffer
    data = None
    if example is not None and example.is_floating_point() and example.numel():
        low, high = example.min().item(), example.max().item()
        data = (low, high) if low < high else None
    if data is not None and clamp is not None and _misses(clamp, data):
        what = f"Samples are kept in {_interval(clamp)}, but the data lies in {_interval(data)}: "
        what += "no negative gets there, and the gap grows forever."
        fix = "a clamp as wide as the data or none, or data scaled to it."
        yield error("clamp", "g.attach(clamp=)", what, fix)
    samples = getattr(buffer, "samples", buffer)
    are_floats = isinstance(samples, Tensor) and samples.is_floating_point() and samples.numel()
    if setup.is_running or not are_floats:
        return
    broken = int((~torch.isfinite(samples)).flatten(1).any(1).sum()) if samples.ndim > 1 else 0
    if broken:
        what = f"{broken} of its {len(samples)} rows hold NaN or infinity."
        fix = "start it anew, or replace these rows by fresh start points."
        yield error("buffer_nonfinite", "the replay buffer", what, fix)
    elif data is None or example is None:
        return
    elif samples.shape[1:] != example.shape[1:]:
        what = f"Its rows have shape {tuple(samples.shape[1:])}, data {tuple(example.shape[1:])}."
        fix = "the shape of one sample; nothing, if the model takes other inputs than its sampler."
        yield warn("buffer_shape", "the replay buffer", what, fix)
    else:
        chains = samples.min().item(), samples.max().item()
        what = f"Chains start in {_interval(chains)}, the data lies in {_interval(data)}."
        if _misses(chains, data):
            fix = "start points uniform over the range of the data."
            yield warn("buffer_range", "the replay buffer", what, fix)
        elif chains[1] - chains[0] > _WIDE * (data[1] - data[0]):
            fix = "start points as wide as the data; nothing, to search beside it."
            yield info("buffer_range", "the replay buffer", what, fix)


def _interval(ends: tuple[float, float]) -> str:
    return "[{:.3g}, {:.3g}]".format(*ends)


def _misses(bounds: tuple[float, float], data: tuple[float, float]) -> bool:
    slack = _SLACK * (data[1] - data[0])
    return bounds[0] > data[0] + slack or bounds[1] < data[1] - slack


def _check_actions(setup: Setup) -> Iterator[Problem]:
    """Check sinks and ranks."""
    if not setup.has_sinks:
        what = "Rows of diagnostics are written nowhere; alerts go to the log alone."
        yield info("no_sinks", "guard(log_dir=)", what, 'log_dir="runs/1", or sinks=[...].')
    model = setup.trainer.model
    on_gpu = model is not None and any(p.is_cuda for p in model.parameters())
    if setup.judge_in_loss and on_gpu:
        what = "judge_in_loss=True makes the host wait for the GPU once per step."
        fix = "judge_in_loss=False, unless an ERROR must act in the same step."
        yield info("judge_in_loss", "guard(judge_in_loss=)", what, fix)
    if setup.misses_ranks:
        what = "Several ranks train, but every rank weighs only its samples."
        fix = "process_group=torch.distributed.group.WORLD."
        yield warn("ranks", "guard(process_group=)", what, fix)


CHECKS = (_check_exponents, _check_training, _check_chains, _check_actions)


def check_rollback(setup: Setup) -> Iterator[Problem]:
    """Yield the parts that a rollback does not restore, and changes that it cannot make."""
    is_asked, name, model = setup.action == "rollback", "rollback_incomplete", setup.trainer.model
    if not is_asked and (setup.action != "auto" or setup.chains != "copied"):
        return
    missing = [part for part in ("model", "optimizer") if getattr(setup.trainer, part) is None]
    if missing:
        what = f'action="rollback" cannot take back what it does not know: {" and ".join(missing)}.'
        yield error(name, "g.attach", what, f"{_attach(missing)} before the first step.")
    if setup.trainer.buffer is None and setup.has_sampler and setup.chains != "kept":
        what = "No replay buffer is attached: a rollback would not take the chains back."
        fix = "g.attach(buffer=...); nothing, if every chain starts afresh."
        if setup.chains == "copied":
            what = "The sampler gets copies of what it returned, and no replay buffer is attached: "
            what += "a rollback would not take these chains back."
            fix = "g.attach(buffer=chains), and chains.copy_(sample(f, chains)), with your names; "
            fix += "or pass what the sampler returned as it is, chains = sample(f, chains)."
        yield warn(name, CHAINS, what, fix)
    if not is_asked:
        return
    others = ("scheduler", "ema", "generators")
    unknown = [part for part in others if not getattr(setup.trainer, part)]
    if unknown:
        what = f"Not attached, so not taken back: {', '.join(unknown)}."
        yield info(name, "g.attach", what, f"{_attach(unknown)}, those that there are.")
    if setup.not_followed:
        what = f"A rollback cannot follow these of its changes: {'; '.join(setup.not_followed)}."
        fix = "g.attach(sgld_steps=20, steps_argument=...), or others by Recovery(ladder=...)."
        yield info("recovery_changes", "guard(recovery=)", what, fix)
    on_gpu = model is not None and any(p.is_cuda for p in model.parameters())
    if on_gpu and torch.backends.cudnn.benchmark:
        where = "torch.backends.cudnn.benchmark"
        what = "cuDNN chooses algorithms by their speed: a step taken again may differ by bits."
        yield info("nondeterministic", where, what, "nothing, unless runs are to agree bit by bit.")


def _attach(names: list[str]) -> str:
    return f"g.attach({', '.join(f'{name}=...' for name in names)})"
