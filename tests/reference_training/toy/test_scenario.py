"""The scenarios are the paper's where it says what they are."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS
from ebmguard.reference_training.toy.scenario import SCENARIOS

DATA = tuple(DISTRIBUTIONS)
PUBLISHED = ("default", "long", "shifted", "restricted", "degenerate", "proposal")
BROKEN = ("exploding", "lost", "stuck")
MIXTURES = ("good+exploding", "good+lost", "good+stuck")
SETUPS = (*PUBLISHED, *BROKEN, *MIXTURES, "halved", "good+exploding-halved")


def differences(name, base):
    one, other = (dataclasses.asdict(SCENARIOS[each]) for each in (name, base))
    return {key: value for key, value in one.items() if value != other[key]}


def test_every_data_set_has_every_setup():
    assert [*SCENARIOS] == [f"{data}-{setup}" for data in DATA for setup in SETUPS]
    assert all(scenario.data == name.partition("-")[0] for name, scenario in SCENARIOS.items())


@pytest.mark.parametrize(
    ("data", "n_pos", "n_neg", "init_std"),
    # Captions of Figures 10 and 11; the Gaussian of Nijkamp et al. (2020).
    [("gmm", 50, 20, 1.0), ("circles", 100, 100, 2.0)],
)
def test_the_published_numbers(data, n_pos, n_neg, init_std):
    base = SCENARIOS[f"{data}-default"]
    assert (base.n_pos, base.n_neg, base.sgld_steps) == (n_pos, n_neg, 20)  # Section 4.1
    assert (base.init_mean, base.init_std) == (0.0, init_std)
    assert base.step_size == 1.0  # the drift of the published code has no factor
    # Section 4.1 adapts the learning rate of the GMM alone.
    assert (base.lr_at(5000) == base.lr) is (data == "circles")


@pytest.mark.parametrize("data", DATA)
def test_the_published_changes_and_no_others(data):
    base = SCENARIOS[f"{data}-default"]
    changes = {setup: differences(f"{data}-{setup}", f"{data}-default") for setup in SETUPS}
    assert changes["long"] == {"iterations": 2 * base.iterations}  # Figure 5
    assert changes["restricted"] == {"n_neg": 3, "sgld_steps": 3}  # Figures 10 and 11
    assert changes["degenerate"] == {"n_neg": 1, "sgld_steps": 0}  # Figures 8 and 9
    shifted = changes["shifted"]  # Figure 6
    assert set(shifted) == {"init_mean", "init_std", "step_size", "noise_std"}
    assert shifted["init_std"] == base.init_std / 2
    # The step of Langevin's equation is noise_std**2: its drift and noise grow together.
    assert shifted["noise_std"] ** 2 == pytest.approx(10 * base.noise_std**2)
    assert shifted["step_size"] == pytest.approx(10 * base.step_size)
    assert base.output_scale == pytest.approx(2 / base.noise_std**2)
    assert shifted["init_mean"] > 0  # the bottom right is (+, +): in the pictures y grows downward
    proposal = SCENARIOS[f"{data}-proposal"]
    assert (proposal.sgld_steps, proposal.n_pos, proposal.n_neg) == (0, 100, 100)
    assert proposal.iterations == (4 if data == "circles" else 2) * base.iterations
    assert proposal.output_scale == pytest.approx(200)
    assert proposal.lr_end == pytest.approx(proposal.lr / 100)


@pytest.mark.parametrize("data", DATA)
def test_a_mixture_is_the_default_but_for_who_draws(data):
    base = SCENARIOS[f"{data}-default"]
    assert base.samplers == "good"
    for setup in (*BROKEN, *MIXTURES):
        assert differences(f"{data}-{setup}", f"{data}-default") == {"samplers": setup}
        assert SCENARIOS[f"{data}-{setup}"].negatives == base.n_neg * (1 + ("+" in setup))
    assert differences(f"{data}-halved", f"{data}-default") == {"n_neg": base.n_neg // 2}
    equal = SCENARIOS[f"{data}-good+exploding-halved"]
    assert equal.negatives == base.negatives
    assert equal.sampler_names == ("good", "exploding")


def test_the_learning_rate_is_that_of_torchs_exponential_decay():
    scenario = dataclasses.replace(SCENARIOS["gmm-proposal"], iterations=50)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=scenario.lr)
    gamma = (scenario.lr_end / scenario.lr) ** (1 / 50)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    for step in range(51):
        assert scenario.lr_at(step) == pytest.approx(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert scenario.lr_at(50) == pytest.approx(scenario.lr_end)
