"""What a JEM run is made of besides its loop: network, precision, evaluation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ebmguard.errors import ConfigError

from ..data import ImageData
from ..networks import WideResNet
from ..ranks import Ranks
from .config import JemConfig
from .evaluation import Evaluator, SampleQuality, load_features


class Classifier(nn.Module):
    """The logits of a network as a module of their own, to be compiled and spread over ranks."""

    def __init__(self, network: WideResNet) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> logits (B, classes)."""
        return self.network.classify(x)


def make_network(config: JemConfig, data: ImageData, device: torch.device) -> WideResNet:
    """The run's network as its seed initialises it; PyTorch's global generator is left alone."""
    settings = config.settings
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = WideResNet(
            in_channels=data.sample_shape[0],
            classes=data.classes,
            depth=settings.depth,
            width=settings.width,
            early_stride=settings.early_stride,
            autocast=torch.bfloat16 if config.precision == "bfloat16" else None,
        )
    # channels_last is the faster memory layout for these convolutions, on CPUs and GPUs alike.
    network.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network


def make_evaluator(
    config: JemConfig, data: ImageData, network: WideResNet, device: torch.device
) -> Evaluator:
    """What an evaluation of the run measures.

    Raises:
        ConfigError: the network of the features cannot be had.
    """
    settings = config.settings
    quality = None
    if settings.quality_samples and config.has_samples:
        features = load_features(
            config.features, sha256=config.features_sha256, network=network, device=device
        )
        quality = SampleQuality(features, data.train_x, data.scale, device)
    return Evaluator(data, noise_std=settings.eval_noise, quality=quality)


def set_precision(config: JemConfig) -> None:
    """The arithmetic of float32 convolutions and products on a GPU, for this process."""
    is_tf32 = config.precision == "tf32"
    torch.set_float32_matmul_precision("high" if is_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = is_tf32
    # Shapes are the same in every step: let cuDNN time its kernels once.
    torch.backends.cudnn.benchmark = True


def check_run(config: JemConfig, data: ImageData, ranks: Ranks) -> None:
    """Refuse what the data or the ranks do not allow.

    Raises:
        ConfigError: names what is wrong and what was expected.
    """
    settings = config.settings
    problems = []
    smallest = min(settings.n_pos, settings.n_neg, settings.n_labelled or settings.n_pos)
    if smallest < ranks.world:
        problems.append(f"{smallest} images or samples a step for {ranks.world} processes")
    if config.p_x_y_weight and ranks.world > 1:
        problems.append("p_x_y_weight weighs samples within their class: expected one process")
    needs_classes = config.p_x_y_weight or config.class_conditional
    if needs_classes and ranks.share(settings.buffer_size) % data.classes:
        problems.append(
            f"buffer_size is {settings.buffer_size} for {ranks.world} processes, expected parts "
            f"that {data.classes} classes can share equally"
        )
    if problems:
        raise ConfigError("the settings do not make a run:\n  " + "\n  ".join(problems))


def of_class(logits: Tensor, labels: Tensor) -> Tensor:
    """f(x, y), the logit of each label: (B, classes), (B,) -> (B,)."""
    return logits.gather(1, labels[:, None]).squeeze(1)
