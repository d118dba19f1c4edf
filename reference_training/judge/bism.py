"""`ebmguard evaluate bism`: samples and latents of a deep latent-variable model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ebmguard.errors import ConfigError

from ..bism.config import DeepConfig
from ..bism.deep import DeepModel, framed, make_model, pixels
from ..bism.deep_train import reconstruction_error, short_runs
from ..data import ImageData
from ..device import describe
from ..engine.checkpoints import load_all_ranks
from ..engine.run_folder import read_config
from ..plots.images import save_sample_figures
from . import evaluate as command
from .chains import BATCH, HOTTEST, SEED, anneal
from .config import EvaluateBism
from .features import load_features
from .quality import SampleQuality, scores_table

SHOWN = 64
"""Samples in a picture."""
LONGER = 20
_WORDS = {
    "joint": "samples, Langevin in (v, h)",
    "marginal": "samples, Langevin in v",
    "cool": "samples, Langevin in v without annealing",
    "from_images": "samples, h of training images",
    "short_run": "samples, short runs from noise",
    "long_run": "samples, short runs gone on to 20 times their length",
    "held_out": "held-out images",
    "noise": "where chains start",
}


@dataclass(frozen=True)
class Sampler:
    """Annealed chains of a trained model, at whose noise `held` it is the density."""

    model: DeepModel
    data: ImageData
    held: float
    steps: int
    rng: torch.Generator
    hottest: float = HOTTEST

    def starts(self, count: int) -> Tensor:
        """v around 1/2, where chains start: ``(count, C, H, W)``, with the frame."""
        shape = pixels(self.data, self.data.train_x[:1]).shape[1:]
        return torch.randn((count, *shape), generator=self.rng, device=self.rng.device) + 0.5

    def marginal(self, count: int) -> Tensor:
        """Chains in v; at each step h is drawn anew from the posterior, where there is one."""
        return self._chains(self.model.log_density(self.rng), self.starts(count))

    def joint(self, count: int) -> Tensor:
        """Chains in (v, h) of a model with real latents."""
        v, like = self.starts(count), self.model.means(pixels(self.data, self.data.train_x[:1]))
        shape, size = v.shape[1:], v[0].numel()
        h = 0.5 + torch.randn((count, like.shape[1]), generator=self.rng, device=v.device)

        def f(x: Tensor) -> Tensor:
            return -self.model.network.energy(x[:, :size].view(-1, *shape), x[:, size:])

        return self._chains(f, torch.cat((v.flatten(1), h), 1))[:, :size].view(-1, *shape)

    def given(self, h: Tensor) -> Tensor:
        """Chains in v at fixed h, ``(count, hidden)``."""
        return self._chains(lambda v: -self.model.network.energy(v, h), self.starts(len(h)))

    def _chains(self, f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return anneal(f, x, self.steps, self.held, self.rng, self.hottest)


def load_run(
    path: Path, device: torch.device, root: str | None
) -> tuple[DeepConfig, DeepModel, ImageData, int]:
    """Settings, model and data of a run folder, and the updates that it was trained for."""
    stored = read_config(path)
    if "langevin_steps" not in stored:
        raise ConfigError(f"{path} holds no run of `ebmguard train bism deep`")
    config = DeepConfig(out=path, resume=True, data_root=root).resumed(stored)
    step, (first, *_) = load_all_ranks(path / "checkpoints")
    data = config.load_data().to(device)
    model = make_model(config, data)
    model.network.load_state_dict(first["network"])
    if model.posterior is not None:
        model.posterior.load_state_dict(first["update"]["posterior"])
    return config, model, data, step


def as_images(data: ImageData, v: Tensor) -> Tensor:
    """What a model sees as images in [-1, 1], without the frame."""
    _, height, width = data.sample_shape
    (top, _), (left, _) = framed(height), framed(width)
    return 2 * v[..., top : top + height, left : left + width] - 1


def evaluate(config: EvaluateBism, device: torch.device) -> dict[str, Any]:
    """What evaluation.json holds."""
    trained, model, data, step = load_run(config.run, device, config.data_root)
    assert config.features is not None
    features = load_features(config.features, device)
    quality = SampleQuality(features, data)
    rng = torch.Generator(device).manual_seed(SEED)
    sampler = Sampler(model, data, trained.settings.held, config.chain_steps, rng)
    kinds: dict[str, Callable[[int], Tensor]] = {
        "marginal": sampler.marginal,
        "cool": replace(sampler, hottest=1.0).marginal,
    }
    latents: Callable[[Tensor], Tensor] | None = None if model.posterior is None else model.means
    given = sampler.given
    results: dict[str, Any] = {
        "data": data.name,
        "image_size": data.sample_shape[-1],
        "model": trained.model,
        "step": step,
        "chain_steps": config.chain_steps,
        "device": describe(device),
        "parameters": sum(p.numel() for p in model.network.parameters()),
    }
    if trained.is_short_run:
        runs = short_runs(trained, data, model.network, rng)
        longer = replace(runs, steps=LONGER * runs.steps)
        kinds = {"short_run": runs.samples, "long_run": longer.samples}
        latents, given = runs.latents, runs.given
        results["reconstruction_error"] = reconstruction_error(runs, data)
    elif trained.posterior == "gaussian" and latents:
        kinds["joint"] = sampler.joint
    pictures: dict[str, Tensor] = {}
    if latents:
        kinds["from_images"] = partial(from_images, data, latents, given, rng)
        h = latents(pixels(data, data.test_x[:4]))
        pictures["conditional"] = as_images(data, given(h.repeat_interleave(8, 0)))
        way = torch.linspace(0, 1, 8, device=device)[:, None]
        pictures["interpolated"] = as_images(data, given(torch.lerp(h[0], h[1], way)))
        results["accuracy"] = {
            "latents": linear_accuracy(data, lambda x: latents(pixels(data, x))),
            "pixels": linear_accuracy(data, lambda x: data.scale(x).flatten(1)),
        }
    counts = [min(BATCH, config.samples - i) for i in range(0, config.samples, BATCH)]
    found = {k: as_images(data, torch.cat([draw(n) for n in counts])) for k, draw in kinds.items()}
    others = {
        "held_out": data.scale(data.test_x[: config.samples]),
        "noise": as_images(data, sampler.starts(config.samples)),
    }
    results["scores"] = {k: quality.measure(x) for k, x in (found | others).items()}
    shown = {k: x[:SHOWN] for k, x in found.items()} | pictures
    save_sample_figures(config.run / "figures", shown)
    return results | quality.described()


def from_images(
    data: ImageData,
    latents: Callable[[Tensor], Tensor],
    given: Callable[[Tensor], Tensor],
    rng: torch.Generator,
    count: int,
) -> Tensor:
    """Samples at the latents of training images."""
    rows = torch.randint(len(data.train_x), (count,), generator=rng, device=rng.device)
    return given(latents(pixels(data, data.train_x[rows])))


def linear_accuracy(data: ImageData, inputs: Callable[[Tensor], Tensor]) -> float:
    """Accuracy on test images of logistic regression on what stands for the training images.

    Args:
        data: labelled.
        inputs: bytes ``(B, C, H, W)`` to ``(B, D)``.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def of(images: Tensor) -> Any:
        parts = [inputs(part).cpu() for part in torch.split(images, BATCH)]
        return torch.cat(parts).double().numpy()

    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    classifier.fit(of(data.train_x), data.train_y.cpu().numpy())
    return float(classifier.score(of(data.test_x), data.test_y.cpu().numpy()))


def table(results: Mapping[str, Any]) -> str:
    """The results for people."""
    about = (
        "{model} model of {data} at {image_size}x{image_size}, {parameters:,} parameters, after "
        "{step:,} updates; chains of {chain_steps} steps"
    ).format(**results)
    scores = results["scores"]
    rows = {words: scores[name] for name, words in _WORDS.items() if name in scores}
    lines = [about, "", scores_table("", rows, results)]
    if found := results.get("accuracy"):
        lines.append(
            f"linear classifier: {found['latents']:.1%} of the test images by latents, "
            f"{found['pixels']:.1%} by pixels"
        )
    if (error := results.get("reconstruction_error")) is not None:
        lines.append(f"reconstructed test images: mean squared error of a pixel {error:.4f}")
    return "\n".join(lines)


run = partial(command.run, evaluate, table)
