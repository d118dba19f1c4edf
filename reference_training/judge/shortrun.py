"""`ebmguard evaluate shortrun`: how good the samples of a short-run model are."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ebmguard.errors import ConfigError

from ..device import describe, set_precision
from ..engine.run_folder import CONFIG
from ..shortrun.trained import TrainedRun, load_run
from . import evaluate as command
from .chains import SEED, fresh_chains
from .config import EvaluateShortRun
from .features import Features, load_features
from .likelihood import image_likelihood
from .quality import SampleQuality, scores_table
from .stored import read_config, spread


def evaluate(config: EvaluateShortRun, device: torch.device) -> dict[str, Any]:
    """What evaluation.json holds."""
    trained = load_run(config.run, device, config.data_root)
    set_precision(trained.config.precision)
    features = None
    if config.features is not None:
        check_features(config.features, trained)
        features = load_features(config.features, device)
    results = judged(trained, features, config.count)
    if config.likelihood:
        scale, noise = trained.settings.output_scale, trained.settings.data_noise
        found = image_likelihood(trained.network, scale, trained.data, noise, **config.effort)
        results["likelihood"] = found
    return results


def check_features(spec: str, trained: TrainedRun) -> None:
    """Refuse features of a JEM run on other images: its network would read these all the same."""
    if not (Path(spec) / CONFIG).is_file():
        return
    stored = read_config(Path(spec))
    theirs = stored["data"], stored["image_size"]
    own = trained.config.data, trained.settings.image_size
    if theirs != own:
        raise ConfigError(
            f"features is {spec}, a run on {_images(*theirs)}, and {trained.path} is on "
            f"{_images(*own)}; train the classifier with the same --data and --image-size"
        )


def judged(trained: TrainedRun, features: Features | None, count: int | None) -> dict[str, Any]:
    """The model, and what its samples are worth.

    Args:
        trained: the model.
        features: what judges, on the model's device; None leaves out all that is judged.
        count: samples; None takes as many as there are held-out images.

    Returns:
        the model, the features and, under `scores`, what :meth:`SampleQuality.measure` returns for
        `samples`, `held_out` images, of which there are as many or all, and `noise`.
    """
    data, settings = trained.data, trained.settings
    results = {
        "data": data.name,
        "image_size": data.sample_shape[-1],
        "beta_star": trained.config.beta_star,
        "seed": trained.config.seed,
        "step": trained.step,
        "sgld_steps": settings.sgld_steps,
        "most_sgld_steps": settings.most_sgld_steps,
        "device": describe(trained.device),
    }
    if features is None:
        return results
    quality = SampleQuality(features, data)
    count = len(data.test_x) if count is None else count
    generator = torch.Generator(trained.device).manual_seed(SEED)
    scores = {
        "samples": quality.measure(short_run_samples(trained, count)),
        "held_out": quality.measure(data.scale(spread(data.test_x, count))),
        "noise": quality.measure(trained.starts(count, generator)),
    }
    return results | quality.described() | {"scores": scores}


def short_run_samples(trained: TrainedRun, count: int) -> Tensor:
    """Fresh samples by the training's chains and its law of K, see :func:`.chains.fresh_chains`."""
    settings = trained.settings
    steps = settings.sgld_steps, settings.most_sgld_steps
    shape = (count, *trained.data.sample_shape)
    return fresh_chains(trained.chains, shape, steps, trained.device)


def table(results: Mapping[str, Any]) -> str:
    """The results for people."""
    about = (
        "short-run model of {data} at {image_size}x{image_size}, beta* = {beta_star:g}, "
        "seed {seed}, after {step:,} updates"
    ).format(**results)
    if "scores" not in results:
        return about
    least, most = results["sgld_steps"], results["most_sgld_steps"]
    steps = str(least) if least == most else f"{least} to {most}"
    names = {
        "samples": f"samples, {steps} steps from noise",
        "held_out": "held-out images",
        "noise": "uniform noise",
    }
    found = {name: results["scores"][key] for key, name in names.items()}
    more = "; the fewer images it is taken of, the larger it is"
    return about + "\n\n" + scores_table("", found, results, more)


def _images(data: str, image_size: int | None) -> str:
    return data if image_size is None else f"{data} averaged down to {image_size}x{image_size}"


run = partial(command.run, evaluate, table)
