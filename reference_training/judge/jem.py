"""`ebmguard evaluate jem`: a JEM run as a classifier, as a sampler and as a density."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ebmguard.errors import ConfigError
from ebmguard.samplers import sgld

from ..data import kept_data
from ..device import describe, set_precision
from ..plots.numbers import table_of
from . import evaluate as command
from .chains import fresh_chains
from .classification import ECE_BINS, classification
from .config import EvaluateJem
from .features import load_features
from .likelihood import image_likelihood
from .ood import detection, other_images
from .quality import SampleQuality, scores_table
from .robustness import robustness
from .stored import BEST, load_network, read_config, read_last, spread

CLASSIFIER = {
    "images": "{images:,}",
    "accuracy": "{accuracy:.2%}",
    f"ECE, {ECE_BINS} bins": "{ece:.4f}",
}
DETECTION = {
    "images": "{images:,}",
    "f": "{f:.4f}",
    "-‖df/dx‖": "{gradient:.4f}",
    "max p(y given x)": "{confidence:.4f}",
}
ATTACKED = {"images": "{images:,}", "accuracy": "{accuracy:.2%}"}
"""Columns of the tables."""


def evaluate(config: EvaluateJem, device: torch.device) -> dict[str, Any]:
    """What evaluation.json holds."""
    stored = read_config(config.run)
    settings: dict[str, Any] = stored["settings"]
    has_best = (config.run / "checkpoints" / BEST).is_file()
    checkpoint = config.checkpoint or ("best" if has_best else "last")
    network, step = load_network(config.run, checkpoint, device)
    set_precision(stored["precision"])
    steps = config.chain_steps
    if steps is None and settings["reinit_rate"]:
        steps = round(settings["sgld_steps"] / settings["reinit_rate"])
    if steps is None and "fresh" in config.chains:
        raise ConfigError(
            "the run's chains never restart (reinit_rate is 0), which leaves the length of fresh "
            "chains open: name it by --chain-steps"
        )
    if config.likelihood and not settings["noise_std"]:
        raise ConfigError(
            "likelihood: the run's chains have no noise (noise_std is 0), which leaves the scale "
            "of log p(x) = o f(x) - log Z open; leave --likelihood out"
        )
    sizes = {name: settings[name] for name in ("step_size", "noise_std")}
    root = config.data_root or stored["data_root"]
    images = {name: settings[name] for name in ("train_images", "valid_images", "test_images")}
    data = kept_data(stored["data"], root, **images, image_size=stored["image_size"]).to(device)
    others: dict[str, Tensor] = {name: other_images(name, data, root) for name in config.ood}
    found: dict[str, Any] = {}
    if config.chains:
        quality = SampleQuality(load_features(config.features, device, network), data)
        found = {**quality.described(), "samples": {}}
        if "buffer" in config.chains:
            at, _, chains = read_last(config.run)
            scores = quality.measure(spread(chains, config.samples))
            found["samples"]["buffer"] = {"step": at, **scores}
        if "fresh" in config.chains and steps is not None:
            chains = fresh_chains(
                lambda x0, k, rng: sgld(network, x0, steps=k, generator=rng, **sizes),
                (config.samples, *data.sample_shape),
                (steps, steps),
                device,
            )
            found["samples"]["fresh"] = {"steps": steps, **quality.measure(chains)}
    noise_std: float = settings["eval_noise"]
    found["ood"] = detection(network, data, others, noise_std=noise_std)
    if config.attacks or config.refine_steps:
        effort = {"images": config.attack_images, "steps": config.refine_steps}
        rows = robustness(network, data, config.balls, noise=noise_std, **effort, **sizes)
        found |= {"refine_steps": config.refine_steps, "robustness": rows}
    if config.likelihood:
        scale = 2 * sizes["step_size"] / sizes["noise_std"] ** 2  # o, of the chains' exp(o f)
        found["likelihood"] = image_likelihood(network, scale, data, noise_std, **config.effort)
    return {
        **{name: stored[name] for name in ("data", "scenario", "beta_star", "seed")},
        "checkpoint": checkpoint,
        "step": step,
        "device": describe(device),
        "eval_noise": noise_std,
        "classification": classification(network, data, noise_std=noise_std),
        **found,
    }


def table(results: Mapping[str, Any]) -> str:
    """The results for people."""
    about = (
        "JEM on {data}, scenario {scenario}, beta* = {beta_star}, seed {seed}\n"
        "{checkpoint} checkpoint, after {step:,} steps"
    )
    parts = [about.format(**results), table_of("classifier", CLASSIFIER, results["classification"])]
    if "samples" in results:
        names = {
            "buffer": "replay buffer after {step:,} steps",
            "fresh": "fresh chains of {steps:,} steps",
        }
        found = {names[name].format(**row): row for name, row in results["samples"].items()}
        parts.append(scores_table("samples", found, results))
    if results["ood"]:
        parts.append(table_of("AUROC of test images against", DETECTION, results["ood"]))
    if "robustness" in results:
        rows = {
            f"{row['norm']}, radius {row['radius']:g}/255" if row["radius"] else "no attack": row
            for row in results["robustness"]
        }
        what = f"classifier after {results['refine_steps']} Langevin steps"
        parts.append(table_of(what, ATTACKED, rows))
    return "\n\n".join(parts)


run = partial(command.run, evaluate, table)
