"""The benchmark of β on the true scale: coordinates, log Z, chains, cells and the page."""

from __future__ import annotations

import math
from copy import deepcopy
from functools import partial

import pytest
import torch
from scipy.stats import multivariate_normal
from torch import nn

from benchmarks import true_scale, true_scale_cell
from benchmarks.cells import read_json, write_json
from benchmarks.true_scale_cell import (
    CHAINS,
    Cell,
    Chains,
    Couplings,
    Data,
    Frozen,
    Network,
    judged,
    negatives,
    standard,
    whole,
)
from ebmguard.likelihood import Gaussian
from ebmguard.samplers import sgld
from ebmguard.steering import AdaptiveSteps


@pytest.fixture(scope="module")
def data():
    return Data.load()


@pytest.fixture(scope="module")
def flow():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(true_scale_cell, "FLOW_UPDATES", 600)
        return Data.load("flow")


def test_coordinates_of_the_base(data):
    rng = torch.Generator().manual_seed(3)
    u = data.white(data.test, rng).double()
    x = u @ data.gaussian.factor.T + data.gaussian.mean
    known = multivariate_normal(data.gaussian.mean, data.gaussian.factor @ data.gaussian.factor.T)
    own = whole(lambda u: u.new_zeros(len(u)))(u) - data.log_det
    torch.testing.assert_close(own, torch.from_numpy(known.logpdf(x)))
    # Of the noise alone, in units of the pixels.
    noise = (x - data.test).std()
    assert noise == pytest.approx(true_scale_cell.NOISE, rel=5 / math.sqrt(2 * x.numel()))


def test_the_flow_has_its_volume_and_its_inverse_and_fits_better(flow, data):
    own = deepcopy(flow.flow).double()
    v = torch.randn(3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(own.inverse(own(v)), v)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda v: own(v[None])[0]))(v)
    volume = torch.full((3,), data.log_det - flow.log_det, dtype=torch.float64)
    # log_det sums 64 numbers in float32.
    bound = 64 * torch.finfo(torch.float32).eps * own.log_scale.abs().sum().item()
    found = torch.linalg.slogdet(jacobian).logabsdet
    torch.testing.assert_close(found, volume, rtol=0, atol=bound)

    def held_out(of):
        return standard(64).log_prob(of.noisy[1]).mean() - of.log_det

    assert held_out(flow) > held_out(data)


class Bowl(nn.Module):
    """g = -a |u|²/2, for which Z = (1 + a)^-32."""

    def __init__(self, a: float) -> None:
        super().__init__()
        self.a = a

    def forward(self, u):
        return -self.a * u.square().sum(1) / 2


@pytest.mark.parametrize("a", [0.0, 0.5])
def test_log_z_from_both_sides(a, data):
    found = judged(Bowl(a), data, temperatures=100)
    assert not found["problems"]
    log_z = -32 * math.log(1 + a)
    # Lower and upper are two standard errors away; float32 energies of a hundred are rounded.
    assert found["lower"] - 1e-3 <= log_z <= found["upper"] + 1e-3
    u = data.noisy[1].double()
    of_images = whole(Bowl(a))(u).mean().item() - data.log_det
    assert found["test"] == pytest.approx(of_images, rel=1e-5)


@pytest.mark.parametrize("name", ["fresh", "adaptive", "persistent", "mala", "hmc", "mixture"])
def test_chains_stay_on_the_base_where_g_is_flat(name):
    chains = Chains(name, 64, torch.Generator().manual_seed(0))
    before = chains.rows.clone()
    drawn = torch.cat([chains(Bowl(0.0)) for _ in range(20)])
    # The mean of |u|² is 64 and its standard deviation √128; Langevin steps of 0.2 widen by 1%.
    assert drawn.square().sum(1).mean().item() == pytest.approx(
        64, abs=0.64 + 5 * (128 / 1280) ** 0.5
    )
    moved = (chains.rows != before).any(1).sum()
    assert (moved == 0) == (name in ("fresh", "adaptive"))
    assert moved < CHAINS
    assert (chains.acceptance is not None) == (name in ("mala", "hmc"))


def test_adaptive_chains_take_as_many_and_as_fine_steps_as_the_guard_says(data, monkeypatch):
    eager = partial(AdaptiveSteps, floor=0.999, clear=0.9995)  # 64 / 65 at most: more at every row
    monkeypatch.setattr(true_scale_cell, "AdaptiveSteps", eager)
    network = Network(data.gaussian, data.flow.inverse)
    rng = torch.Generator().manual_seed(0)
    _, loss_of, chains = negatives(Cell("adaptive", 0.1, 0), network, rng)
    plans = [chains.plan()]
    for _ in range(3):
        loss_of(data.noisy[0][: true_scale_cell.BATCH])
        plans.append(chains.plan())
    assert plans == [(16, 1), (32, 2), (64, 4), (64, 4)]
    again, g = torch.Generator().set_state(rng.get_state()), whole(Bowl(0.5))
    start = standard(64).sample(true_scale_cell.BATCH, again)
    fine = sgld(g, start, steps=64, step_size=0.1**2 / 2, noise_std=0.1, generator=again)
    torch.testing.assert_close(chains(Bowl(0.5)), fine, rtol=0, atol=0)


@pytest.mark.parametrize("side", [8, 14])
def test_the_network_is_flat_in_no_direction_and_frozen_is_the_same(side):
    u = standard(side**2).sample(8, torch.Generator().manual_seed(0)).requires_grad_()
    x = torch.randn(2 * side**2, side**2, generator=torch.Generator().manual_seed(1))
    back = Couplings(side**2, count=2)
    network = Network(Gaussian.fit(x, noise=0.1, independent=False), back.inverse)
    (slope,) = torch.autograd.grad(network(u).sum(), u)
    assert sum(p.numel() for p in network.parameters()) == 34_329
    assert (slope != 0).all()
    frozen = Frozen(network)(u)
    # float32 sums of at most 256 terms, through three layers.
    bound = 3 * 256 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(frozen, network(u), rtol=bound, atol=bound)
    (again,) = torch.autograd.grad(frozen.sum(), u)
    torch.testing.assert_close(again, slope, rtol=bound, atol=bound * slope.abs().max().item())


@pytest.mark.parametrize(
    ("cell", "base"),
    [
        (Cell("fresh", 0.2, 0), "-21.5"),
        (Cell("adaptive", 0.1, 0), "-21.5"),
        (Cell("annealed", 1.0, 0), "-21.5"),
        (Cell("persistent", 0.1, 0, "mnist"), "-17.2"),
        (Cell("fresh", 0.1, 0, "flow"), "-21."),
    ],
)
def test_a_cell_and_its_page(cell, base, tmp_path, monkeypatch, request):
    if cell.data == "mnist":
        request.getfixturevalue("data_root")
        known = {"the base": -17.27, "10 Gaussians": 5.92, "kernels": -12.82}  # take minutes
        write_json(tmp_path / f"yardsticks_{cell.data}.json", known)
    monkeypatch.setattr(true_scale_cell, "UPDATES", 3)
    monkeypatch.setattr(true_scale_cell, "FLOW_UPDATES", 30)
    monkeypatch.setattr(true_scale_cell, "JUDGED", (2, 3))
    monkeypatch.setattr(true_scale_cell, "judged", partial(judged, temperatures=20))
    monkeypatch.setattr(true_scale, "UPDATES", 3)
    monkeypatch.setattr(true_scale, "PICTURE", tmp_path / "true_scale.png")
    true_scale_cell.run(cell, tmp_path)
    result = read_json(tmp_path / cell.name / "result.json")
    assert result["lost_at"] is None
    assert [own["updates"] for own in result["judged"]] == [2, 3]
    write_json(tmp_path / f"{cell.name}.done", {"commit": "c0ffee", "rules": None})
    page = "\n".join(true_scale.page(tmp_path))
    # After three updates g is flat: the base's own number, as the yardstick has it.
    assert page.count(base) >= 4
    assert "(1 of 1)" in page
    assert (tmp_path / "true_scale.png").stat().st_size > 10_000
