"""The guarded contrastive divergence beside torchebm's own, on torchebm's own samplers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchebm.core import BaseModel
from torchebm.losses import ContrastiveDivergence
from torchebm.samplers import (
    FlowSampler,
    GradientDescentSampler,
    HamiltonianMonteCarlo,
    LangevinDynamics,
    NesterovSampler,
    RiemannianManifoldHMC,
)

from ebmguard.adapters.torchebm import GuardedContrastiveDivergence
from ebmguard.errors import ConfigError

# The double precision that closed forms are compared in.
F64: Any = {"dtype": torch.float64}


class Energy(BaseModel):
    """A small network. `factor` is what tempering should come to, `classes` make it conditional."""

    def __init__(self, factor: float = 1.0, classes: int = 0, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
            self.classes = nn.Embedding(classes, 2) if classes else None
        self.factor = factor

    def forward(self, x: Tensor, y: Tensor | None = None, z: float = 0.0) -> Tensor:
        shift = self.classes(y) if self.classes is not None and y is not None else 0.0
        energy: Tensor = self.net(x + shift + z).squeeze(-1) + 0.5 * x.square().sum(-1)
        return self.factor * energy


class OwnGradient(Energy):
    """An analytic gradient beside forward, as torchebm allows it."""

    def gradient(self, x: Tensor, model_kwargs: dict[str, Any] | None = None) -> Tensor:
        found: Tensor = super().gradient(x, model_kwargs)
        return found


def identity_metric(x: Tensor) -> Tensor:
    return torch.eye(x.shape[-1], dtype=x.dtype).expand(x.shape[0], -1, -1).contiguous()


langevin: Any = partial(LangevinDynamics, step_size=0.1)
heun: Any = partial(langevin, integrator="heun")
hmc: Any = partial(HamiltonianMonteCarlo, step_size=0.4, n_leapfrog_steps=4)
riemannian: Any = partial(RiemannianManifoldHMC, metric_fn=identity_metric, step_size=0.4)
descent: Any = partial(GradientDescentSampler, step_size=0.1)
nesterov: Any = partial(NesterovSampler, step_size=0.1)
NOISY = [langevin, heun, hmc, riemannian]
NOISELESS = [descent, nesterov]


def trained(loss_class: Callable[..., Any], sampler: Callable[..., Any], **kwargs: Any) -> Any:
    """Ten steps of torchebm's published loop; what came of them."""
    torch.manual_seed(1)
    model = Energy()
    cd = loss_class(model=model, sampler=sampler(model), k_steps=3, **kwargs)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        loss, negatives = cd(torch.randn(16, 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    return cd, {
        "losses": torch.stack(losses),
        "parameters": parameters,
        "negatives": negatives,
        "random state": torch.get_rng_state(),
        "buffer": cd.replay_buffer,
    }


PERSISTENT: Any = {"persistent": True, "buffer_size": 64, "init_steps": 4}


@pytest.mark.parametrize("sampler", [*NOISY, *NOISELESS])
@pytest.mark.parametrize(
    "options",
    [{}, PERSISTENT, {"energy_reg_weight": 0.0}, {"add_noise_to_real": True, "noise_scale": 0.1}],
    ids=["cd", "persistent", "no L2", "noise on data"],
)
def test_off_it_is_the_class_that_it_replaces_bit_for_bit(sampler, options, tmp_path):
    plain, expected = trained(ContrastiveDivergence, sampler, **options)
    cd, found = trained(
        GuardedContrastiveDivergence, sampler, beta_star=0, log_dir=tmp_path, **options
    )
    for name, value in expected.items():
        assert found[name] is None if value is None else torch.equal(found[name], value), name
    assert cd.state_dict().keys() == plain.state_dict().keys()
    cd.guard.close()
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 10
    assert not cd.guard.alerts


@pytest.mark.parametrize("regularisation", [0.0, 0.01])
@pytest.mark.parametrize("beta_star", [0.3, 0.9])
def test_the_gradient_is_the_closed_form(beta_star, regularisation):
    model = Energy().double()
    cd = GuardedContrastiveDivergence(
        model,
        langevin(model, **F64),
        k_steps=3,
        energy_reg_weight=regularisation,
        beta_star=beta_star,
        **F64,
    )
    x = torch.randn(7, 2, **F64)
    loss, negatives = cd(x)
    found = torch.autograd.grad(loss, list(model.parameters()))

    # F = -E. Each positive is one more negative: w⁺ = sigmoid(β* F⁺ - S), S = log Σ exp(β* F⁻).
    energy, pred_energy = model(x), model(negatives)
    exponent = -beta_star * pred_energy.detach()
    log_sum = exponent.logsumexp(0)
    own_weight = 1 / (1 + torch.exp(log_sum + beta_star * energy.detach()))
    scale = (1 - own_weight).mean()
    weights = torch.exp(exponent - log_sum)
    surrogate = ((1 - own_weight) * energy).mean() - scale * (weights * pred_energy).sum()
    surrogate = surrogate + regularisation * (energy.square().mean() + pred_energy.square().mean())
    expected = torch.autograd.grad(surrogate, list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    value = torch.log1p(torch.exp(log_sum + beta_star * energy)).mean() / beta_star
    value = value + regularisation * (energy.square().mean() + pred_energy.square().mean())
    torch.testing.assert_close(loss, value, rtol=1e-12, atol=0)


def negatives_of(cd: Any) -> Tensor:
    torch.manual_seed(2)
    samples: Tensor = cd(torch.randn(32, 2, **F64))[1]
    return samples


@pytest.mark.parametrize("sampler", NOISY)
def test_negatives_are_those_of_the_tempered_energy(sampler):
    model = Energy().double()
    cd = GuardedContrastiveDivergence(model, sampler(model, **F64), beta_star=0.25, **F64)
    tempered = Energy(factor=0.75).double()
    expected = negatives_of(ContrastiveDivergence(tempered, sampler(tempered, **F64), **F64))
    found = negatives_of(cd)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    untempered = negatives_of(ContrastiveDivergence(model, sampler(model, **F64), **F64))
    assert (found - untempered).abs().max() > 1e-3
    torch.manual_seed(2)
    x = torch.randn(32, 2, **F64)
    plain = cd.sampler.original.sample(x=x, n_steps=10)
    torch.testing.assert_close(plain, untempered, rtol=0, atol=0)


@pytest.mark.parametrize("sampler", NOISELESS)
def test_samplers_without_noise_stay_as_they_are_unless_asked(sampler):
    model = Energy().double()
    cd = GuardedContrastiveDivergence(model, sampler(model, **F64), beta_star=0.25, **F64)
    untempered = negatives_of(ContrastiveDivergence(model, sampler(model, **F64), **F64))
    assert torch.equal(negatives_of(cd), untempered)
    halved = GuardedContrastiveDivergence(
        model, sampler(model, **F64), beta_star=0.25, sampler_scale=0.5, **F64
    )
    tempered = Energy(factor=0.5).double()
    expected = negatives_of(ContrastiveDivergence(tempered, sampler(tempered, **F64), **F64))
    torch.testing.assert_close(negatives_of(halved), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("noise_scale", "expected"), [(1.0, 1.0), (0.5, 4.0), (0.01, 1e4)])
def test_output_scale_is_read_from_the_sampler(noise_scale, expected):
    model = Energy()
    cd = GuardedContrastiveDivergence(
        model, langevin(model, noise_scale=noise_scale), beta_star=0.5
    )
    cd(torch.randn(8, 2))
    row = cd.guard.last
    assert row["energy_gap_scaled"] == pytest.approx(expected * row["energy_gap"], rel=1e-6)
    # Of a step: |η ∇E| against noise_scale sqrt(2 η) in two dimensions.
    size = 0.1 * row["sampler/grad_norm"] * (1 - 0.5 / expected)
    assert row["sampler/drift_to_noise"] == pytest.approx(
        size / (noise_scale * math.sqrt(0.2) * math.sqrt(2)), rel=0.05
    )


def test_a_gradient_of_the_models_own_is_refused_where_it_would_be_missed():
    model = OwnGradient()
    for sampler in (langevin(model), hmc(model)):
        with pytest.raises(ConfigError, match="gradient\\(\\) of its own"):
            GuardedContrastiveDivergence(model, sampler, beta_star=0.5)
        GuardedContrastiveDivergence(model, sampler, beta_star=0)(torch.randn(8, 2))
    # Nothing is missed where nothing is tempered, and where the sampler differentiates by itself.
    GuardedContrastiveDivergence(model, descent(model), beta_star=0.5)(torch.randn(8, 2))
    GuardedContrastiveDivergence(model, riemannian(model), beta_star=0.5)(torch.randn(8, 2))


def test_a_sampler_without_an_energy_is_said_not_to_be_tempered(caplog):
    class Velocity(BaseModel):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return -x

    cd = GuardedContrastiveDivergence(Energy(), FlowSampler(Velocity()), beta_star=0.5)
    for _ in range(6):
        cd(torch.randn(8, 2))
    assert "no step could be seen (differentiated calls: 0)" in caplog.text


class Breaks(Energy):
    """Loses the energies of a few samples from some call on."""

    def __init__(self, bad: float) -> None:
        super().__init__()
        self.bad, self.is_broken = bad, False

    def forward(self, x: Tensor, y: Tensor | None = None, z: float = 0.0) -> Tensor:
        energy = super().forward(x)
        first = torch.arange(len(x)) < 2
        return torch.where(first, self.bad, energy) if self.is_broken else energy


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("beta_star", [0, 0.5])
def test_the_fallback_for_a_lost_loss_does_not_hide_it(bad, beta_star, tmp_path):
    model = Breaks(bad)
    unguarded = ContrastiveDivergence(model, langevin(model))
    cd = GuardedContrastiveDivergence(model, langevin(model), beta_star=beta_star)
    cd(torch.randn(8, 2))
    model.is_broken = True
    x = torch.randn(8, 2)
    assert unguarded(x)[0].item() == pytest.approx(0.1)  # torchebm says nothing
    assert cd(x)[0].item() == pytest.approx(0.1)
    (alert,) = [a for a in cd.guard.alerts if a.rule == "nonfinite"]
    assert (alert.level.name, alert.step) == ("ERROR", 1)
    assert cd.guard.last["nonfinite/pos"] == cd.guard.last["nonfinite/neg"] == 2
    assert math.isfinite(cd.guard.last["loss"]) is (beta_star != 0)


def test_filling_the_buffer_is_no_training_step(caplog):
    model = Energy()
    # Ten chunks of 1,024: as many sampler calls before the first loss as make the guard wonder.
    options: Any = {"persistent": True, "buffer_size": 12_000, "init_steps": 1}
    cd = GuardedContrastiveDivergence(model, langevin(model), beta_star=0.5, **options)
    torch.manual_seed(3)
    cd(torch.randn(8, 2))
    plain = ContrastiveDivergence(model, langevin(model), **options)
    torch.manual_seed(3)
    plain(torch.randn(8, 2))
    same = (cd.replay_buffer == plain.replay_buffer).all(-1)
    assert same[8:].all()  # the first 8 rows are the step's tempered samples
    assert not same[:8].any()
    assert not caplog.records
    assert cd.guard.last["sampler/evaluations"] == 10


def conditional(**kwargs: Any) -> GuardedContrastiveDivergence:
    model = Energy(classes=3).double()
    options: Any = {"energy_reg_weight": 0.0, "check_conditioning": False} | F64 | kwargs
    return GuardedContrastiveDivergence(model, langevin(model, **F64), **options)


def test_labels_are_groups():
    cd = conditional(beta_star=0.5)
    y = torch.tensor([0, 0, 1, 1, 1, 2])
    x = torch.randn(6, 2, **F64)
    loss, negatives = cd(x, y=y)
    energy, pred_energy = cd.model(x, y), cd.model(negatives, y)
    terms = [
        torch.log1p(torch.exp(0.5 * (energy[i] - pred_energy[y == y[i]])).sum()) / 0.5
        for i in range(6)
    ]
    torch.testing.assert_close(loss, torch.stack(terms).mean(), rtol=1e-12, atol=0)
    assert cd.guard.last["unpaired"] == 0
