"""What the energy module returns for a batch: tried once, without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..alerts import Level
from .problem import Problem
from .setup import Setup

__all__ = ["of_outputs"]

_WHERE = "the energy module"
# What a model may raise at a batch that it was not made for.
_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, NotImplementedError)
# Gradients of one sample's energy with respect to another sample, relative to its own, below which
# they are rounding.
_ROUNDING = 1e-4
_DEGENERATE = 0.1


def of_outputs(setup: Setup) -> Iterator[Problem]:
    """Shape and type of the energies of ``setup.example``, and what they depend on."""
    example = setup.example
    if setup.model is None or example is None:
        return
    # Neither must a bare call disturb DDP's bookkeeping, nor a small batch compile anew.
    model = getattr(setup.model, "_orig_mod", setup.model)
    model = model.module if isinstance(model, DistributedDataParallel) else model
    if not example.ndim or len(example) < 2 or not example.is_floating_point():
        yield Problem(
            Level.INFO,
            "example",
            "g.check(example=)",
            f"The example has shape {tuple(example.shape)} and type {example.dtype}; the model was "
            "not tried.",
            "pass a batch of two or more inputs, as the loss gets them.",
        )
        return
    with _untouched(model):
        tried = _try(model, example)
    if isinstance(tried, Problem):
        yield tried
        return
    wrong = list(_shape(tried, len(example), setup.models))
    yield from wrong
    if not wrong:
        yield from _values(tried, setup)
        yield from _randomness(tried)
        if not setup.models:
            yield from _dependence(tried)
            yield from _single(tried)


@dataclass(frozen=True)
class _Tried:
    output: Any
    again: Any
    slopes: Tensor | None
    single: Any


def _try(model: nn.Module, example: Tensor) -> _Tried | Problem:
    x = example.detach().clone().requires_grad_()
    try:
        with torch.enable_grad():
            output, again = model(x), model(x)
            slopes = None
            if isinstance(output, Tensor) and output.requires_grad and output.ndim:
                (slopes,) = torch.autograd.grad(output[0].sum(), x, allow_unused=True)
    except _REFUSALS as error:
        return Problem(
            Level.ERROR,
            "model_fails",
            _WHERE,
            f"It cannot be called on the example of shape {tuple(example.shape)}: "
            f"{type(error).__name__}: {error}",
            "pass what the loss passes, on the model's device; a conditional model needs a form "
            "that takes x alone.",
        )
    try:
        with torch.no_grad():
            single = model(x[:1])
    except _REFUSALS as error:
        single = error
    return _Tried(output, again, slopes, single)


def _shape(tried: _Tried, n: int, models: int) -> Iterator[Problem]:
    f = tried.output
    if not isinstance(f, Tensor):
        yield Problem(
            Level.ERROR,
            "not_a_tensor",
            _WHERE,
            f"It returns a {type(f).__name__}; the sampler and the loss need one tensor of "
            "energies.",
            "return the energy alone, and other outputs from another method.",
        )
    elif not f.ndim or (not models and f.ndim == 1 and len(f) == 1):
        yield Problem(
            Level.ERROR,
            "mean",
            _WHERE,
            f"It returns one number for {n} samples: a mean or a sum. The weights need the energy "
            "of each sample.",
            "return (B,) and take means after the loss, if anywhere.",
        )
    elif not f.is_floating_point():
        yield Problem(
            Level.ERROR,
            "dtype",
            _WHERE,
            f"It returns {f.dtype}; energies are real numbers.",
            "return a floating-point tensor.",
        )
    elif models:
        if f.ndim != models + 1:
            yield Problem(
                Level.ERROR,
                "shape",
                _WHERE,
                f"It returns shape {tuple(f.shape)} for {n} samples; an ensemble's energies are "
                f"{models} model dimensions and then the samples.",
                "return (*models, B).",
            )
    elif f.ndim > 2 or len(f) != n:
        yield Problem(
            Level.ERROR,
            "shape",
            _WHERE,
            f"It returns shape {tuple(f.shape)} for {n} samples; expected (B,), (B, 1) or "
            "(B, heads).",
            "sum or average what is left of the image, for instance f.flatten(1).sum(1).",
        )
    elif f.ndim == 2 and f.shape[1] > 1:
        yield Problem(
            Level.WARN,
            "heads",
            _WHERE,
            f"It returns {f.shape[1]} numbers per sample, whose sum is taken for the energy. Of "
            "class logits that is not log p(x).",
            "logits.logsumexp(1) for a classifier; nothing for an energy with several heads.",
        )


def _values(tried: _Tried, setup: Setup) -> Iterator[Problem]:
    f = tried.output.detach()
    bad = int((~torch.isfinite(f)).sum())
    if bad:
        yield Problem(
            Level.ERROR,
            "nonfinite_energies",
            _WHERE,
            f"{bad} of {f.numel()} energies of the example are NaN or infinite.",
            "look for a division, logarithm or square root inside, or inputs out of range.",
        )
        return
    if tried.slopes is None:
        yield Problem(
            Level.ERROR,
            "no_gradient",
            _WHERE,
            "The energies do not depend on the input as autograd sees it, so that a sampler has no "
            "gradient to follow: something inside detaches, or runs under no_grad.",
            "remove .detach(), .data and no_grad from forward.",
        )
    if setup.models:
        return
    total = setup.sign * f.double().flatten(1).sum(1) if f.ndim > 1 else setup.sign * f.double()
    for beta_star in setup.beta_star:
        if beta_star:
            weights = torch.softmax(beta_star * total, 0)
            ess = float(1 / weights.square().sum() / len(weights))
            if ess < _DEGENERATE and len(weights) > 1 / _DEGENERATE:
                yield Problem(
                    Level.WARN,
                    "weights_collapse",
                    "beta_star",
                    f"Energies spread by {float(total.std()):.3g} over the example; at beta_star = "
                    f"{beta_star:g} the effective sample size of so many negatives would be "
                    f"{ess:.1%} of them.",
                    f"beta_star of about {1 / float(total.std()):.2g} or less.",
                )


def _dependence(tried: _Tried) -> Iterator[Problem]:
    if tried.slopes is not None:
        norms = tried.slopes.double().flatten(1).norm(dim=1)
        others = float(norms[1:].max())
        if others > _ROUNDING * float(norms[0]):
            yield Problem(
                Level.WARN,
                "batch_dependence",
                _WHERE,
                "The energy of a sample changes with the other samples of its batch (gradient "
                f"{others:.2g} with respect to another one, {float(norms[0]):.2g} with respect to "
                "itself), so that chains of one batch pull at each other.",
                "remove what looks across the batch, such as batch normalisation in train mode or "
                "minibatch statistics.",
            )


def _randomness(tried: _Tried) -> Iterator[Problem]:
    same = torch.equal(tried.output, tried.again)
    close = torch.allclose(tried.output, tried.again, rtol=1e-3, atol=1e-6, equal_nan=True)
    if not same:
        yield Problem(
            Level.INFO if close else Level.WARN,
            "random_energy",
            _WHERE,
            "Two calls on the same batch return different energies"
            + (", by rounding or by a buffer that moves." if close else "."),
            "nothing, if the differences are this small: spectral norm's power iteration, or a "
            "GPU's order of sums."
            if close
            else "switch dropout and noise layers off while energies are computed.",
        )


def _single(tried: _Tried) -> Iterator[Problem]:
    f = tried.single
    if isinstance(f, Exception):
        said = f"raises {type(f).__name__}: {f}"
    elif isinstance(f, Tensor) and f.ndim == tried.output.ndim:
        return
    else:
        said = f"returns shape {tuple(f.shape)}" if isinstance(f, Tensor) else "returns no tensor"
    yield Problem(
        Level.INFO,
        "single_sample",
        _WHERE,
        f"For a batch of one sample it {said}.",
        "squeeze(-1) or flatten in the place of squeeze(), which drops the batch too; or drop the "
        "last, small batch of an epoch.",
    )


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Put back what a call in train mode changes: buffers and random generators."""
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
