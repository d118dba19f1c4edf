"""`ebmguard evaluate jem`: a JEM run as a classifier, as a sampler and as a density."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ebmguard.errors import ConfigError
from ebmguard.samplers import sgld

from ..data import kept_data
from ..device import describe
from ..plots.markdown import markdown_table
from ..precision import set_precision
from . import evaluate as command
from .chains import fresh_chains
from .classification import ECE_BINS, classification
from .config import EvaluateJem
from .features import load_features
from .likelihood import image_likelihood
from .ood import detection, other_images
from .quality import SampleQuality, judged_by
from .robustness import robustness
from .stored import BEST, load_network, read_config, read_last


def evaluate(config: EvaluateJem, device: torch.device) -> dict[str, Any]:
    """What evaluation.json holds."""
    stored = read_config(config.run)
    settings: dict[str, Any] = stored["settings"]
    has_best = (config.run / "checkpoints" / BEST).is_file()
    checkpoint = config.checkpoint or ("best" if has_best else "last")
    network, step = load_network(config.run, checkpoint, device)
    set_precision(stored["precision"])
    steps = _chain_steps(config, settings) if "fresh" in config.chains else 0
    scale = _output_scale(settings) if config.likelihood else 0.0
    sizes = {name: settings[name] for name in ("step_size", "noise_std")}
    root = config.data_root or stored["data_root"]
    data = kept_data(
        stored["data"],
        root,
        **{f"{part}_images": settings[f"{part}_images"] for part in ("train", "valid", "test")},
        image_size=stored.get("image_size"),  # once there was no choice
    ).to(device)
    others: dict[str, Tensor] = {name: other_images(name, data, root) for name in config.ood}
    found: dict[str, Any] = {}
    if config.chains:
        features = load_features(
            config.features, device, sha256=config.features_sha256, network=network
        )
        quality = SampleQuality(features, data)
        samples: dict[str, Any] = {}
        if "buffer" in config.chains:
            at, chains = _buffer(config)
            samples["buffer"] = {"step": at, **quality.measure(chains)}
        if "fresh" in config.chains:
            chains = fresh_chains(
                lambda x0, k, rng: sgld(network, x0, steps=k, generator=rng, **sizes),
                (config.samples, *data.sample_shape),
                (steps, steps),
                device,
            )
            samples["fresh"] = {"steps": steps, **quality.measure(chains)}
        found = {**quality.described(), "samples": samples}
    noise_std: float = settings["eval_noise"]
    found["ood"] = detection(network, data, others, noise_std=noise_std)
    if config.attacks or config.refine_steps:
        effort = {"images": config.attack_images, "steps": config.refine_steps}
        rows = robustness(network, data, config.balls, noise=noise_std, **effort, **sizes)
        found |= {"refine_steps": config.refine_steps, "robustness": rows}
    if config.likelihood:
        found["likelihood"] = image_likelihood(network, scale, data, noise_std, **config.effort)
    return {
        "data": stored["data"],
        **{name: stored.get(name) for name in ("scenario", "beta_star", "seed")},
        "checkpoint": checkpoint,
        "step": step,
        "device": describe(device),
        "eval_noise": noise_std,
        "classification": classification(network, data, noise_std=noise_std),
        **found,
    }


def table(results: Mapping[str, Any]) -> str:
    """The results for people."""
    about = f"JEM on {results['data']}, scenario {results['scenario']}, "
    about += f"beta* = {results['beta_star']}, seed {results['seed']}\n"
    parts = [about + f"{results['checkpoint']} checkpoint, after {results['step']:,} steps"]

    def add(head: Sequence[str], rows: Mapping[str, Mapping[str, Any]], *shown: str) -> None:
        cells = [(name, *(form.format(**row) for form in shown)) for name, row in rows.items()]
        parts.append(markdown_table(head, cells))

    head: tuple[str, ...] = ("classifier", "images", "accuracy", f"ECE, {ECE_BINS} bins")
    add(head, results["classification"], "{images:,}", "{accuracy:.2%}", "{ece:.4f}")
    if "samples" in results:
        names = {
            "buffer": "replay buffer after {step:,} steps",
            "fresh": "fresh chains of {steps:,} steps",
        }
        found = {names[name].format(**row): row for name, row in results["samples"].items()}
        score = "{is:.3f} ± {is_std:.3f}"
        add(("samples", "number", "IS", "FID"), found, "{samples:,}", score, "{fid:.2f}")
        parts[-1] += "\n\n" + "\n".join(judged_by(results))
    if results["ood"]:
        head = ("AUROC of test images against", "images", "f", "-‖df/dx‖", "max p(y given x)")
        add(head, results["ood"], "{images:,}", "{f:.4f}", "{gradient:.4f}", "{confidence:.4f}")
    if "robustness" in results:
        rows = {
            f"{row['norm']}, radius {row['radius']:g}/255" if row["radius"] else "no attack": row
            for row in results["robustness"]
        }
        what = f"classifier after {results['refine_steps']} Langevin steps"
        add((what, "images", "accuracy"), rows, "{images:,}", "{accuracy:.2%}")
    return "\n\n".join(parts)


def _output_scale(settings: Mapping[str, Any]) -> float:
    """o of exp(o f), which the run's chains sample from."""
    if not settings["noise_std"]:
        raise ConfigError(
            "likelihood: the run's chains have no noise (noise_std is 0), which leaves the scale "
            "of log p(x) = o f(x) - log Z open; leave --likelihood out"
        )
    scale: float = 2 * settings["step_size"] / settings["noise_std"] ** 2
    return scale


def _chain_steps(config: EvaluateJem, settings: Mapping[str, Any]) -> int:
    if config.chain_steps is not None:
        return config.chain_steps
    if not settings["reinit_rate"]:
        raise ConfigError(
            "the run's chains never restart (reinit_rate is 0), which leaves the length of fresh "
            "chains open: name it by --chain-steps"
        )
    steps: int = round(settings["sgld_steps"] / settings["reinit_rate"])
    return steps


def _buffer(config: EvaluateJem) -> tuple[int, Tensor]:
    """Steps of the newest checkpoint, and at most so many of its chains, spread over all."""
    step, _, chains = read_last(config.run)
    count = min(config.samples, len(chains))
    # Chains of a class lie together.
    return step, chains[torch.arange(count) * len(chains) // count]


run = partial(command.run, evaluate, table)
