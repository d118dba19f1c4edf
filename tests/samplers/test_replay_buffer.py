"""The replay buffer: where chains start, and where they end up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebmguard.errors import ConfigError
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


@pytest.mark.parametrize(("rate", "labelled"), [(0.0, False), (0.05, True), (1.0, False)])
def test_reinit_rate(rate, labelled):
    buffer = make(12, reinit_rate=rate, classes=3)
    buffer.samples.fill_(7.0)
    n = 40_000
    x, rows = buffer.sample(n, torch.full((n,), 2) if labelled else None)
    # Also of those that start afresh: their ends are written back there.
    assert set(rows.tolist()) == set(range(8 if labelled else 0, 12))
    fresh = (x != 7).flatten(1).any(1)
    assert torch.equal(fresh, (x != 7).flatten(1).all(1))  # whole samples, never single pixels
    assert x[fresh].abs().max() <= 1 if fresh.any() else rate == 0
    # Binomial: five standard deviations.
    assert abs(fresh.float().mean() - rate) <= 5 * (rate * (1 - rate) / n) ** 0.5


@given(
    classes=st.integers(2, 6),
    chains=st.integers(1, 5),
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=20),
    seed=st.integers(0, 2**32),
)
def test_chains_stay_in_their_class(classes, chains, labels, seed):
    """Every row holds its class, and all draws and writes keep it so."""
    buffer = make(classes * chains, seed=seed, classes=classes)
    for c in range(classes):
        buffer.samples[c * chains : (c + 1) * chains] = c
    given_labels = torch.tensor(labels) % classes
    kept = given_labels.clone()
    x, rows = buffer.sample(len(labels), given_labels)
    assert torch.equal(given_labels, kept)
    assert torch.equal(x, buffer.samples[rows])
    assert torch.equal(x, kept.float()[:, None, None, None].expand(x.shape))
    assert torch.equal(rows // chains, kept)
    buffer.write(rows, x)
    assert torch.equal(buffer.samples[:, 0, 0, 0], torch.arange(classes).repeat_interleave(chains))


def test_a_buffer_keeps_its_own_dtype_and_no_graph():
    buffer = make(4, dtype=torch.float64, reinit_rate=0.5)
    x, rows = buffer.sample(3)
    assert x.dtype == buffer.samples.dtype == torch.float64
    assert (x != x.float()).any()
    buffer.write(rows, x.float().requires_grad_())
    assert buffer.samples.dtype == torch.float64
    assert not buffer.samples.requires_grad


@pytest.mark.parametrize("classes", [1, 4])
def test_unlabelled_draws_are_the_documented_ones(classes):
    """Of the generator's numbers: chains, restarts, fresh samples, in this order."""
    buffer, rng = make(12, reinit_rate=0.3, classes=classes), torch.Generator().manual_seed(0)
    samples = torch.rand(12, 1, 2, 2, generator=rng) * 2 - 1
    rows = torch.randint(12, (40,), generator=rng)
    restart = torch.rand(40, generator=rng) < 0.3
    fresh = torch.rand(40, 1, 2, 2, generator=rng) * 2 - 1
    x, found = buffer.sample(40)
    assert torch.equal(found, rows)
    assert torch.equal(x, torch.where(restart[:, None, None, None], fresh, samples[rows]))


def test_state_goes_on_with_the_same_bits():
    one, other = make(reinit_rate=0.5), make(reinit_rate=0.5, seed=5)
    for _ in range(5):
        x, rows = one.sample(4)
        one.write(rows, x)
    state = one.state_dict()
    kept = {name: value.clone() for name, value in state.items()}
    other.load_state_dict(state)
    assert torch.equal(one.samples, other.samples)
    assert torch.equal(one.ages, other.ages)
    assert other.ages.sum() > 3
    assert all(torch.equal(a, b) for a, b in zip(one.sample(9), other.sample(9), strict=True))
    one.write(torch.tensor([0]), torch.zeros(1, 1, 2, 2))
    assert all(torch.equal(state[name], value) for name, value in kept.items())  # it is a copy
    del state["ages"]
    before = other.samples.clone()
    with pytest.raises(ConfigError, match="holds generator, samples; expected samples, ages and"):
        other.load_state_dict(state)
    assert torch.equal(other.samples, before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make(0), "size is 0"),
        (lambda: make(50, classes=3), "size is 50 and classes is 3"),
        (lambda: make(reinit_rate=1.5), "reinit_rate is 1.5"),
        (lambda: make(low=1.0, high=1.0), "low < high"),
        (lambda: make().sample(0), "n is 0"),
        (lambda: make().write(torch.zeros(2).int(), torch.zeros(3, 1, 2, 2)), r"\(n, 1, 2, 2\)"),
        (lambda: make(4).load_state_dict(make().state_dict()), "settings of the saved run"),
        (
            lambda: make().load_state_dict(make().state_dict() | {"ages": torch.zeros(4).long()}),
            r"ages of \(4,\)",
        ),
        (lambda: make().sample(2, torch.tensor([0, 0])), "does not tell classes apart"),
        *(
            (lambda y=y: make(classes=2).sample(2, y), r"expected \(2,\) and torch.int64")
            for y in (torch.tensor([0]), torch.tensor([[0, 1]]), torch.tensor([0, 1]).int())
        ),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


# -- what is known of a draw -----------------------------------------------------------------------


def read(buffer):
    return {name: value.item() for name, value in buffer.diagnostics().items()}


@pytest.mark.parametrize("classes", [1, 3])
def test_ages_are_those_of_chains_followed_one_by_one(classes):
    """Against a list of ages that is kept by hand, duplicates and restarts included."""
    buffer = make(12, reinit_rate=0.3, classes=classes)
    ages = [0] * 12
    for _ in range(200):
        buffer.samples.fill_(7.0)  # outside of where chains start afresh
        labels = torch.randint(classes, (9,)) if classes > 1 else None
        x, rows = buffer.sample(9, labels)
        fresh = (x != 7).flatten(1).all(1).tolist()
        drawn = [0 if new else ages[row] for row, new in zip(rows.tolist(), fresh, strict=True)]
        found = read(buffer)
        assert found["age"] == pytest.approx(sum(drawn) / 9)
        assert found["reinit"] == pytest.approx(sum(fresh) / 9)
        assert found["duplicates"] == pytest.approx(1 - len(set(rows.tolist())) / 9)
        buffer.write(rows, x)
        for row, age in zip(rows.tolist(), drawn, strict=True):
            ages[row] = age + 1  # the last of several stays
        assert buffer.ages.tolist() == ages


def test_draws_that_are_not_written_age_nothing():
    buffer = make(5, reinit_rate=1.0)
    buffer.ages.fill_(3)
    buffer.sample(4)
    assert read(buffer)["age"] == 0
    assert buffer.ages.tolist() == [3] * 5
    buffer.write(torch.tensor([1, 1]), torch.zeros(2, 1, 2, 2))  # rows of no draw
    assert buffer.ages.tolist() == [3, 4, 3, 3, 3]


def test_nothing_is_known_before_a_draw_and_a_draw_of_one_has_no_duplicates():
    buffer = make(reinit_rate=1.0)
    assert buffer.diagnostics() == {}
    buffer.sample(1)
    assert read(buffer) == {"age": 0.0, "duplicates": 0.0, "reinit": 1.0}
    buffer.load_state_dict(buffer.state_dict())
    assert buffer.diagnostics() == {}
