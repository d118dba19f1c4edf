"""Checks of the energy module: its layers, its parameters, and its output for a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.spectral_norm import SpectralNorm

from ..alerts import Level
from ..trainer import find_energy
from .problem import Problem, Setup, brief, info, warn

__all__ = ["CHECKS"]

# The errors of a model whose batch does not fit.
_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, NotImplementedError)
# The largest gradient of an energy with respect to other samples, relative to its sample's.
_ROUNDING = 1e-4
_DEGENERATE = 0.1


def _error(name: str, what: str, fix: str, level: Level = Level.ERROR) -> Problem:
    return Problem(level, name, "the energy module", what, fix)


_warn, _info = partial(_error, level=Level.WARN), partial(_error, level=Level.INFO)


def _check_layers(setup: Setup) -> Iterator[Problem]:
    """Yield layers that make f(x) depend on more than x."""
    model = setup.trainer.model
    if model is None:
        if setup.has_sampler:
            what = "The guard does not know the energy module: nothing about the network was "
            fix = "g.attach(model=f), where f is the module that the sampler calls."
            yield info("model_unknown", "g.attach", f"{what}checked.", fix)
        return
    norms = _layers(model, _BatchNorm, lambda layer: layer.training or layer.running_mean is None)
    drops = _layers(model, _DropoutNd, lambda layer: layer.training and layer.p > 0)
    if norms:
        what = f"Batch normalisation in train mode ({norms}): f(x) depends on the rest of its "
        what += "batch, and the gap between data and negatives is not one of energies."
        fix = "no normalisation, as JEM, or GroupNorm or LayerNorm"
        if _layers(
            model, _BatchNorm, lambda layer: layer.training and layer.running_mean is not None
        ):
            what += " Negatives, and every step of the sampler, move its running statistics, which "
            what += "eval mode then takes for those of the data."
            fix += "; or `for m in norms: m.momentum = 0.0` before the sampler and f(negatives), "
            fix += "and `= 0.1` again before f(data)"
        yield _warn("batch_norm", what, f"{fix}.")
    if drops:
        what = f"Dropout in train mode ({drops}): every call draws another energy function."
        yield _warn("dropout", what, "p=0 in the energy, or eval mode for energies.")
    modal = _layers(model, (_BatchNorm, _DropoutNd), lambda _: not model.training)
    if modal:
        what = f"In eval mode, with layers that care ({modal}): right for energies, not for a "
        what += "classifier trained beside them."
        fix = "f.train() before the loop, if eval mode was left over from an evaluation."
        yield _info("eval_mode", what, fix)


def _layers(model: nn.Module, kinds: Any, has: Callable[[Any], bool]) -> str:
    layers = [x for x in model.named_modules() if isinstance(x[1], kinds) and has(x[1])]
    return brief(f"{type(layer).__name__} {name}".strip() for name, layer in layers)


def _check_parameters(setup: Setup) -> Iterator[Problem]:
    """Yield parameters that do not train, or not well."""
    model = setup.trainer.model
    if model is None:
        return
    parameters = dict(model.named_parameters())
    frozen = [name for name, p in parameters.items() if not p.requires_grad]
    if parameters and len(frozen) == len(parameters):
        what = "No parameter requires a gradient: nothing would train."
        fix = "f.requires_grad_(True); a sampler may have switched it off and not on again."
        yield _error("frozen", what, fix)
    elif frozen:
        what = f"{len(frozen)} of {len(parameters)} parameters are frozen ({brief(frozen)})."
        yield _info("frozen", what, "nothing, if that is meant; else f.requires_grad_(True).")
    reads = {} if setup.is_running else parameters
    broken = [name for name, p in reads.items() if not torch.isfinite(p).all()]
    if broken:
        what = f"{len(broken)} parameters hold NaN or infinity ({brief(broken)})."
        fix = "another checkpoint; this one was written after the run was lost."
        yield _error("nonfinite_parameters", what, fix)
    half = [name for name, p in parameters.items() if p.dtype is torch.float16]
    if half:
        what = f"{len(half)} are float16 ({brief(half)}), in which gradients of samples vanish."
        yield _warn("float16", what, "float32 parameters, and autocast to bfloat16.")
    spectral = brief(name for name, layer in model.named_modules() if _has_spectral_norm(layer))
    if spectral:
        what = f"Spectral normalisation ({spectral}): in train mode every call moves it a little."
        yield _info("spectral_norm", what, "nothing; snapshots and rollbacks hold its buffers.")


def _has_spectral_norm(layer: nn.Module) -> bool:
    """Return whether a layer has the norm as a hook, which is the old kind, or parametrized."""
    new: Any = layer.parametrizations if parametrize.is_parametrized(layer) else {}
    parts = [*layer._forward_pre_hooks.values(), *chain.from_iterable(new.values())]
    return any(isinstance(part, SpectralNorm | parametrizations._SpectralNorm) for part in parts)


def _check_outputs(setup: Setup) -> Iterator[Problem]:
    """Check shape and type of the energies of ``setup.example``, and their dependences."""
    model, example = setup.trainer.model, setup.example
    if model is None or example is None:
        return
    shape, slopes = tuple(example.shape), None
    if not example.ndim or len(example) < 2 or not example.is_floating_point():
        what = f"It is {example.dtype} of shape {shape}; the model was not tried."
        fix = "pass a batch of two or more inputs, as the loss gets them."
        yield info("example", "g.check(example=)", what, fix)
        return
    # The bare model is called, so that DDP's counts stay and a small batch compiles nothing.
    model = getattr(model, "_orig_mod", model)
    model = model.module if isinstance(model, DistributedDataParallel) else model
    energy, x = find_energy(model, setup.trainer.energy), example.detach().clone().requires_grad_()
    try:
        with _untouched(model), torch.enable_grad():
            f, again = energy(x), energy(x)
            if isinstance(f, Tensor) and f.requires_grad and f.ndim:
                (slopes,) = torch.autograd.grad(f[0].sum(), x, allow_unused=True)
    except _REFUSALS as refusal:
        what = f"Of the example of shape {shape} it raises {type(refusal).__name__}: {refusal}"
        fix = "pass what the loss passes, on its device; a conditional model as a function of x."
        yield _error("model_fails", what, fix)
        return
    wrong = _shape(f, len(x), setup.models)
    if wrong is not None:
        yield wrong
        return
    yield from _values(f, slopes, setup)
    if not torch.equal(f, again):
        say, fix = _warn, "switch dropout and noise layers off while energies are computed."
        if torch.allclose(f, again, rtol=1e-3, atol=1e-6, equal_nan=True):
            say, fix = _info, "nothing: spectral norm's power iteration, or a GPU's order of sums."
        yield say("random_energy", "Two calls on the same batch return different energies.", fix)
    if setup.models:
        return
    if slopes is not None:
        norms = slopes.cpu().double().flatten(1).norm(dim=1)
        self_norm, others = float(norms[0]), float(norms[1:].max())
        if others > _ROUNDING * self_norm:
            what = f"An energy changes with the other samples of its batch (gradient {others:.2g} "
            what += f"against {self_norm:.2g} for its sample): chains of one batch affect others."
            fix = "remove what looks across the batch, such as batch norm in train mode."
            yield _warn("batch_dependence", what, fix)
    with _untouched(model), torch.no_grad():
        problem = _single_sample_problem(energy, x[:1], f.ndim)
    if problem:
        fix = "squeeze(-1), since squeeze() drops the batch too; or drop small last batches."
        yield _info("single_sample", f"For a batch of one sample it {problem}.", fix)


def _shape(f: object, n: int, models: int) -> Problem | None:
    if not isinstance(f, Tensor):
        what = f"It returns a {type(f).__name__}; sampler and loss need one tensor of energies."
        fix = "return the energy alone, and other outputs from another method."
        return _error("not_a_tensor", what, fix)
    shape = tuple(f.shape)
    if not f.ndim or (not models and shape == (1,)):
        what = f"It returns one number for {n} samples; the weights need one energy per sample."
        return _error("mean", what, "return (B,) and take means after the loss, if anywhere.")
    if not f.is_floating_point():
        what = f"It returns {f.dtype}; energies are real numbers."
        return _error("dtype", what, "return a floating-point tensor.")
    if models and f.ndim != models + 1:
        what = f"It returns shape {shape} for {n} samples; expected {models} model dimensions, "
        return _error("shape", f"{what}then the samples.", "return (*models, B).")
    if models:
        return None
    if len(f) != n or (f.ndim > 2 and f.numel() != n):  # trainers squeeze (B, 1, 1, 1)
        what = f"It has shape {shape} for {n} samples; expected (B,), (B, 1), (B, heads)."
        fix = "sum or average what is left of the image, for instance f.flatten(1).sum(1)."
        return _error("shape", what, fix)
    if f.ndim == 2 and f.shape[1] > 1:
        what = f"It returns {f.shape[1]} numbers per sample, whose sum is taken for the energy. "
        what += "Of class logits that is not log p(x)."
        fix = "logits.logsumexp(1) for a classifier, or energy=, the method that returns it; "
        return _warn("heads", what, f"{fix}nothing for an energy with several heads.")
    return None


def _values(f: Tensor, slopes: Tensor | None, setup: Setup) -> Iterator[Problem]:
    f = f.detach()
    bad = int((~torch.isfinite(f)).sum())
    if bad:
        what = f"{bad} of {f.numel()} energies of the example are NaN or infinite."
        fix = "look for a division, logarithm or square root inside, or inputs out of range."
        yield _error("nonfinite_energies", what, fix)
        return
    if slopes is None:
        what = "Energies do not depend on the input: a sampler has no gradient to follow."
        yield _error("no_gradient", what, "remove .detach(), .data and no_grad from forward.")
    if setup.models:
        return
    total = setup.sign * f.cpu().double().reshape(len(f), -1).sum(1)
    spread = float(total.std())
    for beta_star in filter(None, setup.beta_star):
        ess = float(1 / torch.softmax(beta_star * total, 0).square().sum() / len(f))
        if ess < _DEGENERATE and len(f) > 1 / _DEGENERATE:
            what = f"Energies of the example spread by {spread:.3g}: at beta_star = "
            what += f"{beta_star:g} the effective sample size would be {ess:.1%} of them."
            fix = f"beta_star of about {1 / spread:.2g} or less."
            yield warn("weights_collapse", "beta_star", what, fix)


def _single_sample_problem(energy: Callable[[Tensor], Any], one: Tensor, dims: int) -> str:
    """Return in words what goes wrong with a batch of one; empty if nothing does."""
    try:
        f = energy(one)
    except _REFUSALS as refusal:
        return f"raises {type(refusal).__name__}: {refusal}"
    if not isinstance(f, Tensor):
        return "returns no tensor"
    return "" if f.ndim == dims else f"returns shape {tuple(f.shape)}"


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(device.index or 0 for device in devices)):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in model.named_buffers():
                    if name in buffers and value.shape == buffers[name].shape:
                        value.copy_(buffers[name])


CHECKS = (_check_layers, _check_parameters, _check_outputs)
