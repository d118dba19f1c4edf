from __future__ import annotations

import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.reference_training.data import EpochOrder

CPU = torch.device("cpu")


def epoch(order, number):
    start = number * order.steps_per_epoch
    return torch.cat([order.rows(start + i) for i in range(order.steps_per_epoch)]).tolist()


@pytest.mark.parametrize(("count", "batch", "steps"), [(103, 10, 10), (100, 10, 10), (7, 7, 1)])
def test_an_epoch_visits_every_image_at_most_once_in_full_batches(count, batch, steps):
    order = EpochOrder(count, batch, 0, CPU)
    assert order.steps_per_epoch == steps
    assert order.rows(0).shape == (batch,)
    assert order.rows(0).dtype == torch.int64
    for number in range(3):
        visited = epoch(order, number)
        assert len(set(visited)) == len(visited) == steps * batch
        assert set(visited) <= set(range(count))


def test_batch_depends_on_the_step_alone():
    straight = EpochOrder(50, 8, 3, CPU)
    batches = [straight.rows(step).clone() for step in range(40)]
    for step in (39, 0, 17, 18, 6, 5, 17):
        assert torch.equal(straight.rows(step), batches[step])
        assert torch.equal(EpochOrder(50, 8, 3, CPU).rows(step), batches[step])


def test_epochs_and_seeds_differ():
    # Neighbours, and seeds that are alike in the lower 32 bits, which are all that a CPU uses.
    orders = [EpochOrder(100, 10, seed, CPU) for seed in (0, 1, 2, 2**32, 2**32 + 1)]
    seen = {tuple(epoch(order, number)) for order in orders for number in range(4)}
    assert len(seen) == 20


def test_images_meet_in_all_orders():
    """The share of epochs in which image a comes before image b is 1/2 for every pair."""
    order = EpochOrder(6, 6, 0, CPU)
    places = torch.stack([order.rows(step).argsort() for step in range(2000)])
    before = (places[:, :, None] < places[:, None, :]).double().mean(0)
    pairs = before[~torch.eye(6, dtype=torch.bool)]
    assert (pairs - 0.5).abs().max() < 4 * 0.5 / 2000**0.5


@pytest.mark.parametrize(("count", "batch"), [(5, 6), (5, 0), (0, 1)])
def test_an_epoch_without_a_batch_is_refused(count, batch):
    with pytest.raises(ConfigError, match=f"a batch of {batch} images .* expected 1 to {count}"):
        EpochOrder(count, batch, 0, CPU)
