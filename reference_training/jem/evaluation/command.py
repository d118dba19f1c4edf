"""`ebmguard evaluate jem`: measure a run that has a checkpoint, print and store what was found."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ebmguard.errors import ConfigError
from ebmguard.samplers import sgld
from ebmguard.sinks import to_json

from ...data import ImageData, load_data
from ...device import describe, find_device
from ...engine.progress import log_to_terminal
from ...likelihood import described, image_likelihood
from ...networks import WideResNet
from ...precision import set_precision
from .classification import ECE_BINS, accuracy, calibration_error, classify
from .config import EvaluateConfig
from .features import load_features
from .ood import auroc, other_images, scores
from .quality import SampleQuality
from .stored import load_network, read_config, read_last

EVALUATION = "evaluation.json"
CHAIN_BATCH = 250
CHAIN_SEED = 0
SAID_EVERY = 1000
_logger = logging.getLogger("ebmguard.evaluate")


def run(config: EvaluateConfig) -> int:
    """`ebmguard evaluate jem`: evaluate, print a table, write evaluation.json.

    Returns:
        exit status, 0.

    Raises:
        ConfigError: the settings cannot be meant, or the run has no such checkpoint.
        ImportError: a package that is needed is not installed.
    """
    log_to_terminal()
    results = evaluate(config)
    text = json.dumps(to_json(results), indent=2, allow_nan=False) + "\n"
    (config.run / EVALUATION).write_text(text, encoding="utf-8")
    print(table(results))
    print(f"\nwritten to {config.run / EVALUATION}")
    return 0


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """What evaluation.json holds.

    Raises:
        ConfigError: as for :func:`run`; before anything is computed.
    """
    config.check()
    stored = read_config(config.run)
    settings: dict[str, Any] = stored["settings"]
    device = find_device(config.device)
    network, step = load_network(config.run, config.checkpoint, device)
    set_precision(stored["precision"])
    chain_steps = _chain_steps(config, settings) if "fresh" in config.chains else 0
    buffer = _buffer(config.run, config.samples) if "buffer" in config.chains else None
    root = config.data_root
    if root is None and stored["data_root"] is not None:
        root = Path(stored["data_root"])
    data = load_data(
        stored["data"],
        root,
        **{f"{part}_images": settings[f"{part}_images"] for part in ("train", "valid", "test")},
        image_size=stored.get("image_size"),  # once there was no choice
    ).to(device)
    noise_std: float = settings["eval_noise"]
    others = {name: other_images(name, data, root) for name in config.ood}
    quality = None
    if config.chains:
        features = load_features(
            config.features, sha256=config.features_sha256, network=network, device=device
        )
        quality = SampleQuality(features, data.train_x, data.scale, device)
    results: dict[str, Any] = {
        "data": stored["data"],
        **{name: stored.get(name) for name in ("scenario", "beta_star", "seed")},
        "checkpoint": config.checkpoint,
        "step": step,
        "device": describe(device),
        "eval_noise": noise_std,
        "classification": _classification(network, data, noise_std),
    }
    if quality is not None:
        results |= quality.features.described()
        results["reference_images"] = len(data.train_x)
        results["samples"] = {}
        if buffer is not None:
            buffer_step, chains = buffer
            results["samples"]["buffer"] = {"step": buffer_step, **quality.measure(chains)}
        if "fresh" in config.chains:
            shape = (config.samples, *data.sample_shape)
            chains = fresh_chains(network, shape, steps=chain_steps, settings=settings)
            results["samples"]["fresh"] = {"steps": chain_steps, **quality.measure(chains)}
    inside = scores(network, data.scale(data.test_x), noise_std=noise_std) if others else ()
    results["ood"] = {}
    for name, images in others.items():
        outside = scores(network, images, noise_std=noise_std)
        pairs = zip(("f", "gradient"), inside, outside, strict=True)
        results["ood"][name] = {
            "images": len(images),
            **{score: auroc(own, other) for score, own, other in pairs},
        }
    if config.likelihood:
        results["likelihood"] = _likelihood(network, data, settings, config)
    return results


def fresh_chains(
    network: WideResNet,
    shape: tuple[int, int, int, int],
    *,
    steps: int,
    settings: Mapping[str, Any],
) -> Tensor:
    """Samples of chains that start from uniform noise, on f(x) untempered.

    Args:
        network: the model.
        shape: (N, C, H, W).
        steps: Langevin steps of each chain.
        settings: `step_size` and `noise_std` of a step.

    Returns:
        (N, C, H, W), not clamped, on the CPU.
    """
    device = next(network.parameters()).device
    generator = torch.Generator(device).manual_seed(CHAIN_SEED)
    parts = []
    for start in range(0, shape[0], CHAIN_BATCH):
        size = (min(CHAIN_BATCH, shape[0] - start), *shape[1:])
        x = torch.rand(size, generator=generator, device=device) * 2 - 1
        parts.append(
            sgld(
                network,
                x,
                steps=steps,
                step_size=settings["step_size"],
                noise_std=settings["noise_std"],
                generator=generator,
            ).cpu()
        )
        done = start + size[0]
        if done % SAID_EVERY == 0 or done == shape[0]:
            _logger.info("%d of %d fresh chains, %d steps each", done, shape[0], steps)
    return torch.cat(parts)


def table(results: Mapping[str, Any]) -> str:
    """The results for people."""
    about = f"JEM on {results['data']}, scenario {results['scenario']}, "
    about += f"beta* = {results['beta_star']}, seed {results['seed']}"
    lines = [
        about,
        f"{results['checkpoint']} checkpoint, after {results['step']:,} steps",
        "",
        f"{'classifier':34} {'images':>8} {'accuracy':>9} {f'ECE, {ECE_BINS} bins':>13}",
    ]
    for name, row in results["classification"].items():
        lines.append(f"{name:34} {row['images']:8,} {row['accuracy']:9.2%} {row['ece']:13.4f}")
    if "samples" in results:
        lines += ["", f"{'samples':34} {'number':>8} {'IS':>15} {'FID':>9}"]
        for name, row in results["samples"].items():
            what = (
                f"replay buffer after {row['step']:,} steps"
                if name == "buffer"
                else f"fresh chains of {row['steps']:,} steps"
            )
            score = f"{row['is']:.3f} ± {row['is_std']:.3f}"
            lines.append(f"{what:34} {row['samples']:8,} {score:>15} {row['fid']:9.2f}")
        lines.append(f"judged by: {results['features']}")
        lines.append(f"FID to {results['reference_images']:,} training images")
        if not results["features_comparable"]:
            lines.append("not comparable with published scores, which are of Inception features")
    if results["ood"]:
        lines += ["", f"{'AUROC of test images against':34} {'images':>8} {'f':>9} {'-|df/dx|':>9}"]
        for name, row in results["ood"].items():
            lines.append(f"{name:34} {row['images']:8,} {row['f']:9.4f} {row['gradient']:9.4f}")
    if "likelihood" in results:
        lines += ["", described(results["likelihood"])]
    return "\n".join(lines)


def _classification(network: WideResNet, data: ImageData, noise_std: float) -> dict[str, Any]:
    parts = {"validation": (data.valid_x, data.valid_y), "test": (data.test_x, data.test_y)}
    results = {}
    for name, (images, labels) in parts.items():
        if len(labels):
            logits = classify(network, images, data.scale, noise_std=noise_std)
            results[name] = {
                "images": len(labels),
                "accuracy": accuracy(logits, labels),
                "ece": calibration_error(logits, labels),
            }
    return results


def _likelihood(
    network: WideResNet, data: ImageData, settings: Mapping[str, Any], config: EvaluateConfig
) -> dict[str, Any]:
    if not settings["noise_std"]:
        raise ConfigError(
            "likelihood: the run's chains have no noise (noise_std is 0), which leaves the scale "
            "of log p(x) = o f(x) - log Z open; leave --likelihood out"
        )
    scale = 2 * settings["step_size"] / settings["noise_std"] ** 2
    return image_likelihood(network, scale, data, settings["eval_noise"], config)


def _chain_steps(config: EvaluateConfig, settings: Mapping[str, Any]) -> int:
    if config.chain_steps is not None:
        return config.chain_steps
    if not settings["reinit_rate"]:
        raise ConfigError(
            "the run's chains never restart (reinit_rate is 0), which leaves the length of fresh "
            "chains open: name it by --chain-steps"
        )
    steps: int = round(settings["sgld_steps"] / settings["reinit_rate"])
    return steps


def _buffer(run: Path, most: int) -> tuple[int, Tensor]:
    """Steps of the newest checkpoint, and at most so many of its chains, spread over all."""
    step, _, chains = read_last(run)
    count = min(most, len(chains))
    # Chains of a class lie together.
    return step, chains[torch.arange(count) * len(chains) // count]
