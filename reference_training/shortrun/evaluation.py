"""`ebmguard evaluate shortrun`: how good the samples of a short-run model are."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ebmguard.errors import ConfigError
from ebmguard.samplers import random_steps
from ebmguard.sinks import to_json

from ..device import describe, find_device
from ..engine.progress import log_to_terminal
from ..engine.run_folder import CONFIG, read_config
from ..jem.evaluation import Features, SampleQuality, load_features
from ..likelihood import described, image_likelihood
from ..plots.markdown import markdown_table
from ..precision import set_precision
from .evaluate_config import EvaluateConfig
from .trained import TrainedRun, load_run

EVALUATION = "evaluation.json"
CHAIN_BATCH = 250
SEED = 0
"""The same noise in every evaluation, so that two differ by their models alone."""
SAID_EVERY = 1000
_logger = logging.getLogger("ebmguard.evaluate")


def run(config: EvaluateConfig) -> int:
    """`ebmguard evaluate shortrun`: judge the samples, print a table, write evaluation.json.

    Returns:
        exit status, 0.

    Raises:
        ConfigError: the settings cannot be meant, the run has no checkpoint, the features cannot
            be had or are of other images, or evaluation.json cannot be written.
        ImportError: a package that is needed is not installed.
    """
    log_to_terminal()
    config.check()
    device = find_device(config.device)
    trained = load_run(config.run, device, config.data_root)
    set_precision(trained.config.precision)
    features = None
    if config.features is not None:
        check_features(config.features, trained)
        features = load_features(
            config.features, sha256=config.features_sha256, network=None, device=device
        )
    results = evaluate(trained, features, config.count)
    if config.likelihood:
        scale, noise = trained.settings.output_scale, trained.settings.data_noise
        found = image_likelihood(trained.network, scale, trained.data, noise, config)
        results["likelihood"] = found
    print(table(results))
    file = config.run / EVALUATION
    text = json.dumps(to_json(results), indent=2, allow_nan=False) + "\n"
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error}") from error
    print(f"\nwritten to {file}")
    return 0


def check_features(spec: str, trained: TrainedRun) -> None:
    """Refuse the features of a JEM run on other images: its network would read these all the same.

    Raises:
        ConfigError: the folder's run is none of JEM, or is on other data or another image size.
    """
    if not (Path(spec) / CONFIG).is_file():
        return
    stored = read_config(Path(spec))
    if not {"data", "scenario", "precision", "settings"} <= set(stored):
        raise ConfigError(
            f"features is {spec}, which is not a run folder of `ebmguard train jem`, whose "
            "classifier could judge samples"
        )
    theirs = stored["data"], stored.get("image_size")
    own = trained.config.data, trained.settings.image_size
    if theirs != own:
        raise ConfigError(
            f"features is {spec}, a run on {_images(*theirs)}, and {trained.path} is on "
            f"{_images(*own)}; train the classifier with the same --data and --image-size"
        )


def evaluate(trained: TrainedRun, features: Features | None, count: int | None) -> dict[str, Any]:
    """What evaluation.json holds.

    Args:
        trained: the model.
        features: what judges, on the model's device; None leaves out all that is judged.
        count: samples; None takes as many as there are held-out images.

    Returns:
        the model, the features and, under `scores`, for `samples`, `held_out` and `noise`: `is`,
        `is_std`, `fid` and `samples`, their number; a score that is undefined is NaN. There are as
        many held-out images as samples, or all where those are fewer.

    Raises:
        ConfigError: the features are not those of images of this shape.
        ImportError: torchmetrics is not installed.
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
    quality = SampleQuality(features, data.train_x, data.scale, trained.device)
    count = len(data.test_x) if count is None else count
    some = min(count, len(data.test_x))
    # Spread over all: the first half of MNIST's is the easier one, say its authors.
    rows = torch.arange(some, device=trained.device) * len(data.test_x) // some
    generator = torch.Generator(trained.device).manual_seed(SEED)
    scores = {
        "samples": quality.measure(short_run_samples(trained, count)),
        "held_out": quality.measure(data.scale(data.test_x[rows])),
        "noise": quality.measure(trained.starts(count, generator)),
    }
    judged = {"reference_images": len(data.train_x), "scores": scores}
    return results | features.described() | judged


def short_run_samples(trained: TrainedRun, count: int) -> Tensor:
    """Fresh samples: K Langevin steps from uniform noise, with the training's law of K.

    Args:
        trained: the model.
        count: samples.

    Returns:
        (count, C, H, W), not clamped, on the CPU. They depend on the model and the device alone.
    """
    generator = torch.Generator(trained.device).manual_seed(SEED)
    steps = torch.Generator().manual_seed(SEED)
    settings = trained.settings
    parts = []
    for start in range(0, count, CHAIN_BATCH):
        size = min(CHAIN_BATCH, count - start)
        k = random_steps(settings.sgld_steps, settings.most_sgld_steps, steps)
        parts.append(trained.chains(trained.starts(size, generator), k, generator).cpu())
        done = start + size
        if done % SAID_EVERY == 0 or done == count:
            _logger.info("%d of %d samples, %d steps each", done, count, k)
    return torch.cat(parts)


def table(results: Mapping[str, Any]) -> str:
    """The results for people."""
    size = results["image_size"]
    lines = [
        f"short-run model of {results['data']} at {size}x{size}, beta* = {results['beta_star']:g}, "
        f"seed {results['seed']}, after {results['step']:,} updates"
    ]
    if "scores" in results:
        lines += ["", *_judged(results)]
    if "likelihood" in results:
        lines += ["", described(results["likelihood"])]
    return "\n".join(lines)


def _judged(results: Mapping[str, Any]) -> list[str]:
    least, most = results["sgld_steps"], results["most_sgld_steps"]
    steps = str(least) if least == most else f"{least} to {most}"
    names = {
        "samples": f"samples, {steps} steps from noise",
        "held_out": "held-out images",
        "noise": "uniform noise",
    }
    rows = []
    for key, name in names.items():
        row = results["scores"][key]
        score = f"{row['is']:.3f} ± {row['is_std']:.3f}"
        rows.append((name, f"{row['samples']:,}", score, f"{row['fid']:.2f}"))
    lines = [
        markdown_table(("", "images", "IS", "FID"), rows),
        "",
        f"judged by: {results['features']}",
        f"FID to {results['reference_images']:,} training images; the fewer images it is taken of, "
        "the larger it is",
    ]
    if not results["features_comparable"]:
        lines.append("not comparable with published scores, which are of Inception features")
    return lines


def _images(data: str, image_size: int | None) -> str:
    return data if image_size is None else f"{data} averaged down to {image_size}x{image_size}"
