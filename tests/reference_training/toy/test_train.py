"""The ensemble trainer: members as if alone, what a run keeps, and who is lost."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ebmguard.reference_training.engine.ranks import ONE_RANK
from ebmguard.reference_training.engine.record import Record
from ebmguard.reference_training.toy.config import ToyConfig
from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS
from ebmguard.reference_training.toy.members import Members
from ebmguard.reference_training.toy.network import EnsembleMLP
from ebmguard.reference_training.toy.sampler import Draws
from ebmguard.reference_training.toy.scenario import SCENARIOS
from ebmguard.reference_training.toy.train import Ensemble
from ebmguard.sinks import read_jsonl
from tests.reference_training.parts import (
    CPU,
    TOY,
    in_float64,
    largest_difference,
    pulled,
    saved,
    small_evaluations,
)

config_for, go = TOY.config_for, TOY.go


def parameters(out):
    return dict(saved(out)["network"])


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    small_evaluations(monkeypatch)


@pytest.fixture
def double():
    with in_float64():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of four members, which many tests look at."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patched:
        small_evaluations(patched)
        go(config_for(out, **WHOLE))
    return out


WHOLE: dict[str, Any] = {"betas": ("0", "0.5"), "evaluations": 6}


@pytest.mark.parametrize(
    ("scenario", "limit"), [("gmm-default", 1e-6), ("gmm-good+exploding", 1e-9)]
)
def test_each_member_is_as_if_trained_alone(tmp_path, request, scenario, limit):
    if limit < 1e-8:
        request.getfixturevalue("double")
    settings = {"scenario": scenario, "iterations": 6, "evaluations": 1, "checkpoint_every": 6}
    betas, variants = ("0", "0.5", "-0.2"), ("default", "no_pos", "batch", "true")
    go(config_for(tmp_path / "all", betas=betas, variants=variants, **settings))
    # The list of so many is no setting that is too long to be one.
    assert ToyConfig(out=tmp_path / "all", resume=True).open()[0].betas == betas
    together = parameters(tmp_path / "all")
    who = Members.of(betas, variants, (0, 1)).describe()
    assert len(who) == 24
    for i in (5, 8, 14, 23):  # every variant off β = 0, both seeds
        one = who[i]
        out = tmp_path / str(i)
        alone = {"betas": (one["beta"],), "variants": (one["variant"],), "seeds": 1}
        go(config_for(out, **alone, seed=one["seed"], **settings))
        mine = {name: value[i : i + 1] for name, value in together.items()}
        assert largest_difference(parameters(out), mine) <= limit, one


@pytest.mark.parametrize(
    ("scenario", "offsets"), [("gmm-shifted", (0,)), ("gmm-good+lost", (0, 10))]
)
@pytest.mark.usefixtures("double")
def test_the_trainer_is_the_published_loop(tmp_path, scenario, offsets):
    """Against a plain loop of 1x1 convolutions on one model, written as the published one.

    Each offset of the start points is one of a mixture's samplers.
    """
    only = {"betas": ("0.5",), "seeds": 1, "iterations": 20, "evaluations": 1}
    go(config_for(tmp_path, scenario=scenario, checkpoint_every=20, **only))
    settings, distribution = replace(SCENARIOS[scenario], iterations=20), DISTRIBUTIONS["gmm"]
    start = EnsembleMLP([0])
    layers: list[nn.Module] = []
    for weight in start.weights:
        fan_in, fan_out = weight.shape[1:]
        layers += [nn.Conv2d(fan_in, fan_out, 1, bias=fan_out > 1), nn.LeakyReLU(0.05)]
    net = nn.Sequential(*layers[:-1])
    convolutions = [layer for layer in net if isinstance(layer, nn.Conv2d)]
    with torch.no_grad():
        for layer, weight in zip(convolutions, start.weights, strict=True):
            layer.weight.copy_(weight[0].T[:, :, None, None])
        for layer, bias in zip(convolutions, start.biases, strict=False):
            assert layer.bias is not None
            layer.bias.copy_(bias[0, 0])
    optimizer = torch.optim.Adam(net.parameters(), lr=settings.lr)
    rng = torch.Generator().manual_seed(0)
    for step in range(20):
        optimizer.param_groups[0]["lr"] = settings.lr_at(step)
        x_pos = distribution.sample(settings.n_pos, rng)[:, :, None, None]
        normal = torch.randn(21, settings.n_neg, 2, generator=rng)[..., None, None]
        drawn = []
        for offset in offsets:
            x = settings.init_mean + settings.init_std * normal[0] + offset
            for z in normal[1:]:
                x.requires_grad_(True)
                (gradient,) = torch.autograd.grad(net(x).sum(), x)
                x = x.detach() + 0.5 * settings.step_size * gradient + settings.noise_std * z
            drawn.append(x.detach())
        f_pos, f_neg = net(x_pos).flatten(), net(torch.cat(drawn)).flatten()
        loss = pulled(f_pos, f_neg, 0.5 * settings.output_scale)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    trained = parameters(tmp_path)
    for i, layer in enumerate(convolutions):
        mine = trained[f"weights.{i}"][0].T
        assert torch.allclose(mine, layer.weight[:, :, 0, 0], rtol=0, atol=1e-10), i


def test_a_member_that_is_lost_is_said_and_leaves_the_others_alone(whole, tmp_path, monkeypatch):
    positives = Draws.positives

    def with_a_nan(self):
        x = positives(self)
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 5:
            x[1] = torch.nan  # beta 0, seed 1
        return x

    monkeypatch.setattr(Draws, "positives", with_a_nan)
    results = go(config_for(tmp_path, **WHOLE))
    assert [m["diverged_at"] for m in results["members"]] == [None, 4, None, None]
    assert results["diverged_at"] == 4
    alerts = read_jsonl(tmp_path / "alerts.jsonl")
    assert [(a["rule"], a["step"], a["member"]) for a in alerts] == [("nonfinite", 4, 1)]
    one, other = map(parameters, (whole, tmp_path))
    for name in one:
        for member in (0, 2, 3):
            assert torch.equal(one[name][member], other[name][member]), (name, member)


NUMBERS = ("kl", "tv", "mode_mass_error", "energy_scale", "kl_sgld")


def member(beta, variant="default", diverged_at=None, **numbers):
    values = dict.fromkeys(NUMBERS, 1.0) | numbers
    return {"beta": beta, "variant": variant, "diverged_at": diverged_at, **values}


class Script:
    """Stands for an evaluator, and says what it is told."""

    grid = SimpleNamespace(axis=torch.linspace(-1, 1, 3), shape=(3,))

    def __init__(self, evaluations) -> None:
        self.evaluations = iter(evaluations)
        self.sampled_at: list[int] = []

    def log_density(self, network: Any) -> torch.Tensor:
        return torch.arange(12.0).reshape(4, 3)

    def samples(self, network: Any, step: int) -> torch.Tensor:
        self.sampled_at.append(step)
        return torch.full((4, 5, 1), float(step))

    def measure(self, log_density: torch.Tensor) -> list[dict[str, float]]:
        return [{"kl": value} for value in next(self.evaluations)]

    def measure_samples(self, samples: torch.Tensor) -> list[dict[str, float]]:
        return [{"kl_sgld": value} for value in samples[:, 0, 0].tolist()]


def run_of(tmp_path, iterations, evaluations=((),)) -> Ensemble:
    """Four members that are not trained, whose KL are those of the evaluations."""
    count = {"iterations": iterations, "evaluations": len(evaluations)}
    config, folder = config_for(tmp_path / "run", betas=("0", "0.5"), **count).open()
    ensemble = Ensemble(config, Record(config, folder, CPU, ONE_RANK))
    ensemble.evaluator = Script(evaluations)
    return ensemble


def looked_at(ensemble: Ensemble, updates: int) -> list[int]:
    ensemble.record.next_step = updates
    return [step for step in range(1, updates + 1) if ensemble.evaluate(step)]


@pytest.mark.parametrize("gap", [1.1e4, -1.1e4, math.nan, math.inf, -math.inf])
def test_a_member_is_lost_at_its_first_wide_gap(tmp_path, gap):
    ensemble = run_of(tmp_path, 5)
    f_neg = torch.zeros(4, 2)
    for step, own in enumerate((1e4, -1e4, gap, 0.0, gap)):
        # Two positives that say so in their mean alone, and one lost negative of another member.
        f_pos = torch.tensor([[0.0, 0.0], [2 * own, 0.0], [1.0, -1.0], [0.0, 0.0]])
        f_neg[3, 1] = math.nan if step == 1 else 0.0
        ensemble.take_in(step, f_pos, f_neg)
    assert ensemble.diverged_at.tolist() == [-1, 2, -1, 1]


def test_means_are_over_the_last_five_and_hide_no_lost_member(tmp_path):
    evaluations = [[100.0, math.nan, 1.0, 1.0], [100.0, math.inf, 2.0, 2.0]]
    evaluations += [[float(k), float(k), float(k), math.inf] for k in range(4)]
    evaluations.append([4.0, 4.0, math.nan, math.inf])
    ensemble = run_of(tmp_path, 13, evaluations)
    looked_at(ensemble, 13)
    assert ensemble.evaluator.sampled_at == [6, 8, 10, 12, 13]
    ensemble.diverged_at = torch.tensor([-1, 7, -1, 5])
    results, folder = ensemble.results(), ensemble.record.folder
    # What the first two evaluations saw is past; what the last five saw stays.
    kl = [member["kl"] for member in results["members"]]
    assert kl == pytest.approx([2.0, 2.0, math.nan, math.inf], nan_ok=True)
    assert {member["kl_sgld"] for member in results["members"]} == {(6 + 8 + 10 + 12 + 13) / 5}
    assert [member["diverged_at"] for member in results["members"]] == [None, 7, None, 5]
    assert results["diverged_at"] == 5
    assert all(set(m).isdisjoint({"step", "member"}) for m in results["members"])
    who = [(m["beta"], m["variant"], m["seed"]) for m in results["members"]]
    assert who == [(b, "default", s) for b in ("0", "0.5") for s in (0, 1)]
    rows = read_jsonl(folder.path / "members.jsonl")
    assert [row["member"] for row in rows] == [0, 1, 2, 3] * 7
    with np.load(folder.figures / "grids.npz") as grids:
        np.testing.assert_array_equal(grids["axis"], [-1.0, 0.0, 1.0])
        np.testing.assert_array_equal(grids["negative_energy"], np.arange(12.0).reshape(4, 3))
        assert grids["negative_energy"].dtype == grids["samples"].dtype == np.float32
        assert (grids["samples"] == 13).all()
    ensemble = run_of(tmp_path / "one", 1, [[3.0, math.nan, 1.0, 2.0]])
    assert math.isnan(ensemble.kl)
    looked_at(ensemble, 1)
    assert ensemble.kl == 3.0
    assert ensemble.results()["diverged_at"] is None
