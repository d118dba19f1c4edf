"""The energy module: what it is made of, and what it returns for a batch, tried without a trace."""

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
from torch.nn.utils import parametrize

from ..alerts import Level
from ..trainer import find_energy
from .problem import Problem, Setup, info, some, warn

__all__ = ["of_network", "of_outputs"]

# What a model may raise at a batch that it was not made for.
_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, NotImplementedError)
# Of the gradient of an energy with respect to another sample than its own.
_ROUNDING = 1e-4
_DEGENERATE = 0.1


def _error(name: str, what: str, fix: str, level: Level = Level.ERROR) -> Problem:
    return Problem(level, name, "the energy module", what, fix)


_warn, _info = partial(_error, level=Level.WARN), partial(_error, level=Level.INFO)


def of_network(setup: Setup) -> Iterator[Problem]:
    """Layers that make f(x) depend on more than x, and parameters that do not train."""
    model = setup.trainer.model
    if model is not None:
        yield from _layers(model)
        yield from _parameters(model)
    elif setup.has_sampler:
        yield info(
            "model_unknown",
            "g.attach",
            "The guard does not know the energy module: nothing about the network was checked.",
            "g.attach(model=f), where f is the module that the sampler calls.",
        )


def _layers(model: nn.Module) -> Iterator[Problem]:
    norms, drops, moody = (
        _found(model, kinds, is_busy)
        for kinds, is_busy in (
            (_BatchNorm, lambda layer: layer.training or layer.running_mean is None),
            (_DropoutNd, lambda layer: layer.training and layer.p > 0),
            ((_BatchNorm, _DropoutNd), lambda _: True),
        )
    )
    if norms:
        yield _warn(
            "batch_norm",
            f"Batch normalisation in train mode ({norms}): f(x) depends on the rest of its batch, "
            "and data and negatives have different statistics: their gap is not an energy gap.",
            "no normalisation, as JEM, or GroupNorm or LayerNorm; or eval mode for energies.",
        )
    if drops:
        yield _warn(
            "dropout",
            f"Dropout in train mode ({drops}): every call draws another energy function.",
            "p=0 in the energy, or eval mode for energies.",
        )
    if moody and not model.training:
        yield _info(
            "eval_mode",
            f"In eval mode, with layers that care ({moody}): right for energies, not for a "
            "classifier trained beside them.",
            "f.train() before the loop, if eval mode was left over from an evaluation.",
        )


def _parameters(model: nn.Module) -> Iterator[Problem]:
    parameters = dict(model.named_parameters())
    frozen = [name for name, p in parameters.items() if not p.requires_grad]
    if parameters and len(frozen) == len(parameters):
        yield _error(
            "frozen",
            "No parameter requires a gradient: nothing would train.",
            "f.requires_grad_(True); a sampler may have switched it off and not on again.",
        )
    elif frozen:
        yield _info(
            "frozen",
            f"{len(frozen)} of {len(parameters)} parameters are frozen ({some(frozen)}).",
            "nothing, if that is meant; else f.requires_grad_(True).",
        )
    broken = [name for name, p in parameters.items() if not torch.isfinite(p).all()]
    if broken:
        yield _error(
            "nonfinite_parameters",
            f"{len(broken)} parameters hold NaN or infinity ({some(broken)}).",
            "another checkpoint; this one was written after the run was lost.",
        )
    half = [name for name, p in parameters.items() if p.dtype is torch.float16]
    if half:
        yield _warn(
            "float16",
            f"{len(half)} are float16 ({some(half)}), in which gradients of samples vanish.",
            "float32 parameters under torch.autocast(dtype=torch.bfloat16).",
        )
    spectral = some(name for name, layer in model.named_modules() if _has_spectral_norm(layer))
    if spectral:
        yield _info(
            "spectral_norm",
            f"Spectral normalisation ({spectral}): in train mode every call moves it slightly on.",
            "nothing; snapshots and rollbacks hold its buffers.",
        )


def _found(model: nn.Module, kinds: Any, has: Callable[[Any], bool]) -> str:
    layers = [x for x in model.named_modules() if isinstance(x[1], kinds) and has(x[1])]
    return some(f"{type(layer).__name__} {name}".strip() for name, layer in layers)


def _has_spectral_norm(layer: nn.Module) -> bool:
    """Of the old kind, a hook, or of the new one, a parametrization."""
    new: Any = layer.parametrizations if parametrize.is_parametrized(layer) else {}
    parts = [*layer._forward_pre_hooks.values(), *chain.from_iterable(new.values())]
    return any(type(part).__name__ in ("SpectralNorm", "_SpectralNorm") for part in parts)


def of_outputs(setup: Setup) -> Iterator[Problem]:
    """Shape and type of the energies of ``setup.example``, and what they depend on."""
    model, example = setup.trainer.model, setup.example
    if model is None or example is None:
        return
    if not example.ndim or len(example) < 2 or not example.is_floating_point():
        yield info(
            "example",
            "g.check(example=)",
            f"It is {example.dtype} of shape {tuple(example.shape)}; the model was not tried.",
            "pass a batch of two or more inputs, as the loss gets them.",
        )
        return
    # Neither must a bare call disturb DDP's bookkeeping, nor a small batch compile anew.
    model = getattr(model, "_orig_mod", model)
    model = model.module if isinstance(model, DistributedDataParallel) else model
    with _untouched(model):
        tried = _try(find_energy(model, setup.trainer.energy), example)
    if isinstance(tried, Problem):
        yield tried
        return
    f, again, slopes, single = tried
    wrong = list(_shape(f, len(example), setup.models))
    yield from wrong
    if not wrong:
        yield from _values(f, slopes, setup)
        yield from _randomness(f, again)
        if not setup.models:
            yield from () if slopes is None else _dependence(slopes)
            yield from _single(single, f.ndim)


def _try(
    model: Callable[[Tensor], Any], example: Tensor
) -> tuple[Any, Any, Tensor | None, Any] | Problem:
    """What two calls return, the first energy's gradient, and what a batch of one leads to."""
    x, slopes = example.detach().clone().requires_grad_(), None
    try:
        with torch.enable_grad():
            f, again = model(x), model(x)
            if isinstance(f, Tensor) and f.requires_grad and f.ndim:
                (slopes,) = torch.autograd.grad(f[0].sum(), x, allow_unused=True)
    except _REFUSALS as refusal:
        return _error(
            "model_fails",
            f"Of the example of shape {tuple(example.shape)} it raises "
            f"{type(refusal).__name__}: {refusal}",
            "pass what the loss passes, on its device; a conditional model in a form of x alone.",
        )
    try:
        with torch.no_grad():
            return f, again, slopes, model(x[:1])
    except _REFUSALS as refusal:
        return f, again, slopes, refusal


def _shape(f: object, n: int, models: int) -> Iterator[Problem]:
    if not isinstance(f, Tensor):
        yield _error(
            "not_a_tensor",
            f"It returns a {type(f).__name__}; sampler and loss need one tensor of energies.",
            "return the energy alone, and other outputs from another method.",
        )
    elif not f.ndim or (not models and f.ndim == 1 and len(f) == 1):
        yield _error(
            "mean",
            f"It returns one number for {n} samples; the weights need the energy of each.",
            "return (B,) and take means after the loss, if anywhere.",
        )
    elif not f.is_floating_point():
        yield _error(
            "dtype",
            f"It returns {f.dtype}; energies are real numbers.",
            "return a floating-point tensor.",
        )
    elif models and f.ndim != models + 1:
        yield _error(
            "shape",
            f"It returns shape {tuple(f.shape)} for {n} samples; expected {models} model "
            "dimensions, then the samples.",
            "return (*models, B).",
        )
    elif models:
        return
    elif len(f) != n or (f.ndim > 2 and f.numel() != n):  # trainers squeeze (B, 1, 1, 1)
        yield _error(
            "shape",
            f"It has shape {tuple(f.shape)} for {n} samples; expected (B,), (B, 1), (B, heads).",
            "sum or average what is left of the image, for instance f.flatten(1).sum(1).",
        )
    elif f.ndim == 2 and f.shape[1] > 1:
        yield _warn(
            "heads",
            f"It returns {f.shape[1]} numbers per sample, whose sum is taken for the energy. Of "
            "class logits that is not log p(x).",
            "logits.logsumexp(1) for a classifier, or energy=, the method that returns it; nothing "
            "for an energy with several heads.",
        )


def _values(f: Tensor, slopes: Tensor | None, setup: Setup) -> Iterator[Problem]:
    f = f.detach()
    bad = int((~torch.isfinite(f)).sum())
    if bad:
        yield _error(
            "nonfinite_energies",
            f"{bad} of {f.numel()} energies of the example are NaN or infinite.",
            "look for a division, logarithm or square root inside, or inputs out of range.",
        )
        return
    if slopes is None:
        yield _error(
            "no_gradient",
            "To autograd energies do not depend on the input: a sampler has no gradient to follow.",
            "remove .detach(), .data and no_grad from forward.",
        )
    if setup.models:
        return
    total = setup.sign * f.double().reshape(len(f), -1).sum(1)
    for beta_star in setup.beta_star:
        if beta_star:
            ess = float(1 / torch.softmax(beta_star * total, 0).square().sum() / len(f))
            if ess < _DEGENERATE and len(f) > 1 / _DEGENERATE:
                yield warn(
                    "weights_collapse",
                    "beta_star",
                    f"Energies of the example spread by {float(total.std()):.3g}: at beta_star = "
                    f"{beta_star:g} the effective sample size would be {ess:.1%} of them.",
                    f"beta_star of about {1 / float(total.std()):.2g} or less.",
                )


def _dependence(slopes: Tensor) -> Iterator[Problem]:
    norms = slopes.double().flatten(1).norm(dim=1)
    own, others = float(norms[0]), float(norms[1:].max())
    if others > _ROUNDING * own:
        yield _warn(
            "batch_dependence",
            "An energy changes with the other samples of its batch (gradient "
            f"{others:.2g}, {own:.2g} of its own): chains of one batch pull at each other.",
            "remove what looks across the batch, such as batch norm in train mode.",
        )


def _randomness(f: Tensor, again: Tensor) -> Iterator[Problem]:
    if torch.equal(f, again):
        return
    if torch.allclose(f, again, rtol=1e-3, atol=1e-6, equal_nan=True):
        yield _info(
            "random_energy",
            "Two calls on the same batch return slightly different energies.",
            "nothing: spectral norm's power iteration, or a GPU's order of sums.",
        )
    else:
        yield _warn(
            "random_energy",
            "Two calls on the same batch return different energies.",
            "switch dropout and noise layers off while energies are computed.",
        )


def _single(f: object, dims: int) -> Iterator[Problem]:
    if isinstance(f, Tensor) and f.ndim == dims:
        return
    if isinstance(f, Exception):
        said = f"raises {type(f).__name__}: {f}"
    else:
        said = f"returns shape {tuple(f.shape)}" if isinstance(f, Tensor) else "returns no tensor"
    yield _info(
        "single_sample",
        f"For a batch of one sample it {said}.",
        "squeeze(-1) instead of squeeze(), which drops the batch too; or drop small last batches.",
    )


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
