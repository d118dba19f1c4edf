"""How good samples are: Inception score and Fréchet inception distance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ebmguard.errors import ConfigError

from ..data import ImageData
from ..plots.numbers import table_of
from .features import Features

BATCH = 100
SPLITS = 10
"""Parts of the samples that the Inception score is taken of, as published ones are."""
SPLIT_SEED = 0
SCORES = {"images": "{samples:,}", "IS": "{is:.3f} ± {is_std:.3f}", "FID": "{fid:.2f}"}
"""Columns of a table."""


class SampleQuality:
    """Inception score and FID of samples against the images that the model was trained on.

    The FID is torchmetrics', fed with features that are computed once for both scores. Its
    Inception score is not used: it permutes the samples by PyTorch's global generator, and is NaN
    where a class has a probability of 0 in all samples, which is where a collapsed model ends.

    Args:
        features: the network that judges, on the device of the data.
        data: whose training images samples are to be like.
    """

    def __init__(self, features: Features, data: ImageData) -> None:
        from torchmetrics.image.fid import FrechetInceptionDistance  # which takes seconds to import

        self.features = features
        self.data = data
        # In place of a feature network: the features are there already.
        given: Any = nn.Identity()
        given.num_features = _feature_count(features, data.scale(data.train_x[:2]))
        # Evaluation is one process's: it does not wait for other ranks.
        metric: Any = FrechetInceptionDistance(
            given, reset_real_features=not features.fixed, sync_on_compute=False
        )
        self._fid = metric.to(data.train_x.device)

    def measure(self, samples: Tensor) -> dict[str, Any]:
        """Score samples.

        They are clamped to [-1, 1] first, as JEM's plots are: its chains may leave the box.

        The FID of few samples is too large, and with no more samples than features the covariance
        is singular; so that the number of samples is a part of the result.

        Args:
            samples: (N, C, H, W), float.

        Returns:
            `is`, its standard deviation over ten parts `is_std`, `fid` and `samples`, their
            number. A score that is undefined, such as that of NaN, is NaN.
        """
        fid, data, logits = self._fid, self.data, []
        with torch.no_grad():
            if not fid.real_features_num_samples:  # it has forgotten those of a changed network
                for part in torch.split(data.train_x, BATCH):
                    features, _ = self.features.module(data.scale(part))
                    fid.update(features.double(), real=True)
            for part in torch.split(samples, BATCH):
                x = part.to(data.train_x.device).clamp(-1, 1)
                features, own_logits = self.features.module(x)
                fid.update(features.double(), real=False)
                logits.append(own_logits)
            score, deviation = inception_score(torch.cat(logits))
            finite = (fid.real_features_sum + fid.fake_features_sum).isfinite().all()
            # torchmetrics raises where there is no distance.
            defined = finite and min(len(data.train_x), len(samples)) > 1
            distance = float(fid.compute()) if defined else math.nan
            fid.reset()
        return {"is": score, "is_std": deviation, "fid": distance, "samples": len(samples)}

    def described(self) -> dict[str, Any]:
        """What stands beside scores in evaluation.json."""
        return self.features.described() | {"reference_images": len(self.data.train_x)}


def inception_score(logits: Tensor) -> tuple[float, float]:
    """Inception score: exp of the mean KL divergence of p(y|x) from p(y) (Salimans et al. 2016).

    Equal to exp(H(y) - H(y|x)), so that a class that never appears counts 0, not NaN.

    Args:
        logits: (N, K), float.

    Returns:
        mean and standard deviation over ten parts of the samples, drawn at random with a fixed
        seed: rows of a replay buffer may be sorted by class.
    """
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(SPLIT_SEED))
    probabilities = logits[order.to(logits.device)].double().softmax(dim=1)
    scores = torch.stack(
        [
            torch.special.entr(part.mean(dim=0)).sum() - torch.special.entr(part).sum(dim=1).mean()
            for part in probabilities.tensor_split(min(SPLITS, len(logits)))
        ]
    ).exp()
    return float(scores.mean()), float(scores.std(correction=0))


def scores_table(
    what: str,
    rows: Mapping[str, Mapping[str, Any]],
    results: Mapping[str, Any],
    more: str = "",
) -> str:
    """Scores for people, and what they have to know beside them.

    Args:
        what: the names of the rows are.
        rows: what :meth:`SampleQuality.measure` returned, by name.
        results: what :meth:`SampleQuality.described` returned, among others.
        more: about the number of training images.
    """
    lines = [
        table_of(what, SCORES, rows),
        "",
        f"judged by: {results['features']}",
        f"FID to {results['reference_images']:,} training images{more}",
    ]
    if not results["features_comparable"]:
        lines.append("not comparable with published scores, which are of Inception features")
    return "\n".join(lines)


def _feature_count(features: Features, images: Tensor) -> int:
    """Try the network on two images, before hours of training."""
    try:
        with torch.no_grad():
            output: Any = features.module(images)
    except RuntimeError as error:
        raise ConfigError(
            f"{features.label}: cannot read images of shape {tuple(images.shape[1:])}: {error}"
        ) from error
    is_pair = isinstance(output, tuple) and len(output) == 2
    found = [tuple(part.shape) for part in output] if is_pair else type(output).__name__
    if not is_pair or any(len(shape) != 2 or shape[0] != len(images) for shape in found):
        raise ConfigError(
            f"{features.label}: returned {found} for {len(images)} images, expected (features "
            "(B, D), logits (B, K)) from images in [-1, 1]"
        )
    return int(found[0][1])
