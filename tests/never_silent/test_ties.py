"""What the loss gets is held against what the sampler drew: mistakes end."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from ebmguard import guard
from ebmguard.errors import ConfigError, EbmguardError, LossError
from tests.never_silent.parts import (
    LOGITS,
    N,
    Net,
    Sides,
    alike,
    halves,
    heads,
    logsumexps,
    train,
)
from tests.parts import langevin, unit_langevin


class Image(Tensor):
    """What data loaders of fastai and torchvision yield."""


def swapped(f: Any, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    return f(q), f(x)


def downhill(f: Any, x: Tensor) -> Tensor:
    return unit_langevin(lambda x: -f(x), x)


both = alike(lambda f, x: f(x))
LINE = {"f": Net(1)}  # energies and samples have one shape
LOW: dict[str, Any] = {"energy": "energy", "convention": "energy"}
LOW |= {"sampler": lambda f, x: downhill(f.energy, x)}

# What is said, of what the loss gets and the rest of the trainer.
MISTAKES: dict[str, dict[str, tuple[Sides, dict[str, Any]]]] = {
    "sides are swapped": {
        "plain": (swapped, {}),
        "some, in another order": (lambda f, x, q: (f(q.flip(0))[:4], f(x)), {}),
        "samples in a dict": (
            lambda f, x, q: (f(q["x"]), f(x)),
            {"sampler": lambda f, x: {"x": unit_langevin(f, x), "acceptance": torch.rand(N)}},
        ),
        "data first seen at the second step": (
            lambda f, x, q: (f(q[1]), q[0]),
            {"draw": lambda sample, f, x: (f(x), sample(f, torch.randn_like(x)))},
        ),
        "in a subclass": (
            lambda f, x, q: (f(q), f(x.as_subclass(Image))),
            {"sampler": lambda f, x: unit_langevin(f, x).as_subclass(Image)},
        ),
    },
    "follows the logsumexp of the network's 5 outputs, and the loss gets the sum": {
        "logits": (both, LOGITS),
        "one batch, shuffled": (lambda f, x, q: halves(f(torch.cat([x, q.flip(0)]))), LOGITS),
    },
    "the loss gets one": {"one logit": (alike(lambda f, x: f(x)[:, 0]), LOGITS)},
    "the loss gets a label's log-probability": {
        "log-softmax": (alike(lambda f, x: f(x).log_softmax(1)[:, 0]), LOGITS),
    },
    "f_pos is the sum of the network's outputs, and f_neg the logsumexp": {
        "the sum on one side": (lambda f, x, q: (f(x).sum(1), f(q).logsumexp(1)), LOGITS),
    },
    "follows the sum": {"logsumexp": (logsumexps, {"f": heads()})},
    "f_neg is a mean over the batch": {
        "columns": (alike(lambda f, x: f(x).mean(0)), {"f": heads()}),
    },
    "of the same samples": {
        "samples twice": (lambda f, x, q: (f(q), f(q.clone())), {}),
    },
    "f_neg is what the sampler returned": {
        "samples": (lambda f, x, q: (f(x), q.squeeze(1)), LINE),
        "beside data": (lambda f, x, q: (x.requires_grad_(), q), {}),
    },
    "f_pos is what the sampler returned": {
        "samples": (lambda f, x, q: (q.squeeze(1), f(x)), LINE),
    },
    "are one tensor": {
        "it twice": (lambda f, x, q: (f(q),) * 2, {}),
    },
    r"logits\.logsumexp\(1\)": {"logits": (alike(lambda f, x: f.body(x)), {})},
    r"shape \(12, 5\), 5 numbers a sample": {
        "logits, the energies seen": (
            lambda f, x, q: (f(x), f(q)) and (f.body(x), f.body(q)),
            {},
        ),
    },
    r"heads\.sum\(1\)": {
        "logits, by a method": (alike(lambda f, x: f.body(x)), LOW),
    },
    "softplus": {"softplus": (lambda f, x, q: (softplus(-f(x)), softplus(f(q))), {})},
    "log-sigmoid": {"log-sigmoid": (alike(lambda f, x: logsigmoid(f(x))), {})},
    "the square of": {
        "square": (alike(lambda f, x: f(x) ** 2), {}),
    },
    r"f_pos has had no gradient.* Write f_pos = f\(x\) with gradients": {
        "data": (lambda f, x, q: (x.squeeze(1), f(q)), LINE),
        "detached": (lambda f, x, q: (f(x).detach(), f(q)), {}),
    },
    r"f_neg has had no gradient.* Write f_neg = f\(samples\) with gradients": {
        "detached": (lambda f, x, q: (f(x), f(q).detach()), {}),
    },
}


@pytest.mark.parametrize(
    ("said", "name"), [(said, name) for said, cases in MISTAKES.items() for name in cases]
)
def test_a_mistake_is_refused_and_without_the_guards_exponent_said_once(
    said: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    sides, options = MISTAKES[said][name]
    with pytest.raises(LossError, match=said):
        train(sides, **copy.deepcopy(options))
    caplog.clear()
    g = train(sides, steps=4, beta_star=0.0, **copy.deepcopy(options))
    assert g.step == 4
    assert sum(bool(re.search(said, each)) for each in caplog.messages) == 1


def test_each_loss_is_refused_until_it_is_right_but_not_where_it_trains_nothing() -> None:
    f, x = Net(), torch.randn(N, 2)
    loss, sample = g = guard(None, unit_langevin, model=f, beta_star=0.5, output_scale=1.0)
    q = sample(f, x)
    assert f._forward_hooks
    with torch.no_grad():
        loss(f(q), f(x))
    with g.paused():
        loss(f(q), f(x))
    for _ in range(3):
        with pytest.raises(LossError, match="swapped"):
            loss(f(q), f(x))
        q = sample(f, x)
    loss(f(x), f(q)).backward()
    assert not f._forward_hooks


def test_energies_that_are_swapped_for_their_sign_are_told_of_the_convention() -> None:
    with pytest.raises(EbmguardError, match="convention='energy'"):
        train(swapped, sampler=downhill)
    with pytest.raises(ConfigError, match="contradicts the sampler"):
        train(both, sampler=downhill)


# -- a JEM whose forward returns logits -----------------------------------------------------------


class Energies(nn.Module):
    """The logsumexp of a classifier's logits."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        energies: Tensor = self.classifier(x).logsumexp(1)
        return energies


def jem_on_digits(sides: Sides, module: Callable[[nn.Module], nn.Module], slope: Any) -> Tensor:
    """The logits of a JEM after 30 updates; ``module`` makes what is sampled of its classifier."""
    torch.manual_seed(0)
    images, labels = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    images = images.float() / 8 - 1
    classifier = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 10))
    f = module(classifier)

    def sampler(f: Any, x: Tensor) -> Tensor:
        return langevin(lambda x: slope(f(x)), x, 5, 1.0)

    optimizer = torch.optim.Adam(f.parameters(), lr=1e-3)
    strength: Any = {"beta_star": 2000.0, "output_scale": 20_000.0}
    loss, sample = guard(None, sampler, model=f, optimizer=optimizer, **strength)
    for _ in range(30):
        rows = torch.randint(1500, (64,))
        x = images[rows] + 0.03 * torch.randn(64, 64)
        contrast = loss(*sides(f, x, sample(f, 2 * torch.rand(64, 64) - 1)))
        cost = contrast + nn.functional.cross_entropy(classifier(x), labels[rows])
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()
    logits: Tensor = classifier(images[1500:])
    return logits.detach()


def test_jem_with_logits_in_forward_is_that_with_their_logsumexp_or_refused() -> None:
    def of_logits(sides: Sides) -> Tensor:
        return jem_on_digits(sides, lambda f: f, lambda out: out.logsumexp(1))

    with pytest.raises(LossError, match="follows the logsumexp of the network's 10 outputs"):
        of_logits(both)
    right = jem_on_digits(both, Energies, lambda out: out)
    for sides in (logsumexps, lambda f, x, q: halves(f(torch.cat([x, q])).logsumexp(1))):
        torch.testing.assert_close(of_logits(sides), right, rtol=1e-3, atol=1e-3)
