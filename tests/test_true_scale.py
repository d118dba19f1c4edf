"""The benchmark of β on the true scale: coordinates, log Z, chains, cells and the page."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import asdict
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import nn

from benchmarks import true_scale, true_scale_cell, true_scale_model
from benchmarks.true_scale_cell import JUDGED, UPDATES, Cell, Chains, judged, negatives
from benchmarks.true_scale_model import Couplings, Data, Network, Networks, standard, whole
from ebmguard.likelihood import Gaussian


@pytest.fixture(scope="module")
def data():
    return Data.load()


@pytest.fixture(scope="module")
def flow():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(true_scale_model, "FLOW_UPDATES", 150)
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
    assert noise == pytest.approx(true_scale_model.NOISE, rel=5 / math.sqrt(2 * x.numel()))


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
        return -self.a * u.square().sum(-1) / 2


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


def test_converged_chains_have_the_weights_of_the_tempered_density(data, monkeypatch):
    """g = c u₁ moves the mean of u₁ by c; tempered chains are behind by β c."""
    monkeypatch.setattr(true_scale_cell, "CONVERGED", 200)
    c, beta = 1.0, 0.5

    def slope(u):
        return c * u[..., 0]

    found = true_scale_cell.converged(slope, beta, data)
    size = true_scale_cell.BATCH * true_scale_cell.BATCHES
    u = data.white(data.train, torch.Generator().manual_seed(0))
    gap = c * (u[:, 0].mean().item() - (1 - beta) * c)
    # Standard errors of chains and of which images were drawn, at five of them.
    bound = 5 * c * (2 / size) ** 0.5
    assert found["energy_gap"] == pytest.approx(gap, abs=bound)
    # E[w]² / E[w²] of log-normal weights: exp(-(β c)²), and a little more in a batch of 64.
    assert found["ess"] == pytest.approx(math.exp(-((beta * c) ** 2)), abs=0.1)
    alike = true_scale_cell.converged(slope, 0.0, data)["ess"]
    assert alike == pytest.approx(1, rel=true_scale_cell.BATCH * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("name", [name for name in true_scale.TITLES if name != "annealed"])
def test_chains_stay_on_the_base_where_g_is_flat(name):
    chains = Chains(name, 64, torch.Generator().manual_seed(0), members=2)
    before = chains.rows.clone()
    drawn = torch.cat([chains(Bowl(0.0)) for _ in range(5)], 1)
    count = 5 * (256 if name == "more" else 64)
    assert drawn.shape == (2, count, 64)
    # The mean of |u|² is 64 and its standard deviation √128; Langevin steps of 0.2 widen by 1%.
    squares = drawn.square().sum(2).mean(1)
    torch.testing.assert_close(
        squares, torch.full((2,), 64.0), rtol=0, atol=0.64 + 5 * (128 / count) ** 0.5
    )
    assert not torch.equal(*drawn)  # each with noise of its own
    moved = (chains.rows != before).any(2).sum(1)
    assert moved[0] == moved[1]  # the same chains of each
    assert (moved[0] == 0) == (name in ("fresh", "adaptive"))
    assert moved[0] < before.shape[1]
    assert (chains.acceptance is not None) == (name in ("mala", "hmc"))
    assert chains.plan() == ((64, 4) if name == "finer" else (16, 1))


@pytest.mark.parametrize("side", [8, 14])
def test_networks_are_each_their_own_flat_in_no_direction_and_frozen_the_same(side):
    pixels = side**2
    u = standard(pixels).sample(16, torch.Generator().manual_seed(0)).view(2, 8, pixels)
    u.requires_grad_()
    x = torch.randn(2 * pixels, pixels, generator=torch.Generator().manual_seed(1))
    base = Gaussian.fit(x, noise=0.1, independent=False)
    single = [Network(base, Couplings(pixels, count=2).inverse) for _ in range(2)]
    assert sum(p.numel() for p in single[0].parameters()) == 17_005
    networks = Networks(single[0], 2)
    with torch.no_grad():
        for values, other in zip(networks.values, single[1].parameters(), strict=True):
            values[1] = other
    single[1].back = single[0].back
    g = networks(u)
    # float32 sums of at most 196 terms, through three layers and the image.
    bound = 4 * 196 * torch.finfo(torch.float32).eps
    own = torch.stack([network(rows) for network, rows in zip(single, u, strict=True)])
    torch.testing.assert_close(g, own, rtol=bound, atol=bound)
    (slope,) = torch.autograd.grad(g.sum(), u)
    assert (slope != 0).all()
    frozen = networks.frozen()
    of_frozen = frozen(u)
    torch.testing.assert_close(of_frozen, g, rtol=bound, atol=bound)
    torch.testing.assert_close(frozen.member(1)(u[1]), g[1], rtol=bound, atol=bound)
    (again,) = torch.autograd.grad(of_frozen.sum(), u)
    torch.testing.assert_close(again, slope, rtol=bound, atol=bound * slope.abs().max().item())


def test_members_train_as_each_would_alone(data):
    """β side by side: with the chains' noise shared, the gradients of runs on their own."""
    u = data.noisy[0][: true_scale_cell.BATCH]
    torch.manual_seed(0)
    network = Network(data.gaussian, data.flow.inverse)
    found: dict[float, list[torch.Tensor]] = {}
    for betas in ((0.0, 0.5), (0.0,), (0.5,)):
        networks = Networks(network, len(betas))
        rng = torch.Generator().manual_seed(0)
        guarded, loss_of, _ = negatives(Cell("fresh", 0, betas=betas), networks, rng)
        guarded.sampler.original.walk = lambda g, kind, x: x + g(x).detach()[..., None]  # no noise
        loss_of(u).backward()
        for index, beta in enumerate(betas):
            grads = [value.grad[index] for value in networks.values]
            found.setdefault(beta, []).append(torch.cat([grad.flatten() for grad in grads]))
    for together, alone in found.values():
        scale = alone.abs().max().item()
        bound = 256 * torch.finfo(torch.float32).eps * scale
        torch.testing.assert_close(together, alone, rtol=0, atol=bound)
    assert not torch.allclose(found[0.0][0], found[0.5][0])


def run_of(beta, lower, upper, seed=0, problems=()):
    """A run as the page has it: held-out log-likelihoods between -upper and -lower."""
    last = {"updates": UPDATES, "test": 0.0, "lower": lower, "upper": upper}
    judged = [{**last, "problems": problems}]
    return {"beta": beta, "seed": seed, "lost_at": None, "judged": judged}


def test_a_run_that_was_lost_or_does_not_count_has_no_number():
    early = {"updates": JUDGED[0], "test": 0.0, "lower": 20, "upper": 20.5, "problems": ()}
    lost = {"sampler": "fresh", "beta": 0.1, "seed": 0, "judged": [early], "lost_at": 9_000}
    runs = [run_of(0.1, 20, 21), run_of(0.1, 50, 19, 1, ["they differ"]), run_of(0.1, 18, 19, 2)]
    assert true_scale.median_of(runs) == "-19.50 (2/3)"
    assert true_scale.median_of([lost]) == "none (0/1, 1 lost)"
    (line,) = true_scale.medians([lost]).splitlines()[2:]
    assert line.split(" | ") == ["| fresh chains", "none (0/1, 1 lost) |"]


def test_kernels_are_summed_exactly():
    """In 64 dimensions, where the trees of scikit-learn lose digits."""
    rng = torch.Generator().manual_seed(0)
    centres, x = (torch.randn(n, 64, generator=rng, dtype=torch.float64) for n in (50, 4))
    each = [multivariate_normal(c, 0.3**2 * np.eye(64)).pdf(x) for c in centres]
    expected = np.log(np.mean(each, 0)).mean()
    assert true_scale.kernels(0.3, centres, x) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("cell", "base"),
    [
        (Cell("mala", 0, betas=(0.0, 0.2)), "-21.5"),
        (Cell("annealed", 0, betas=(1.0,)), "-21.5"),
        (Cell("fresh", 0, "flow", (0.1,)), "-21."),
    ],
)
def test_a_cell_and_its_page(cell, base, tmp_path, monkeypatch):
    small = {"UPDATES": 3, "JUDGED": (2, 3), "judged": partial(judged, temperatures=20)}
    for name, value in (small | {"CONVERGED": 2}).items():
        monkeypatch.setattr(true_scale_cell, name, value)
    monkeypatch.setattr(true_scale_model, "FLOW_UPDATES", 30)
    own = {"UPDATES": 3, "PICTURE": tmp_path / "true_scale.png", "WIDTHS": (0.3,), "COMPONENTS": 2}
    for name, value in own.items():
        monkeypatch.setattr(true_scale, name, value)
    row = {"cell": cell.name, **asdict(cell), **true_scale.measure(tmp_path, **asdict(cell))}
    yards = {"data": cell.data, **true_scale.measure(tmp_path, None, cell.data)}
    members = row["members"]
    assert [member["beta"] for member in members] == [*cell.betas]
    for member in members:
        assert member["lost_at"] is None
        assert [own["updates"] for own in member["judged"]] == [2, 3]
        assert ("acceptance" in member["judged"][0]["median"]) == (cell.sampler == "mala")
    page = "\n".join(true_scale.slots([row, yards]).values())
    # After three updates g is flat: the base's own number, as the yardstick has it.
    assert page.count(base) >= 2
    assert page.count("(1/1)") == len(cell.betas)
    assert (tmp_path / "true_scale.png").stat().st_size > 10_000


def test_a_lost_member_is_told_and_the_others_go_on(tmp_path, monkeypatch):
    class Spoilt(Networks):
        def __init__(self, network, members):
            super().__init__(network, members)
            for value in self.values:
                value.data[1] = math.nan

    small = {"UPDATES": 3, "JUDGED": (3,), "CONVERGED": 2, "judged": lambda g, data: {}}
    for name, value in (small | {"Networks": Spoilt}).items():
        monkeypatch.setattr(true_scale_cell, name, value)
    cell = Cell("fresh", 0, betas=(0.0, 0.2))
    first, second = true_scale_cell.measure(tmp_path, **asdict(cell))["members"]
    assert second == {"beta": 0.2, "lost_at": 1, "judged": [], "first_error": 1}
    assert first["lost_at"] is first["first_error"] is None
    assert [own["updates"] for own in first["judged"]] == [3]
