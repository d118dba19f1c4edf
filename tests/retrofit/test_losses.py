"""The guarded loss and the reweighted energies against closed forms, in every layout."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebmguard import contrastive_loss, guard
from tests.parts import Memory, energies, slopes
from tests.parts import gradients as closed_form

N, M, K = 5, 7, 3


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def close(actual: Tensor, expected: Tensor | float) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("beta_star", [0.3, 2.0, -0.7])
@pytest.mark.parametrize(
    ("heads", "options", "scale"),
    [
        ((), {}, 1),
        ((), {"convention": "energy"}, -1),
        ((1,), {}, 1),
        ((K,), {}, 1),
    ],
)
def test_layouts(gradients, heads, options, scale, beta_star):
    """High on data is the sum over heads times the scale."""
    sides = leaves((N, *heads), (M, *heads))
    g = guard(None, None, beta_star=beta_star, **options)
    found = gradients(g, *sides)
    f_pos, f_neg = (scale * f.detach().reshape(len(f), -1).sum(1) for f in sides)
    expected = closed_form(f_pos, f_neg, beta_star)
    for side, gradient, right in zip(sides, found, expected, strict=True):
        close(gradient, scale * right.reshape(-1, *(1 for _ in heads)).expand_as(side))
    assert g.last["f_pos/mean"] == pytest.approx(f_pos.mean().item())
    assert g.last["energy_gap"] == pytest.approx((f_pos.mean() - f_neg.mean()).item())


@pytest.mark.parametrize("variant", ["default", "no_pos", "batch", "true"])
def test_variants_are_those_of_the_objective(gradients, variant):
    pos, neg = leaves((N,), (M,))
    g = guard(None, None, beta_star=0.8, variant=variant)
    to_pos, to_neg = gradients(g, pos, neg)
    expected = slopes(contrastive_loss(pos, neg, 0.8, variant=variant), pos, neg)
    close(to_pos, expected[0])
    close(to_neg, expected[1])


@pytest.mark.parametrize("variant", ["default", "no_pos"])
def test_groups(gradients, variant):
    pos, neg = leaves((5,), (6,))
    y_pos, y_neg = torch.tensor([0, 0, 1, 1, 9]), torch.tensor([0, 1, 1, 0, 1, 7])
    g = guard(None, None, beta_star=1.5, variant=variant)
    to_pos, to_neg = gradients(g, pos, neg, groups=(y_pos, y_neg))
    expected_pos, expected_neg = torch.zeros(5).double(), torch.zeros(6).double()
    for i in range(4):  # the fifth has no partner
        mine = y_neg == y_pos[i]
        total = (1.5 * neg[mine]).exp().sum()
        missing = total / ((1.5 * pos[i]).exp() + total) if variant == "default" else 1.0
        expected_pos[i] -= missing / 4
        expected_neg[mine] += (missing / 4 * (1.5 * neg[mine]).exp() / total).detach()
    close(to_pos, expected_pos)
    close(to_neg, expected_neg)
    assert g.last["unpaired"] == 1


def test_reweighting_multiplies_whatever_gradient_arrives():
    pos, neg, a, b = leaves((N,), (M,), (N,), (M,))
    same_pos, same_neg = guard(None, None, beta_star=1.2).reweight(pos, neg)
    to_pos, to_neg = slopes((a * same_pos).sum() + (b * same_neg.exp()).sum(), pos, neg)
    coefficient_pos, coefficient_neg = closed_form(pos, neg, 1.2)
    close(to_pos, a * -N * coefficient_pos)  # 1 - w+_i
    close(to_neg, b * neg.exp() * M * coefficient_neg)  # M GradScale w_j


def test_reweighting_at_beta_star_zero_returns_the_very_same_tensors():
    pos, neg = leaves((49,), (M,))
    same_pos, same_neg = guard(None, None, beta_star=0.0).reweight(pos, neg)
    assert same_pos is pos
    assert same_neg is neg


def test_exponent_as_tensor_and_as_schedule():
    pos, neg = leaves((N,), (M,))
    expected = slopes(guard(None, None, beta_star=0.75).loss_fn(pos, neg), pos, neg)
    for beta_star in (
        torch.tensor(0.75),
        lambda step: 0.75,
        lambda step: torch.tensor(0.75, dtype=torch.float64),
    ):
        g = guard(None, None, beta_star=beta_star)
        for actual, right in zip(slopes(g.loss_fn(pos, neg), pos, neg), expected, strict=True):
            close(actual, right)
        assert g.last["beta_star"] == 0.75


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_short_floats(dtype):
    pos, neg = (x.detach().to(dtype).requires_grad_() for x in leaves((N,), (M,)))
    loss = guard(None, None, beta_star=1.0).loss_fn(pos, neg)
    assert loss.dtype == torch.float32
    to_pos, _ = slopes(loss, pos, neg)
    assert to_pos.dtype == dtype
    expected, _ = closed_form(pos.double(), neg.double(), 1.0)
    torch.testing.assert_close(to_pos.double(), expected, rtol=0, atol=torch.finfo(dtype).eps)


def test_energies_without_a_graph():
    g = guard(None, None, beta_star=1.0)
    loss = g.loss_fn(torch.ones(3), torch.ones(4))
    assert not loss.requires_grad
    assert g.reweight(torch.ones(3), torch.ones(4))[0].tolist() == [1.0, 1.0, 1.0]


# -- the trainer's own loss ----------------------------------------------------------------------


def mean_difference(pos, neg):
    return neg.mean() - pos.mean()


@pytest.mark.parametrize(
    ("loss_fn", "shape", "options", "weight"),
    [
        (mean_difference, (N,), {}, 1.0),
        (lambda p, n: 0.3 * (n.mean() - p.mean()), (N,), {}, 0.3),
        (lambda p, n: n.sum() - p.sum(), (N,), {}, N),
        (lambda p, n: (n - p).mean(), (N, 1), {}, 1.0),
        (lambda p, n: n.sum(1).mean() - p.sum(1).mean(), (N, K), {}, 1.0),
        (mean_difference, (N, K), {}, 1 / K),
        (lambda p, n: p.mean() - n.mean(), (N,), {"convention": "energy"}, 1.0),
        (lambda p, n: (n - p).mean(-1).sum(), (2, N), {"beta_star": torch.ones(2)}, 1.0),
        (mean_difference, (2, N), {"beta_star": torch.ones(2)}, 0.5),
    ],
)
def test_weight_of_a_given_loss(loss_fn, shape, options, weight):
    options = {"beta_star": 1.0} | options
    pos, neg = leaves(shape, shape)
    memory = Memory()
    given = guard(loss_fn, None, sinks=[memory], **options)
    plain = guard(None, None, **options)
    close(given.loss_fn(pos, neg), weight * plain.loss_fn(pos, neg))
    assert given.last["loss_weight"] == pytest.approx(weight)
    # At beta* = 0 the same loss is the trainer's, whatever its units.
    if not isinstance(options["beta_star"], Tensor):
        off = guard(loss_fn, None, **(options | {"beta_star": 0.0}))
        assert torch.equal(off.loss_fn(pos, neg), loss_fn(pos, neg))
        small = guard(loss_fn, None, **(options | {"beta_star": 1e-9, "variant": "no_pos"}))
        actual = slopes(small.loss_fn(pos, neg), pos, neg)
        for gradient, right in zip(actual, slopes(loss_fn(pos, neg), pos, neg), strict=True):
            torch.testing.assert_close(gradient, right, rtol=1e-7, atol=0)


def test_ramped_weight_follows_the_trainers_counter():
    counter = {"step": 0}

    def loss_fn(pos, neg):
        return min(1.0, counter["step"] / 4) * (neg.mean() - pos.mean())

    pos, neg = leaves((N,), (M,))
    ramped = guard(loss_fn, None, beta_star=1.0)
    plain = guard(None, None, beta_star=1.0).loss_fn(pos, neg)
    for step in range(7):
        counter["step"] = step
        close(ramped.loss_fn(pos, neg), min(1.0, step / 4) * plain)


def test_weight_does_not_train_what_it_is_made_of():
    weight = torch.tensor(2.0, requires_grad=True)
    pos, neg = leaves((N,), (M,))
    g = guard(lambda p, n: weight * (n.mean() - p.mean()), None, beta_star=1.0)
    g.loss_fn(pos, neg).backward()
    assert weight.grad is None
    assert pos.grad is not None


def test_last_row_holds_everything_once():
    pos, neg = leaves((N,), (M,))
    g = guard(mean_difference, None, beta_star=1.0, output_scale=20_000)
    loss = g.loss_fn(pos, neg)
    weights = ["grad_scale", "weight_entropy", "ess", "max_weight", "positive_weight_entropy"]
    weights += ["reweighting_angle", "pareto_k"]
    summary = ["mean", "std", "min", "q05", "median", "q95", "max"]
    assert set(g.last) == {
        *weights,
        *(f"ref/{name}" for name in weights),
        *(f"{side}/{name}" for side in ("f_pos", "f_neg") for name in summary),
        *("energy_gap", "energy_gap_scaled", "energy_overlap", "output_scale"),
        *("nonfinite/energies", "nonfinite/pos", "nonfinite/neg"),
        *("beta_star", "loss", "loss_weight"),
    }
    assert g.last["loss"] == pytest.approx(loss.item())
    assert g.last["energy_gap_scaled"] == pytest.approx(20_000 * g.last["energy_gap"])


@pytest.mark.parametrize(
    "options",
    [{"beta_star": 0.0}, {"beta_star": 1.0}, {"beta_star": torch.tensor(1.0)}],
)
def test_energies_are_checked_once(monkeypatch, options):
    calls: list[int] = []
    modules = ("ebmguard.retrofit.ensemble", "ebmguard.objective.losses")
    for module in map(importlib.import_module, modules):
        check = module.check_energies

        def counted(*args, check=check, **kwargs):
            calls.append(1)
            return check(*args, **kwargs)

        monkeypatch.setattr(module, "check_energies", counted)
    g = guard(None, None, **options)
    g.loss_fn(*energies())
    assert calls == [1]
    g.reweight(*energies())
    assert calls == [1, 1]


def test_training_goes_on_after_a_first_loss_in_inference_mode():
    # What is kept for later calls must not be an inference tensor, which no gradient goes through.
    g = guard(None, None, beta_star=0.3719)
    pos, neg = leaves((N,), (M,))
    with torch.inference_mode(), g.paused():
        g.loss_fn(pos, neg)
    found = torch.autograd.grad(g.loss_fn(pos, neg), (pos, neg))
    for side, right in zip(found, closed_form(pos, neg, 0.3719), strict=True):
        close(side, right)


# -- conditional energies --------------------------------------------------------------------------


class Conditional(nn.Module):
    """f(x, y), a log-density of y for each x up to a function of x, in rows of y."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.tensor(at)) for at in (0.8, 0.3, 0.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = -self.a * (y - self.b * x).square() / 2 + self.c * x
        return out


def conditional(f: Any, x: Tensor, y: Tensor) -> Tensor:
    for _ in range(5):
        y = y.detach().requires_grad_()
        (slope,) = torch.autograd.grad(f(x, y).sum(), y)
        y = y + 0.02 * slope + 0.2 * torch.randn_like(y)
    return y.detach()


@pytest.mark.parametrize(("seed", "shape"), [*enumerate(["columns", "vectors", "reweighted"])])
def test_the_density_of_y_for_each_x_is_that_of_the_data(seed: int, shape: str) -> None:
    """By quadrature, with 4 negatives for each x."""
    torch.manual_seed(seed)
    f, x, means = Conditional(), torch.linspace(-2, 2, 64)[:, None], list[Tensor]()
    optimizer = torch.optim.SGD(f.parameters(), lr=0.2)
    loss, sample = g = guard(None, conditional, model=f, optimizer=optimizer, beta_star=0.5)
    y = torch.randn(64, 4)
    for step in range(400):
        noise = torch.randn(64, 1)
        noise -= noise.mean() + x * (noise * x).sum() / x.square().sum()
        data = 0.7 * x + noise / noise.std(correction=0)
        y = sample(f, x, y)
        pos = f(x, data) if shape != "vectors" else f(x, data).squeeze(1)
        optimizer.zero_grad()
        if shape == "reweighted":
            f_pos, f_neg = g.reweight(pos, f(x, y), groups="rows")
            (f_neg.mean() - f_pos.mean()).backward()
        else:
            loss(pos, f(x, y), groups="rows").backward()
        optimizer.step()
        means += [torch.stack([f.a, f.b, f.c]).detach()] if step >= 150 else []
    for parameter, mean in zip((f.a, f.b, f.c), torch.stack(means).mean(0), strict=True):
        parameter.data = mean
    grid = torch.linspace(-8, 8, 2001)
    width = grid[1] - grid[0]
    log_p = f(x, grid).detach()
    log_p = log_p - log_p.logsumexp(1, keepdim=True) - width.log()
    truth = torch.distributions.Normal(0.7 * x, 1.0).log_prob(grid)
    kl = (truth.exp() * (truth - log_p)).sum(1) * width
    assert kl.max() < 3e-3
    assert g.last["grad_scale"] == pytest.approx(4 / 5, abs=0.05)
    assert g.last["unpaired"] == 0
