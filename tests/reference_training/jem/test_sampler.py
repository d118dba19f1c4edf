"""Images and samples of a step: where they come from, and what they may touch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ebmguard import guard
from ebmguard.reference_training.data import ImageData
from ebmguard.reference_training.engine.ranks import ONE_RANK, Ranks
from ebmguard.reference_training.jem.draws import Draws
from ebmguard.reference_training.jem.sampler import make_sampler
from ebmguard.reference_training.jem.scenarios import DEFAULT, Scenario
from ebmguard.reference_training.networks import WideResNet
from ebmguard.samplers import ReplayBuffer
from tests.reference_training.parts import rng
from tests.replay import Replay, capture_as_replays

COUNT = 50
SMALL = replace(DEFAULT, n_pos=8, n_labelled=6, data_noise=0.0)


def images(*, pad: int = 0, flip: bool = False, side: int = 6) -> ImageData:
    """Random images whose labels are their numbers."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(256, (COUNT, 3, side, side), generator=rng, dtype=torch.uint8)
    y = torch.arange(COUNT)
    return ImageData("made up", x, y, x[:0], y[:0], x[:4], y[:4], COUNT, 255, pad, flip)


def draws(
    settings: Scenario = SMALL, seed: int = 3, ranks: Ranks = ONE_RANK, **augmentation: Any
) -> Draws:
    return Draws(images(**augmentation), settings, seed, ranks)


def recognised(x: torch.Tensor) -> list[int]:
    """Which images these are, by their pixels."""
    known = (images().train_x.double() / 127.5 - 1).float()
    distances = (x[:, None] - known[None]).abs().flatten(2).amax(-1)
    assert bool((distances.amin(-1) < 1e-6).all())
    return [int(i) for i in distances.argmin(-1)]


def test_every_image_comes_once_in_an_epoch_and_labelled_ones_have_epochs_of_their_own():
    found, positives, labelled = draws(), [], []
    for step in range(24):
        x_pos, x_lab, labels = found.batch(step)
        assert x_lab is not None
        assert (x_pos.shape, x_lab.shape) == ((8, 3, 6, 6), (6, 3, 6, 6))
        assert recognised(x_lab) == labels.tolist()
        assert labels.dtype == torch.int64
        positives += recognised(x_pos)
        labelled += labels.tolist()
    # 50 images are 6 batches of 8, or 8 of 6, and 2 left over.
    for images_seen in (positives, labelled):
        epochs = [images_seen[i : i + 48] for i in range(0, len(images_seen), 48)]
        assert all(len(set(epoch)) == 48 and epoch != sorted(epoch) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs) > 2
    assert labelled[:48] != positives[:48]


@pytest.mark.parametrize(("epochs", "world"), [(True, 2), (False, 3)])
def test_the_parts_of_the_ranks_join_to_the_batch_of_one(epochs, world):
    settings = replace(SMALL, epochs=epochs, data_noise=0.1)
    one = draws(settings, pad=2, flip=True)
    parts = [draws(settings, ranks=Ranks(rank, world), pad=2, flip=True) for rank in range(world)]
    for step in range(10):
        whole = one.batch(step)
        batches = [part.batch(step) for part in parts]
        for one_side, sides in zip(whole, zip(*batches, strict=True), strict=True):
            assert one_side is not None
            assert torch.equal(torch.cat([side for side in sides if side is not None]), one_side)
            sizes = [len(side) for side in sides if side is not None]
            assert max(sizes) - min(sizes) <= 1


SETTINGS = replace(DEFAULT, sgld_steps=3, step_size=0.7, noise_std=0.05)
SHAPE = (3, 8, 8)


@pytest.fixture
def network():
    torch.manual_seed(0)
    return WideResNet(in_channels=3, classes=4, width=1)


def buffer(own, size=20, classes=1, reinit_rate=0.3):
    return ReplayBuffer(size, SHAPE, reinit_rate=reinit_rate, generator=own, classes=classes)


def test_a_guard_measures_a_captured_sampler_by_its_warm_up(network, monkeypatch):
    """No evaluation inside a capture counts, as on a GPU."""
    capture_as_replays(monkeypatch)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: Replay.recording)
    own = rng(5)
    g = guard(None, make_sampler(SETTINGS, 6, own), beta_star=0.5)
    g.sampler(network, buffer(own))
    assert g.state_dict()["measured"]["settled"]["output_scale"] == pytest.approx(
        2 * 0.7 / 0.05**2, rel=0.01
    )
