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

from ebmguard.errors import ConfigError
from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS
from ebmguard.reference_training.toy.members import Beta, Members, averaged_loss
from ebmguard.reference_training.toy.network import EnsembleMLP
from ebmguard.reference_training.toy.sampler import Draws, make_sampler, make_training_sampler
from ebmguard.reference_training.toy.scenario import SAMPLERS, SCENARIOS
from ebmguard.samplers import Mixture
from tests.reference_training.parts import CPU


def test_a_beta_is_a_number_a_schedule_or_an_average():
    assert Beta.parse("-0.5").starts == Beta.parse("-0.5").ends == (-0.5,)
    assert (Beta.parse("0:0.9").starts, Beta.parse("0:0.9").ends) == ((0.0,), (0.9,))
    assert Beta.parse("0.1+0.5:0.9").ends == (0.1, 0.9)


@pytest.mark.parametrize("text", ["", "x", "0.5:", "0:1:2", "1.5", "nan", "inf", "0.5+", "0:2"])
def test_a_beta_that_cannot_be_meant_is_refused(text):
    with pytest.raises(ConfigError, match="expected a number up to 1"):
        Beta.parse(text)


@pytest.mark.parametrize(
    ("betas", "variants", "seeds", "match"),
    [
        ([], ["default"], [0], "betas is"),
        (["0", "0"], ["default"], [0], "different values"),
        (["0"], ["best"], [0], "variant is 'best'"),
        (["0"], ["default"], [], "seeds is"),
        (["0.1+0.2", "0.1+0.2+0.3"], ["default"], [0], "equally many terms"),
    ],
)
def test_lists_that_cannot_be_meant_are_refused(betas, variants, seeds, match):
    with pytest.raises(ConfigError, match=match):
        Members.of(betas, variants, seeds)


def test_seeds_vary_fastest_then_betas_then_variants():
    members = Members.of(["0", "0.5"], ["default", "true"], [3, 4])
    assert len(members) == 8
    assert members.describe()[:3] == [
        {"beta": "0", "variant": "default", "seed": 3},
        {"beta": "0", "variant": "default", "seed": 4},
        {"beta": "0.5", "variant": "default", "seed": 3},
    ]
    assert [one["variant"] for one in members.describe()] == ["default"] * 4 + ["true"] * 4
    seeds = members.spread(torch.tensor(members.seeds))
    assert seeds.tolist() == members.seed_of_each
    stacked = torch.stack([torch.tensor(members.seeds), torch.tensor([0, 1])])
    assert members.spread(stacked, 1).shape == (2, 8)


def test_every_member_has_its_own_strength_and_schedule():
    members = Members.of(["0", "0.5"], ["default", "true"], [3, 4])
    strength = members.strength(200.0, 1000, CPU)
    assert strength["output_scale"] == 200.0
    assert strength["beta_star"].tolist() == [0, 0, 100, 100] * 2
    strength = Members.of(["0.2", "0:0.8"], ["default"], [0]).strength(10.0, 100, CPU)
    assert strength["beta_star"](0).tolist() == [2.0, 0.0]
    assert strength["beta_star"](50).tolist() == pytest.approx([2.0, 4.0])


def test_an_average_samples_at_its_mean_beta():
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


def inputs(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def alone(ensemble, member):
    """The same network of linear layers, in float64."""
    layers: list[nn.Module] = []
    for i, weight in enumerate(ensemble.weights):
        fan_in, fan_out = weight.shape[1:]
        layer = nn.Linear(fan_in, fan_out, dtype=torch.float64)
        layer.weight.data = weight[member].detach().double().T
        layer.bias.data = (
            ensemble.biases[i][member, 0].detach().double()
            if i < len(ensemble.biases)
            else torch.zeros(1, dtype=torch.float64)
        )
        layers += [layer, nn.LeakyReLU(0.05)]
    return nn.Sequential(*layers[:-1])


@pytest.mark.parametrize("dim", [1, 2])
def test_members_are_networks_of_linear_layers(dim):
    ensemble = EnsembleMLP([3, 1, 4], dim).double()
    assert ensemble.members == 3
    x = inputs(3, 7, dim).requires_grad_()
    f = ensemble(x)
    assert f.shape == (3, 7)
    f.square().sum().backward()
    assert x.grad is not None
    for member in range(3):
        network = alone(ensemble, member)
        own = x[member].detach().requires_grad_()
        expected = network(own).squeeze(-1)
        torch.testing.assert_close(f[member], expected, rtol=1e-12, atol=1e-14)
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad[member], own.grad, rtol=1e-10, atol=1e-14)
        for i, weight in enumerate(ensemble.weights):
            linear = network[2 * i]
            assert isinstance(linear, nn.Linear)
            assert weight.grad is not None
            assert linear.weight.grad is not None
            torch.testing.assert_close(
                weight.grad[member], linear.weight.grad.T, rtol=1e-10, atol=1e-14
            )


def test_networks_have_the_published_sizes_and_start_as_their_seeds_say():
    """10,593 parameters (Nijkamp et al. 2020), less the last bias."""
    ensemble = EnsembleMLP([0])
    assert sum(p.numel() for p in ensemble.parameters()) == 10_593 - 1
    sizes = [2, *(weight.shape[-1] for weight in ensemble.weights)]
    assert sizes == [2, 32, 64, 64, 64, 1]
    many, one = EnsembleMLP([5, 6, 5]), EnsembleMLP([6])
    for together, single in zip(many.parameters(), one.parameters(), strict=True):
        assert torch.equal(together[0], together[2])
        assert not torch.equal(together[0], together[1])
        assert torch.equal(together[1:2], single)


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


class Quadratic(torch.nn.Module):
    """f = -|x|² / (2 std² o): with the scenario's output scale the density is N(0, std²)."""

    def __init__(self, std: float) -> None:
        super().__init__()
        self.std = std

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f: torch.Tensor = -x.square().sum(-1) / (2 * self.std**2 * SETTINGS.output_scale)
        return f


def chains(n, steps=SETTINGS.sgld_steps):
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn((steps + 1, 2, n, 2), generator=rng)
    return noise[0], noise[1:]


def test_a_broken_step_is_another_langevin_step():
    """Their drift and their noise still belong together, as o = 2 step_size / noise_std²."""
    f, (x0, noise) = Quadratic(1.0), chains(5, steps=1)
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
    f, (x0, noise) = Quadratic(0.15), chains(1000)
    size = {
        name: make_sampler(SETTINGS, name)(f, x0, noise).square().mean().sqrt() / 0.15
        for name in SAMPLERS
    }
    # An AR(1) process of factor 1 - a with a = noise² / (2 std²) has the variance std² / (1 - a/2).
    a = 0.1**2 / (2 * 0.15**2)
    assert size["good"] == pytest.approx((1 - a / 2) ** -0.5, rel=0.05)
    assert size["exploding"] > 1e20
    assert size["stuck"] == pytest.approx(1 / 0.15, rel=0.1)
    assert make_sampler(SETTINGS, "lost")(Quadratic(10.0), x0, noise).min() > 1.6


def test_a_mixture_has_the_same_good_samples_and_says_whose_are_whose():
    f, (x0, noise) = Quadratic(1.0), chains(5)
    mixture = make_training_sampler(replace(SETTINGS, samplers="good+lost"), CPU)
    assert isinstance(mixture, Mixture)
    x = mixture(f, x0, noise)
    assert x.shape == (2, 10, 2)
    assert mixture.parts == {"good": slice(0, 5), "lost": slice(5, 10)}
    for name, part in mixture.parts.items():
        assert torch.equal(x[:, part], make_sampler(SETTINGS, name)(f, x0, noise))


def draws_of(betas=("0", "0.5"), seeds=(5, 6), scenario="gmm-default", **changes):
    settings = replace(SCENARIOS[scenario], **changes)
    members = Members.of(betas, ("default",), seeds)
    return Draws(settings, members, members.seeds, torch.device("cpu"))


def update(draws):
    return [draws.positives(), *draws.chains(4)]


def test_a_seed_draws_the_same_whoever_is_beside_it():
    together, alone = draws_of(), draws_of(betas=("0.5",), seeds=(6,))
    for _ in range(2):
        many, one = update(together), update(alone)
        for member in (1, 3):
            assert torch.equal(many[0][member], one[0][0])
            assert torch.equal(many[1][member], one[1][0])
            assert torch.equal(many[2][:, member], one[2][:, 0])


def test_chains_start_from_the_gaussian_and_their_noise_is_standard():
    draws = draws_of(init_mean=3.0, init_std=0.5, sgld_steps=5)
    x0, noise = draws.chains(5_000)
    assert (x0.shape, noise.shape) == ((4, 5_000, 2), (5, 4, 5_000, 2))
    assert x0.mean().item() == pytest.approx(3.0, abs=0.02)
    assert x0.std().item() == pytest.approx(0.5, abs=0.02)
    assert noise.mean().item() == pytest.approx(0.0, abs=0.02)
    assert noise.std().item() == pytest.approx(1.0, abs=0.02)
    # No step shares its noise with another one, nor with the start.
    steps = torch.cat([(x0[:1] - 3) / 0.5, noise[:, 0]]).flatten(1).double()
    assert (torch.corrcoef(steps) - torch.eye(6)).abs().max() < 0.05


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
