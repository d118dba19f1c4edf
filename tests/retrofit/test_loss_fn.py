"""Which losses the guard can take over, and which it must refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ebmguard.errors import LossError
from ebmguard.retrofit.caller_loss import CallerLoss, Convention

N = 6


def check(loss_fn: Any, convention: Convention = "log_density", n: int = N, m: int = N) -> None:
    CallerLoss(loss_fn, convention).check(torch.randn(n), torch.randn(m))


def bce(pos, neg):
    logits = torch.cat([pos, neg])
    labels = torch.cat([torch.ones_like(pos), torch.zeros_like(neg)])
    return F.binary_cross_entropy_with_logits(logits, labels)


def info_nce(pos, neg):
    return -(pos - torch.logsumexp(torch.cat([pos, neg]), 0)).mean()


MEAN = [
    lambda p, n: n.mean() - p.mean(),
    lambda p, n: -(p.mean() - n.mean()),
    lambda p, n: (n - p).mean(),
    lambda p, n: 0.1 * (n.mean() - p.mean()),
    lambda p, n: 1e-6 * (n.mean() - p.mean()),
    lambda p, n: 2e4 * (n.mean() - p.mean()),
    lambda p, n: n.sum() - p.sum(),
    lambda p, n: n.mean() - p.mean() + 3.0,
    lambda p, n: F.l1_loss(n, n + 1) * 2 + n.mean() - p.mean(),
    lambda p, n: (n.double().mean() - p.double().mean()).float(),
    lambda p, n: torch.stack([n.mean(), -p.mean()]).sum(),
]


@pytest.mark.parametrize("loss_fn", MEAN)
def test_accepted(loss_fn):
    check(loss_fn)
    check(lambda p, n: loss_fn(n, p), "energy")


@pytest.mark.parametrize("loss_fn", MEAN[:2] + MEAN[3:6])
def test_accepted_with_different_numbers_of_samples(loss_fn):
    check(loss_fn, n=5, m=9)


def test_accepted_for_single_samples_and_heads():
    check(MEAN[0], n=1, m=1)
    CallerLoss(MEAN[0], "log_density").check(torch.randn(4, 3), torch.randn(5, 3))


NOT_AFFINE = {
    "softplus of the difference": lambda p, n: F.softplus(n.mean() - p.mean()),
    "softplus per pair": lambda p, n: F.softplus(n - p).mean(),
    "softplus of each side": lambda p, n: (F.softplus(n) + F.softplus(-p)).mean(),
    "binary cross-entropy (NCE)": bce,
    "InfoNCE": info_nce,
    "hinge": lambda p, n: F.relu(1 + n - p).mean(),
    "hinge of the means": lambda p, n: F.relu(1 + n.mean() - p.mean()),
    "distant hinge": lambda p, n: F.relu(1000 + n.mean() - p.mean()),
    "hinge that never acts here": lambda p, n: F.relu(n.mean() - p.mean() - 100),
    "tanh": lambda p, n: torch.tanh(n).mean() - torch.tanh(p).mean(),
    "tanh of the difference": lambda p, n: torch.tanh(n.mean() - p.mean()),
    "clamp": lambda p, n: n.clamp(-1, 1).mean() - p.clamp(-1, 1).mean(),
    "clamp of the difference": lambda p, n: (n.mean() - p.mean()).clamp(-5, 5),
    "wide clamp": lambda p, n: (n.mean() - p.mean()).clamp(-1000, 1000),
    "one-sided clamp": lambda p, n: n.mean().clamp(min=-10) - p.mean(),
    "L2": lambda p, n: n.mean() - p.mean() + 0.1 * (p.square() + n.square()).mean(),
    "tiny L2": lambda p, n: n.mean() - p.mean() + 1e-6 * (p.square() + n.square()).mean(),
    "L2 of the means": lambda p, n: n.mean() - p.mean() + 0.1 * (p.mean() ** 2 + n.mean() ** 2),
    "abs": lambda p, n: (n.mean() - p.mean()).abs(),
    "leaky": lambda p, n: F.leaky_relu(n.mean() - p.mean(), 0.2),
    "exp": lambda p, n: n.exp().mean() - p.mean(),
    "weights of its own": lambda p, n: (torch.softmax(n.detach(), 0) * n).sum() - p.mean(),
    "best negative": lambda p, n: n.max() - p.mean(),
    "median": lambda p, n: n.mean() - p.median(),
    "some samples left out": lambda p, n: n[1:].mean() - p.mean(),
}


@pytest.mark.parametrize("name", list(NOT_AFFINE))
def test_not_affine(name):
    with pytest.raises(LossError, match=r"not affine.*add the other terms outside"):
        check(NOT_AFFINE[name])


def test_not_affine_even_for_a_single_pair():
    for name in ("softplus per pair", "hinge", "L2", "tanh"):
        with pytest.raises(LossError, match="not affine"):
            check(NOT_AFFINE[name], n=1, m=1)


@pytest.mark.parametrize("convention", ["log_density", "energy"])
def test_sign_that_contradicts_the_convention(convention: Convention):
    def minimised(p, n):
        return n.mean() - p.mean() if convention == "energy" else p.mean() - n.mean()

    other = "log_density" if convention == "energy" else "energy"
    with pytest.raises(LossError) as caught:
        check(minimised, convention)
    message = str(caught.value)
    assert f"contradicts convention={convention!r}" in message
    # Both readings: f is what the other convention says, or the difference is turned round.
    assert f"convention={other!r}" in message
    assert f"If f is {'high' if convention == 'log_density' else 'low'} on data" in message
    assert "return its negative" in message
    assert ("lower f on data" in message) == (convention == "log_density")
    assert ("raise f on data" in message) == (convention == "energy")
    check(minimised, other)  # type: ignore[arg-type]


class Counting:
    """A warm-up that counts calls of the loss, of which the guard makes more than the trainer."""

    def __init__(self):
        self.calls = 0

    def __call__(self, pos, neg):
        self.calls += 1
        return min(1.0, self.calls / 1000) * (neg.mean() - pos.mean())


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda p, n: n - p, r"0-dim tensor; got shape \(6,\)"),
        (lambda p, n: (n.mean() - p.mean()).reshape(1), r"got shape \(1,\)"),
        (lambda p, n: (n.mean() - p.mean()).item(), "one number as a 0-dim tensor; got -?[0-9.]+"),
        (lambda p, n: (n.mean(), p.mean()), r"one number as a 0-dim tensor; got \("),
        (lambda p, n: None, "got None"),
        (lambda p, n: (n.mean() - p.mean()).detach(), "does not depend on f_pos and f_neg"),
        (torch.no_grad()(lambda p, n: n.mean() - p.mean()), "does not depend"),
        (lambda p, n: torch.zeros(()), "does not depend"),
        (lambda p, n: n.mean(), "does not use f_pos"),
        (lambda p, n: -p.mean(), "does not use f_neg"),
        (lambda p, n: n.mean() - p.detach().mean(), "does not use f_pos"),
        (lambda p, n: n.mean() - 2 * p.mean(), r"weighs the two sides differently.*2.*1"),
        (lambda p, n: n.mean() - 1.01 * p.mean(), "weighs the two sides differently"),
        (lambda p, n: n.mean() + p.mean(), "weighs the two sides differently"),
        (lambda p, n: n.mean() + 0 * p.mean(), "weighs the two sides differently"),
        (Counting(), "counts its own calls"),
        (lambda p, n: torch.inf * (n.mean() - p.mean()), "not finite"),
    ],
)
def test_other_refusals(loss_fn, message):
    with pytest.raises(LossError, match=message):
        check(loss_fn)


def test_sums_over_unequal_numbers():
    def sums(p, n):
        return n.sum() - p.sum()

    check(sums, n=4, m=4)
    with pytest.raises(LossError, match=r"total slope 4 on f_pos against 9 on f_neg.*Use means"):
        check(sums, n=4, m=9)


def test_errors_of_the_loss_itself_come_through():
    def broken(p, n):
        raise KeyError("the trainer's own")

    with pytest.raises(KeyError, match="the trainer's own"):
        check(broken)


def test_checked_once():
    calls = []

    def loss_fn(p, n):
        calls.append(p)
        return n.mean() - p.mean()

    difference = CallerLoss(loss_fn, "log_density")
    pos, neg = torch.full((3,), 0.5), torch.zeros(4)
    difference.check(pos, neg)
    after_first = len(calls)
    difference.check(pos, neg)
    assert len(calls) == after_first
    assert not any(torch.equal(seen, pos) for seen in calls)  # on points of its own


def test_weight_of_zero_is_looked_at_again():
    counter = {"step": 0}
    hidden: Any = nn.Identity()

    def loss_fn(p, n):
        return min(1.0, counter["step"] / 10) * hidden(n.mean() - p.mean())

    difference = CallerLoss(loss_fn, "log_density")
    pos, neg = torch.randn(3), torch.randn(4)
    difference.check(pos, neg)
    weight = difference.weight(pos, neg)
    assert weight is not None
    assert weight == 0
    counter["step"], hidden = 5, F.softplus
    with pytest.raises(LossError, match="not affine"):
        difference.check(pos, neg)
    hidden = nn.Identity()
    difference.check(pos, neg)
    assert difference.weight(pos, neg) == 0.5


def test_weight_works_where_gradients_are_off_and_leaves_none():
    difference = CallerLoss(lambda p, n: 0.25 * (n.mean() - p.mean()), "log_density")
    pos, neg = torch.randn(3, requires_grad=True), torch.randn(4, requires_grad=True)
    with torch.no_grad():
        difference.check(pos, neg)
        weight = difference.weight(pos, neg)
    assert weight == 0.25
    assert pos.grad is None
    assert neg.grad is None
    assert CallerLoss(None, "energy").weight(pos, neg) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weight_of_short_floats_is_not_rounded(dtype):
    difference = CallerLoss(lambda p, n: 0.1 * (n.mean() - p.mean()), "log_density")
    pos, neg = torch.randn(3, dtype=dtype), torch.randn(999, dtype=dtype)
    weight = difference.weight(pos, neg)
    assert weight is not None
    assert weight.item() == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize(
    ("convention", "expected"),
    [
        ("log_density", lambda p, n: n.sum(1).mean() - p.sum(1).mean()),
        ("energy", lambda p, n: p.sum(1).mean() - n.sum(1).mean()),
    ],
)
def test_plain_difference(convention: Convention, expected):
    pos, neg = torch.randn(3, 2), torch.randn(4, 2)
    assert torch.equal(CallerLoss(None, convention).plain(pos, neg), expected(pos, neg))
    own = CallerLoss(lambda p, n: 7 * p.sum() + n.sum(), convention)
    assert torch.equal(own.plain(pos, neg), 7 * pos.sum() + neg.sum())
