"""Who is in an ensemble, its network and samplers, and the scenarios of the paper."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn.functional import softplus

from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS
from ebmguard.reference_training.toy.members import Members, averaged_loss
from ebmguard.reference_training.toy.network import EnsembleMLP
from ebmguard.reference_training.toy.sampler import make_sampler
from ebmguard.reference_training.toy.scenario import SAMPLERS, SCENARIOS
from tests.reference_training.parts import CPU


def test_schedules_move_and_an_average_samples_at_its_mean_beta():
    strength = Members.of(["0.2", "0:0.8"], ["default"], [0]).strength(10.0, 100, CPU)
    assert strength["beta_star"](0).tolist() == [2.0, 0.0]
    assert strength["beta_star"](50).tolist() == pytest.approx([2.0, 4.0])
    members = Members.of(["0.1+0.5", "0.4"], ["default"], [0])
    starts, slopes = members.exponents(10.0, 100, CPU)
    assert (members.terms, starts.tolist()) == (2, [[1.0, 4.0], [5.0, 4.0]])
    assert not slopes.any()
    assert members.strength(10.0, 100, CPU)["beta_star"].tolist() == [3.0, 4.0]
    moving = Members.of(["0:0.2+0.4:0.8"], ["default"], [0])
    starts, slopes = moving.exponents(10.0, 100, CPU)
    torch.testing.assert_close(starts + 50 * slopes, torch.tensor([[1.0], [6.0]]).double())
    assert moving.strength(10.0, 100, CPU)["beta_star"](50).tolist() == pytest.approx([3.5])


def test_an_average_of_losses_is_that_of_every_member_by_itself():
    rng = torch.Generator().manual_seed(0)
    f_pos, f_neg = (torch.randn(4, n, generator=rng, dtype=torch.float64) for n in (5, 7))
    exponents = torch.tensor([[0.5, 1.0, 0.5, 1.0], [2.0, -1.0, 2.0, -1.0]], dtype=torch.float64)
    expected = 0.0
    for own in exponents:
        for g, beta in enumerate(own):
            log_sum = (beta * f_neg[g]).logsumexp(0)
            if g < 2:  # Eq. 8
                expected += softplus(log_sum - beta * f_pos[g]).mean() / beta / 2
            else:  # Eq. 7
                expected += (log_sum / beta - f_pos[g].mean()) / 2
    found = averaged_loss(f_pos, f_neg, exponents, ("default", "no_pos"))
    torch.testing.assert_close(found, expected)


def test_networks_have_the_published_sizes():
    """10,593 parameters (Nijkamp et al. 2020), less the last bias."""
    ensemble = EnsembleMLP([0])
    assert sum(p.numel() for p in ensemble.parameters()) == 10_593 - 1
    sizes = [2, *(weight.shape[-1] for weight in ensemble.weights)]
    assert sizes == [2, 32, 64, 64, 64, 1]


def test_starts_out_as_the_layers_of_torch_do():
    """The two-sample Kolmogorov-Smirnov test against nn.Linear, and its bounds."""
    ensemble = EnsembleMLP(range(20))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for i, weight in enumerate(ensemble.weights):
            layers = [nn.Linear(*weight.shape[1:]) for _ in range(20)]
            pairs = [(weight, torch.cat([layer.weight.detach().flatten() for layer in layers]))]
            if i < len(ensemble.biases):
                drawn = torch.cat([layer.bias.detach() for layer in layers])
                pairs.append((ensemble.biases[i], drawn))
            for mine, theirs in pairs:
                values = mine.detach().flatten().numpy()
                assert abs(values).max() <= 1 / math.sqrt(weight.shape[1])
                assert stats.ks_2samp(values, theirs.numpy()).pvalue > 1e-3


SETTINGS = SCENARIOS["gmm-default"]


def bowl(std):
    """With the scenario's output scale the density is N(0, std²)."""
    return lambda x: -x.square().sum(-1) / (2 * std**2 * SETTINGS.output_scale)


def chains(n, steps=SETTINGS.sgld_steps):
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn((steps + 1, 2, n, 2), generator=rng)
    return noise[0], noise[1:]


def test_a_broken_step_is_another_langevin_step():
    """Their drift and their noise still belong together, as o = 2 step_size / noise_std²."""
    f, (x0, noise) = bowl(1.0), chains(5, steps=1)
    one = replace(SETTINGS, sgld_steps=1)
    for name in ("good", "exploding", "stuck"):
        step = SAMPLERS[name].step
        other = replace(one, step_size=step, noise_std=0.1 * step**0.5)
        assert other.output_scale == pytest.approx(SETTINGS.output_scale)
        moved = make_sampler(one, name)(f, x0, noise)
        expected = x0 - step * x0 / SETTINGS.output_scale + 0.1 * step**0.5 * noise[0]
        torch.testing.assert_close(moved, expected)


def test_what_goes_wrong_on_a_mode_of_the_data():
    """The width of a mode of the GMM: steps of its samplers are 0.44 std² of it or fewer."""
    f, (x0, noise) = bowl(0.15), chains(1000)
    size = {
        name: make_sampler(SETTINGS, name)(f, x0, noise).square().mean().sqrt() / 0.15
        for name in SAMPLERS
    }
    # An AR(1) process of factor 1 - a with a = noise² / (2 std²) has the variance std² / (1 - a/2).
    a = 0.1**2 / (2 * 0.15**2)
    assert size["good"] == pytest.approx((1 - a / 2) ** -0.5, rel=0.05)
    assert size["exploding"] > 1e20
    assert size["stuck"] == pytest.approx(1 / 0.15, rel=0.1)
    assert make_sampler(SETTINGS, "lost")(bowl(10.0), x0, noise).min() > 1.6


DATA = tuple(DISTRIBUTIONS)
PUBLISHED = ("default", "long", "shifted", "restricted", "degenerate", "proposal")
BROKEN = ("exploding", "lost", "stuck")
MIXTURES = ("good+exploding", "good+lost", "good+stuck")
SETUPS = (*PUBLISHED, *BROKEN, *MIXTURES, "halved", "good+exploding-halved")


def differences(name, base):
    one, other = (dataclasses.asdict(SCENARIOS[each]) for each in (name, base))
    return {key: value for key, value in one.items() if value != other[key]}


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
