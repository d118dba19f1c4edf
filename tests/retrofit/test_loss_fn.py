"""Which losses the guard takes over, which it refuses, and that it tells them from samplers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ebmguard import guard
from ebmguard.errors import ConfigError, LossError
from tests.parts import Bowl, difference, gradient_at, rising_difference


def check(loss_fn: Any, convention: Any = "log_density", n: int = 6, m: int = 6) -> None:
    guard(loss_fn, None, beta_star=1.0, convention=convention).loss_fn(
        torch.randn(n), torch.randn(m)
    )


OF_ANY_SIZES: list[Any] = [
    lambda p, n: n.mean() - p.mean(),
    lambda p, n: 1e-6 * (n.mean() - p.mean()),
    lambda p, n: 2e4 * (n.mean() - p.mean()),
    lambda p, n: n.mean() - p.mean() + 3.0,
    lambda p, n: F.l1_loss(n, n + 1) * 2 + n.mean() - p.mean(),
]
OF_EQUAL_SIZES: list[Any] = [lambda p, n: (n - p).mean(), lambda p, n: n.sum() - p.sum()]


@pytest.mark.parametrize("loss_fn", OF_ANY_SIZES + OF_EQUAL_SIZES)
def test_accepted(loss_fn):
    for sizes in ((6, 6), (1, 1), *([(5, 9)] if loss_fn in OF_ANY_SIZES else [])):
        check(loss_fn, "log_density", *sizes)
        check(lambda p, n: loss_fn(n, p), "energy", *sizes)


def bce(pos, neg):
    logits = torch.cat([pos, neg])
    labels = torch.cat([torch.ones_like(pos), torch.zeros_like(neg)])
    return F.binary_cross_entropy_with_logits(logits, labels)


NOT_AFFINE = {
    "softplus per pair": lambda p, n: F.softplus(n - p).mean(),
    "binary cross-entropy (NCE)": bce,
    "InfoNCE": lambda p, n: -(p - torch.logsumexp(torch.cat([p, n]), 0)).mean(),
    "hinge": lambda p, n: F.relu(1 + n - p).mean(),
    "distant hinge": lambda p, n: F.relu(1000 + n.mean() - p.mean()),
    "tanh": lambda p, n: torch.tanh(n).mean() - torch.tanh(p).mean(),
    "wide clamp": lambda p, n: (n.mean() - p.mean()).clamp(-1000, 1000),
    "tiny L2": lambda p, n: n.mean() - p.mean() + 1e-6 * (p.square() + n.square()).mean(),
    "L2 of the means": lambda p, n: n.mean() - p.mean() + 0.1 * (p.mean() ** 2 + n.mean() ** 2),
    "weights of its own": lambda p, n: (torch.softmax(n.detach(), 0) * n).sum() - p.mean(),
    "best negative": lambda p, n: n.max() - p.mean(),
    "some samples left out": lambda p, n: n[1:].mean() - p.mean(),
}


@pytest.mark.parametrize("name", NOT_AFFINE)
def test_not_affine(name):
    for n in (6, 1) if name in ("softplus per pair", "hinge", "tiny L2", "tanh") else (6,):
        with pytest.raises(LossError, match=r"not affine.*add the other terms outside"):
            check(NOT_AFFINE[name], n=n, m=n)


def test_sign_that_contradicts_the_convention():
    """Both readings are named: f is what the other says, or the difference is turned round."""
    with pytest.raises(LossError) as caught:
        check(rising_difference, "log_density")
    for words in (
        *("contradicts convention='log_density'", "convention='energy'", "lower f on data"),
        *("If f is high on data", "return its negative"),
    ):
        assert words in str(caught.value)
    assert "raise f on data" not in str(caught.value)
    check(rising_difference, "energy")
    with pytest.raises(LossError, match=r"contradicts convention='energy'(?s:.*)raise f on data"):
        check(difference, "energy")


class Counting:
    """A warm-up that counts calls of the loss, of which the guard makes more than the trainer."""

    calls = 0

    def __call__(self, pos, neg):
        self.calls += 1
        return min(1.0, self.calls / 1000) * (neg.mean() - pos.mean())


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda p, n: n - p, r"0-dim tensor; got shape \(6,\)"),
        (lambda p, n: (n.mean() - p.mean()).reshape(1), r"got shape \(1,\)"),
        (lambda p, n: (n.mean() - p.mean()).item(), "one number as a 0-dim tensor; got -?[0-9.]+"),
        (lambda p, n: (n.mean() - p.mean()).detach(), "does not depend on f_pos and f_neg"),
        (lambda p, n: n.mean(), "does not use f_pos"),
        (lambda p, n: n.mean() - 2 * p.mean(), r"weighs the two sides differently.*2.*1"),
        (lambda p, n: n.mean() - 1.01 * p.mean(), "weighs the two sides differently"),
        (lambda p, n: n.mean() + 0 * p.mean(), "weighs the two sides differently"),
        (Counting(), "counts its own calls"),
        (lambda p, n: torch.inf * (n.mean() - p.mean()), "not finite"),
    ],
)
def test_other_refusals(loss_fn, message):
    with pytest.raises(LossError, match=message):
        check(loss_fn)


def test_sums_over_unequal_numbers():
    with pytest.raises(LossError, match=r"total slope 4 on f_pos against 9 on f_neg.*Use means"):
        check(OF_EQUAL_SIZES[1], n=4, m=9)


def test_errors_of_the_loss_itself_come_through():
    def broken(p, n):
        raise KeyError("the trainer's own")

    with pytest.raises(KeyError, match="the trainer's own"):
        check(broken)


# -- its weight ----------------------------------------------------------------------------------


def losses(loss_fn: Any, dtype: torch.dtype = torch.float32, count: int = 4) -> tuple[Any, ...]:
    """A guard of the loss, energies, and the guarded plain difference of these."""
    pos, neg = (torch.randn(n, dtype=dtype, requires_grad=True) for n in (3, count))
    plain = guard(None, None, beta_star=1.0).loss_fn(pos, neg)
    return guard(loss_fn, None, beta_star=1.0), pos, neg, plain


def test_a_weight_of_zero_is_looked_at_again():
    weight, hidden = 0.0, nn.Identity()
    g, pos, neg, plain = losses(lambda p, n: weight * hidden(n.mean() - p.mean()))
    assert g.loss_fn(pos, neg) == 0
    weight, hidden = 0.5, nn.Softplus()  # type: ignore[assignment]
    with pytest.raises(LossError, match="not affine"):
        g.loss_fn(pos, neg)
    hidden = nn.Identity()
    for weight in (0.5, 0.75):
        torch.testing.assert_close(g.loss_fn(pos, neg), weight * plain)


def test_a_weight_works_where_gradients_are_off_and_leaves_none():
    g, pos, neg, plain = losses(lambda p, n: 0.25 * (n.mean() - p.mean()))
    with torch.no_grad():
        torch.testing.assert_close(g.loss_fn(pos, neg), 0.25 * plain.detach())
    assert pos.grad is None
    assert neg.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_weight_of_short_floats_is_not_rounded(dtype):
    g, pos, neg, _ = losses(lambda p, n: 0.1 * (n.mean() - p.mean()), dtype, 999)
    g.loss_fn(pos, neg)
    assert g.last["loss_weight"] == pytest.approx(0.1, rel=1e-6)


# -- the other way round -------------------------------------------------------------------------


def after_backward(caplog, sign, *, beta_star=0.5, **options):
    """What is said in three steps of a loss with this sign about the way it trains."""
    f = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(f.parameters(), 0.1, **options)
    told: Any = {"model": f, "optimizer": optimizer} if options else {}
    g = guard(None, None, beta_star=beta_star, output_scale=100.0, **told)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "ebmguard"):
        for _ in range(3):
            loss = sign * g.loss(f(torch.randn(8, 3)), f(torch.randn(8, 3)))
            optimizer.zero_grad()
            (3 * loss).backward()
            optimizer.step()
    return [message for message in caplog.messages if "wrong way" in message]


def test_a_loss_that_is_subtracted_trains_backwards_which_is_said_once(caplog):
    for beta_star in (0.0, 0.5):
        (said,) = after_backward(caplog, -1, beta_star=beta_star)
        assert "is negative" in said
        assert "add it, do not subtract it" in said
        assert not after_backward(caplog, 1, beta_star=beta_star)
        for told in ({}, {"maximize": True}):  # a weight of 0 trains in no direction
            assert not after_backward(caplog, 0, beta_star=beta_star, **told)
    # An optimizer that maximises wants the other sign.
    assert not after_backward(caplog, -1, maximize=True)
    (said,) = after_backward(caplog, 1, maximize=True)
    assert "is positive, and the optimizer ascends" in said


# -- a loss and a sampler, told apart by what they do, whatever their names ------------------------

POS, NEG = torch.tensor([1.0, 3.0]), torch.tensor([0.5, -1.5, 4.0])


class Unready:
    """What it weighs by is set by the loop."""

    weight: float

    def sample(self, f, buffer):
        return self.weight * (buffer.mean() - f.mean())


def drawing(f, x0):
    torch.rand(3)
    return x0.mean() - f.mean()


def heads(net, x):
    assert len(x) > 2
    return x[:3].mean() - net.mean()


@pytest.mark.parametrize("loss", [drawing, heads])
def test_a_loss_is_one_whatever_it_is_called(loss):
    random = torch.get_rng_state()
    g = guard(loss, gradient_at, model=Bowl())
    assert torch.equal(torch.get_rng_state(), random)
    g.sampler(Bowl(), torch.ones(3, 2))
    # Not as a number with its own name: the plain difference, by hand.
    assert g.loss(POS.clone().requires_grad_(), NEG.clone().requires_grad_()) == 1.0 - 2.0


def test_a_loss_may_wait_for_what_comes_later():
    own = Unready()
    g = guard(own.sample)
    own.weight = 3.0
    assert g.loss(POS, NEG) == -3.0


def sample(f_pos, f_neg):
    return gradient_at(f_pos, f_neg)


def test_a_sampler_is_one_whatever_it_is_called():
    """The gradient of the bowl -|x|²/2 is -x."""
    x = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    assert torch.equal(guard(None, sample).sampler(Bowl(), x), -x)
    with pytest.raises(ConfigError, match=r"fails: 'Tensor' object is not callable\. .*second"):
        guard(sample)


def test_what_a_sampler_has_of_the_trainer_is_left_alone():
    calls: list[Tensor] = []

    def counting(f, x):
        calls.append(x)
        return gradient_at(f, x)

    guard(None, counting)
    assert not calls
