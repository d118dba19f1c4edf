"""The replay buffer: where chains start, and where they end up."""

from __future__ import annotations

import pytest
import torch

from ebmguard.samplers import ReplayBuffer


def make(size=50, *, reinit_rate=0.0, seed=0, **settings):
    rng = torch.Generator().manual_seed(seed)
    return ReplayBuffer(size, (1, 2, 2), reinit_rate=reinit_rate, generator=rng, **settings)


def test_starts_uniform_in_the_interval():
    samples = make(20_000).samples
    assert samples.shape == (20_000, 1, 2, 2)
    assert samples.min() >= -1
    assert samples.max() < 1
    # Moments of U(-1, 1): mean 0, variance 1/3; five standard errors of 80,000 values.
    assert abs(samples.mean()) < 5 * (1 / 3 / 80_000) ** 0.5
    assert abs(samples.var() - 1 / 3) < 5 * (4 / 45 / 80_000) ** 0.5
    assert make(1000, low=2.0, high=3.0).samples.min() >= 2


def test_draws_are_rows_of_the_buffer():
    buffer = make()
    x, rows = buffer.sample(30)
    assert torch.equal(x, buffer.samples[rows])
    x.add_(100)  # a copy: the buffer does not see it
    assert buffer.samples.max() < 1


def test_write_back_and_the_last_duplicate_wins():
    buffer = make(5)
    before = buffer.samples.clone()
    rows = torch.tensor([3, 1, 3, 0, 3])
    values = torch.arange(5.0).reshape(5, 1, 1, 1).expand(5, 1, 2, 2)
    buffer.write(rows, values)
    assert [float(buffer.samples[i, 0, 0, 0]) for i in (3, 1, 0)] == [4, 1, 3]
    assert torch.equal(buffer.samples[[2, 4]], before[[2, 4]])


def test_duplicates_agree_with_sequential_writes():
    buffer = make(40)
    expected = buffer.samples.clone()
    for _ in range(20):
        x, rows = buffer.sample(64)
        x = x + 1
        for row, value in zip(rows.tolist(), x, strict=True):
            expected[row] = value
        buffer.write(rows, x)
        assert torch.equal(buffer.samples, expected)


@pytest.mark.parametrize("rate", [0.0, 0.05, 1.0])
def test_reinit_rate(rate):
    buffer = make(10, reinit_rate=rate)
    buffer.samples.fill_(7.0)
    n = 40_000
    x, _ = buffer.sample(n)
    fresh = (x != 7).flatten(1).any(1)
    assert torch.equal(fresh, (x != 7).flatten(1).all(1))  # whole samples, never single pixels
    assert x[fresh].abs().max() <= 1 if fresh.any() else rate == 0
    # Binomial: five standard deviations.
    assert abs(fresh.float().mean() - rate) <= 5 * (rate * (1 - rate) / n) ** 0.5


def test_state_goes_on_with_the_same_bits():
    one = make(reinit_rate=0.5)
    one.sample(9)
    state = one.state_dict()
    other = make(reinit_rate=0.5, seed=5)
    other.load_state_dict(state)
    assert torch.equal(one.samples, other.samples)
    assert all(torch.equal(a, b) for a, b in zip(one.sample(9), other.sample(9), strict=True))
    one.write(torch.tensor([0]), torch.zeros(1, 1, 2, 2))
    assert state["samples"][0].abs().sum() > 0  # the state is a copy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "size is 0"),
        ({"reinit_rate": 1.5}, "reinit_rate is 1.5"),
        ({"low": 1.0, "high": 1.0}, "low < high"),
    ],
)
def test_refuses_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_refuses_what_does_not_fit():
    buffer = make()
    with pytest.raises(ValueError, match="n is 0"):
        buffer.sample(0)
    with pytest.raises(ValueError, match=r"expected \(n, 1, 2, 2\)"):
        buffer.write(torch.tensor([0, 1]), torch.zeros(3, 1, 2, 2))
    with pytest.raises(ValueError, match="settings of the saved run"):
        make(4).load_state_dict(buffer.state_dict())
