"""What the energy module is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import parametrize

from ..alerts import Level
from .problem import Problem, some
from .setup import Setup

__all__ = ["of_network"]

_WHERE = "the energy module"


def of_network(setup: Setup) -> Iterator[Problem]:
    """Layers that make f(x) depend on more than x, and parameters that do not train."""
    model = setup.model
    if model is None:
        if setup.has_sampler:
            yield Problem(
                Level.INFO,
                "model_unknown",
                "g.attach",
                "The guard does not know the energy module, so that nothing about the network was "
                "checked.",
                "g.attach(model=f), where f is the module that the sampler calls.",
            )
        return
    yield from _batch_norm(model)
    yield from _dropout(model)
    yield from _mode(model)
    yield from _parameters(model)
    yield from _spectral_norm(model)


def _batch_norm(model: nn.Module) -> Iterator[Problem]:
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None)
    }
    if layers:
        yield Problem(
            Level.WARN,
            "batch_norm",
            _WHERE,
            f"Batch normalisation in train mode ({_layers(layers)}): f(x) depends on the other "
            "samples of its batch, and data and negatives, which are forwarded apart, are measured "
            "against different statistics. The gap between them is then not an energy gap.",
            "no normalisation, as JEM, or GroupNorm or LayerNorm; or keep these layers in eval "
            "mode while energies are computed.",
        )


def _dropout(model: nn.Module) -> Iterator[Problem]:
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, _DropoutNd) and layer.training and layer.p > 0
    }
    if layers:
        yield Problem(
            Level.WARN,
            "dropout",
            _WHERE,
            f"Dropout in train mode ({_layers(layers)}): every call draws another energy function, "
            "so that the negatives come from another one than the loss compares them in.",
            "p=0 in the energy, or keep these layers in eval mode while energies are computed.",
        )


def _mode(model: nn.Module) -> Iterator[Problem]:
    if model.training:
        return
    moody = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm | _DropoutNd)
    }
    if moody:
        yield Problem(
            Level.INFO,
            "eval_mode",
            _WHERE,
            f"It is in eval mode, and has layers that care ({_layers(moody)}). That is right for "
            "energies; a classifier trained beside them then trains without these layers' effect.",
            "f.train() before the loop, if eval mode was left over from an evaluation.",
        )


def _parameters(model: nn.Module) -> Iterator[Problem]:
    parameters = dict(model.named_parameters())
    frozen = [name for name, p in parameters.items() if not p.requires_grad]
    if parameters and len(frozen) == len(parameters):
        yield Problem(
            Level.ERROR,
            "frozen",
            _WHERE,
            "No parameter requires a gradient: nothing would train.",
            "f.requires_grad_(True); a sampler may have switched it off and not on again.",
        )
    elif frozen:
        yield Problem(
            Level.INFO,
            "frozen",
            _WHERE,
            f"{len(frozen)} of {len(parameters)} parameters are frozen ({some(frozen)}).",
            "nothing, if that is meant; else f.requires_grad_(True).",
        )
    broken = [name for name, p in parameters.items() if not bool(torch.isfinite(p).all())]
    if broken:
        yield Problem(
            Level.ERROR,
            "nonfinite_parameters",
            _WHERE,
            f"{len(broken)} parameters hold NaN or infinity ({some(broken)}).",
            "load another checkpoint; this one was written after the run was lost.",
        )
    half = [name for name, p in parameters.items() if p.dtype is torch.float16]
    if half:
        yield Problem(
            Level.WARN,
            "float16",
            _WHERE,
            f"{len(half)} parameters are float16 ({some(half)}): gradients with respect to "
            "samples are small, and vanish in it.",
            "float32 parameters under torch.autocast(dtype=torch.bfloat16).",
        )


def _spectral_norm(model: nn.Module) -> Iterator[Problem]:
    layers = [
        name
        for name, layer in model.named_modules()
        if any(type(hook).__name__ == "SpectralNorm" for hook in _hooks(layer))
        or (
            parametrize.is_parametrized(layer)
            and any(
                type(each).__name__ == "_SpectralNorm"
                for chain in layer.parametrizations.values()
                for each in chain
            )
        )
    ]
    if layers:
        yield Problem(
            Level.INFO,
            "spectral_norm",
            _WHERE,
            f"Spectral normalisation ({some(layers)}): in train mode every call moves its power "
            "iteration on, so that the same x has slightly different energies in two calls.",
            "nothing; snapshots and rollbacks hold its buffers. eval mode keeps them still.",
        )


def _hooks(layer: nn.Module) -> Iterable[object]:
    return layer._forward_pre_hooks.values()


def _layers(found: Mapping[str, nn.Module]) -> str:
    return some(f"{type(layer).__name__} {name}".strip() for name, layer in found.items())
