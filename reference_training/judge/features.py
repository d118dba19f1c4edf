"""Networks whose features and class probabilities judge samples, by what names them."""

from __future__ import annotations

import hashlib
import os
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ebmguard.errors import ConfigError

from ..engine.run_folder import CONFIG
from ..networks import WideResNet
from .inception import Inception
from .stored import load_network

FeatureModule = Callable[[Tensor], tuple[Tensor, Tensor]]
INCEPTION_PREFIX = "inception:"
INCEPTION_FILE = "pt_inception-2015-12-05-6726825d.pth"
INCEPTION_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
"""Of the published file of that name (also distributed as weights-inception-...)."""
FORMS = (
    'expected "own"; the folder of another run; inception:FILE with the published weights '
    f"{INCEPTION_FILE}; or a TorchScript file"
)


@dataclass(frozen=True)
class Features:
    """A network that judges samples.

    Attributes:
        module: images (B, C, H, W), float in [-1, 1] -> features (B, D) and logits (B, K).
        label: what it is, to be printed beside every Inception score and FID.
        comparable: whether these can stand beside published ones of as many samples and images.
        fixed: whether the module stays as it is while a run trains. If not, scores of different
            steps cannot be compared: features of an untrained network are all but equal, and so
            its FID is small.
    """

    module: FeatureModule
    label: str
    comparable: bool
    fixed: bool

    def described(self) -> dict[str, Any]:
        """What stands beside scores in a file."""
        return {
            "features": self.label,
            "features_comparable": self.comparable,
            "features_fixed": self.fixed,
        }


def classifier_features(network: WideResNet) -> FeatureModule:
    """A classifier's penultimate features (B, 64 * width), and its logits (B, classes).

    Not a module: the network in training is not to become a part of anything else.
    """

    def module(x: Tensor) -> tuple[Tensor, Tensor]:
        features = network.features(x)
        return features, network.logits(network.head(features))

    return module


def runs_code(spec: object) -> bool:
    """Whether loading `spec` runs code, as a TorchScript file does."""
    name = str(spec)
    return not (
        name == "own"
        or name.startswith(INCEPTION_PREFIX)
        or os.path.isfile(os.path.join(name, CONFIG))  # False, and no error, for any text
    )


def load_features(spec: str, device: torch.device, network: WideResNet | None = None) -> Features:
    """The network that `spec` names.

    Args:
        spec: ``own``, the run's classifier, which may be in training; the folder of a run, whose
            classifier is best by validation accuracy, and compares runs with each other;
            ``inception:FILE``, the published network with the user's weights; or a TorchScript
            file of a :attr:`Features.module`, which runs code of the user's.
        device: where the features are computed.
        network: the run's own, where there is one.

    Raises:
        ConfigError: `spec` names nothing that can be loaded.
    """
    if spec == "own" and network is not None:
        label = "the run's own classifier (comparable within one evaluation only)"
        return Features(classifier_features(network), label, False, fixed=False)
    file = Path(spec.removeprefix(INCEPTION_PREFIX))
    if spec.startswith(INCEPTION_PREFIX):
        return _inception(file, device)
    if file.is_file():
        return _torchscript(file, device)
    if not (file / CONFIG).is_file():
        raise ConfigError(f"features is {spec!r}; {FORMS}")
    other, step = load_network(file, "best", device)
    label = f"the classifier of the run {file} at step {step:,} (comparable between runs here)"
    return Features(classifier_features(other), label, False, fixed=True)


def _inception(file: Path, device: torch.device) -> Features:
    if not file.is_file():
        raise ConfigError(
            f"the file of the features is {file}, which is not there; {INCEPTION_FILE} is not part "
            "of this package: fetch it once from where you trust it"
        )
    wrong = (AttributeError, KeyError, RuntimeError, TypeError, EOFError, pickle.UnpicklingError)
    try:
        module = Inception(torch.load(file, map_location=device, weights_only=True))
    except wrong as error:
        raise ConfigError(
            f"{file} does not hold the weights of {INCEPTION_FILE}: {error}"
        ) from error
    digest = _digest(file)
    published = digest == INCEPTION_SHA256
    name = "Inception 2015-12-05" if published else "other weights of the Inception network"
    return Features(module, f"{name} (sha256 {digest[:8]})", published, fixed=True)


def _torchscript(file: Path, device: torch.device) -> Features:
    with warnings.catch_warnings():
        # Deprecated, but the form in which feature networks are handed around.
        warnings.filterwarnings("ignore", "`torch.jit.load` is deprecated")
        try:
            module: nn.Module = torch.jit.load(  # type: ignore[no-untyped-call]
                str(file), map_location=device
            )
        except RuntimeError as error:
            raise ConfigError(f"{file} is not a TorchScript file; {FORMS}: {error}") from error
    for parameter in module.parameters():  # it has no requires_grad_
        parameter.requires_grad_(False)
    label = f"TorchScript file {file.name} (sha256 {_digest(file)[:8]})"
    return Features(module.eval(), label, False, fixed=True)


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
