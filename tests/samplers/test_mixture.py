"""Several samplers, one set of negatives."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from ebmguard.alerts import Bound, Remedies
from ebmguard.errors import ConfigError, SamplerError
from ebmguard.samplers import Mixture, ReplayBuffer, sgld
from tests.parts import Bowl, gradient_at


def test_samples_stand_side_by_side_in_the_order_of_their_samplers():
    given: list[object] = []

    def sampler(name, size, value):
        def sample(*args, **kwargs):
            given.append((name, args, kwargs))
            return torch.full((size, 2), value)

        return sample

    mixture = Mixture({"b": sampler("b", 3, 1.0), "a": sampler("a", 2, 2.0)})
    assert mixture.parts == {}
    x = mixture("f", y=7)
    assert given == [("b", ("f",), {"y": 7}), ("a", ("f",), {"y": 7})]
    assert mixture.parts == {"b": slice(0, 3), "a": slice(3, 5)}
    assert torch.equal(x[:, 0], torch.tensor([1.0, 1.0, 1.0, 2.0, 2.0]))


def test_ensembles_join_along_their_batch_dimension():
    parts = {str(n): torch.randn(4, n, 2) for n in (3, 0, 5)}
    mixture = Mixture({name: partial(torch.clone, x) for name, x in parts.items()}, dim=1)
    x = mixture()
    assert x.shape == (4, 8, 2)
    for name, part in parts.items():
        assert torch.equal(x[:, mixture.parts[name]], part)


def test_each_part_may_bring_a_replay_buffer_of_its_own():
    rng = torch.Generator().manual_seed(0)
    buffers = {
        "fresh": ReplayBuffer(50, (2,), reinit_rate=1.0, generator=rng),
        "old": ReplayBuffer(9, (2,), reinit_rate=0.0, generator=rng),
    }
    sizes = {"fresh": 4, "old": 6}

    def persistent(name: str, f: Bowl) -> Tensor:
        x0, rows = buffers[name].sample(sizes[name])
        x = sgld(f, x0, steps=2, step_size=0.1, noise_std=0.1, generator=rng)
        buffers[name].write(rows, x)
        return x

    mixture = Mixture({name: partial(persistent, name) for name in buffers})
    for _ in range(3):
        x = mixture(Bowl(torch.float32))
        assert x.shape == (10, 2)
    for name, part in mixture.parts.items():
        chains = buffers[name].samples
        assert (chains == x[part][-1]).all(1).any()  # the last write of a row stays
    assert buffers["old"].ages.max() == 3


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (None, "'b' returned a NoneType; expected one tensor"),
        ((torch.zeros(2, 3), 1), "'b' returned a tuple"),
        (torch.tensor(1.0), r"shape \(\) .*, which has no dimension 0"),
        (torch.zeros(2, 4), r"'b' returned samples of shape \(2, 4\) .*'a' .*\(5, 3\)"),
        (torch.zeros(2, 3, 1), r"\(2, 3, 1\)"),
        (torch.zeros(2, 3, dtype=torch.float64), "torch.float64 on cpu"),
        (torch.zeros(2, 3, device="meta"), "torch.float32 on meta"),
    ],
)
def test_refuses_samples_that_do_not_fit(second, message):
    """The parts of the call before stay."""
    answers = iter([torch.zeros(1, 3), second])
    mixture = Mixture({"a": lambda: torch.zeros(5, 3), "b": lambda: next(answers)})
    mixture()
    before = mixture.parts
    with pytest.raises(SamplerError, match=message):
        mixture()
    assert mixture.parts is before == {"a": slice(0, 5), "b": slice(5, 6)}


@pytest.mark.parametrize(
    ("samplers", "dim", "message"),
    [
        ({}, 0, "at least one sampler"),
        ([gradient_at], 0, "samplers= is .*; expected Mapping"),
        ({"": gradient_at}, 0, "'' is no name"),
        ({1: gradient_at}, 0, "1 is no name"),
        ({"a": Bowl().height}, 0, "'a' is a Parameter, which cannot be called"),
        ({"a": gradient_at}, -2, "dim is -2"),
    ],
)
def test_refuses_samplers(samplers, dim, message):
    with pytest.raises(ConfigError, match=message):
        Mixture(samplers, dim=dim)


@pytest.mark.parametrize("tag", ["mixture/a/weight", "ref/mixture/a/weight"])
def test_a_rule_on_numbers_that_rows_no_longer_have_is_refused(tag):
    with pytest.raises(ConfigError, match=r"Sum ebmguard\.objective\.weights.*Mixture\.parts"):
        Bound(tag, "below", 0.1, 5, Remedies((), (), ()))
