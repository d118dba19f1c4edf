"""What the loss gets is held against what the sampler drew: mistakes end, right trainers go on."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from ebmguard import Guard, guard
from ebmguard.errors import ConfigError, EbmguardError, LossError

N = 12
Sides = Callable[[Any, Tensor, Any], tuple[Tensor, Tensor]]


class Net(nn.Module):
    """A classifier whose energy is the logsumexp of its logits, by several ways."""

    def __init__(self, width: int = 2, *middle: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 8), nn.SiLU(), *middle, nn.Linear(8, 5))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        logits = self.body(x)
        energies: Tensor = logits.logsumexp(1) if y is None else logits.gather(1, y[:, None])
        return energies

    def energy(self, x: Tensor) -> Tensor:
        turned: Tensor = -self(x)
        return turned


class Summed(Net):
    """Its energy is the sum of its heads."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        total: Tensor = self.body(x).sum(1)
        return total


class Heads(Net):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        heads: Tensor = self.body(x)
        return heads


class Energies(nn.Module):
    """The logsumexp of a classifier's logits."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        energies: Tensor = self.classifier(x).logsumexp(1)
        return energies


class Noisy(Net):
    """Its first argument is the noise level."""

    def forward(self, sigma: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        energies: Tensor = self.body(x + sigma).logsumexp(1)
        return energies


def langevin(f: Any, x: Tensor, sign: float = 1.0) -> Tensor:
    for _ in range(3):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(f(x).sum(), x)
        x = x + sign * 0.02 * slope + 0.2 * torch.randn_like(x)
    return x.detach()


def of_logits(f: Any, x: Tensor) -> Tensor:
    return langevin(lambda x: f(x).logsumexp(1), x)


def logsumexps(f: Any, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    return f(x).logsumexp(1), f(q).logsumexp(1)


def both(f: Any, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    return f(x), f(q)


class Image(Tensor):
    """What data loaders of fastai and torchvision yield."""


def halves(of: Tensor) -> tuple[Tensor, Tensor]:
    first, second = of.chunk(2)
    return first, second


def still(f: Any, x: Tensor, q: Tensor) -> Tensor:
    with torch.no_grad():
        energies: Tensor = f(x)
    return energies


def train(
    sides: Sides,
    f: nn.Module | None = None,
    sampler: Any = langevin,
    *,
    draw: Callable[..., Any] = lambda sample, f, x: sample(f, torch.randn_like(x)),
    steps: int = 3,
    seed: int = 0,
    **options: Any,
) -> Guard:
    """A loop whose two sides are what a case says of ``(f, data, samples)``."""
    torch.manual_seed(seed)
    f = f or Net()
    told: dict[str, Any] = {"model": f, "beta_star": 0.5, "output_scale": 1.0} | options
    loss, sample = g = guard(None, sampler, **told)
    optimizer = torch.optim.SGD(f.parameters(), lr=1e-3)
    g.attach(optimizer=optimizer)
    for _ in range(steps):
        x = torch.randn(N, next(f.parameters()).shape[1]) / 2 + 1
        value = loss(*sides(f, x, draw(sample, f, x)))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return g


def shared(of: Tensor) -> tuple[Tensor, Tensor]:
    return of, of.view(-1, 1).squeeze(1)


# name: (what the loss gets, what is said, the rest of the trainer)
MISTAKES: dict[str, tuple[Sides, str, dict[str, Any]]] = {
    "sides swapped": (lambda f, x, q: (f(q), f(x)), "sides are swapped", {}),
    "swapped, negated": (lambda f, x, q: (-f(q), -f(x)), "sides are swapped", {}),
    "swapped, one batch": (lambda f, x, q: halves(f(torch.cat([q, x]))), "sides are swapped", {}),
    "swapped, other order of samples": (
        lambda f, x, q: (f(q.flip(0)), f(x)),
        "sides are swapped",
        {},
    ),
    "swapped, some of the samples": (lambda f, x, q: (f(q)[:4], f(x)), "sides are swapped", {}),
    "swapped, columns": (
        lambda f, x, q: (f(q, torch.zeros(N, dtype=torch.long)), f(x, torch.ones(N).long())),
        "sides are swapped",
        {},
    ),
    "swapped, samples in a dict": (
        lambda f, x, q: (f(q["x"]), f(x)),
        "sides are swapped",
        {"sampler": lambda f, x: {"x": langevin(f, x), "acceptance": torch.rand(N)}},
    ),
    "swapped, data first seen at the second step": (
        lambda f, x, q: (f(q[1]), q[0]),
        "sides are swapped",
        {"draw": lambda sample, f, x: (f(x), sample(f, torch.randn_like(x)))},
    ),
    "swapped, in a subclass": (
        lambda f, x, q: (f(q), f(x.as_subclass(Image))),
        "sides are swapped",
        {},
    ),
    "swapped, samples in a subclass": (
        lambda f, x, q: (f(q), f(x)),
        "sides are swapped",
        {"sampler": lambda f, x: langevin(f, x).as_subclass(Image)},
    ),
    "one tensor, in a subclass": (lambda f, x, q: (f(x.as_subclass(Image)),) * 2, "one tensor", {}),
    "logits whose logsumexp is sampled": (
        lambda f, x, q: (f(x), f(q)),
        r"follows the logsumexp of the network's 5 outputs, and the loss gets the sum",
        {"f": Heads(), "sampler": of_logits},
    ),
    "such logits of one batch, samples shuffled": (
        lambda f, x, q: halves(f(torch.cat([x, q.flip(0)]))),
        "follows the logsumexp",
        {"f": Heads(), "sampler": of_logits},
    ),
    "their mean": (
        lambda f, x, q: (f(x).mean(1), f(q).mean(1)),
        "follows the logsumexp",
        {"f": Heads(), "sampler": of_logits},
    ),
    "one of them": (
        lambda f, x, q: (f(x)[:, 0], f(q)[:, 0]),
        "the loss gets one",
        {"f": Heads(), "sampler": of_logits},
    ),
    "a label's log-probability": (
        lambda f, x, q: (f(x).log_softmax(1)[:, 0], f(q).log_softmax(1)[:, 0]),
        "the loss gets a label's log-probability",
        {"f": Heads(), "sampler": of_logits},
    ),
    "the sum on one side": (
        lambda f, x, q: (f(x).sum(1), f(q).logsumexp(1)),
        "f_pos is the sum of the network's outputs, and f_neg the logsumexp",
        {"f": Heads(), "sampler": of_logits},
    ),
    "means over the batch": (
        lambda f, x, q: (f(x)[:, None].mean(0), f(q)[:, None].mean(0)),
        "f_neg is a mean over the batch",
        {},
    ),
    "means of columns over the batch": (
        lambda f, x, q: (f(x).mean(0), f(q).mean(0)),
        "f_neg is a mean over the batch",
        {"f": Heads()},
    ),
    "the same data twice": (lambda f, x, q: (f(x), f(x.clone())), "of the same samples", {}),
    "their logsumexp where their sum is sampled": (logsumexps, "follows the sum", {"f": Heads()}),
    "samples": (
        lambda f, x, q: (f(x), q.squeeze(1)),
        "f_neg is what the sampler returned",
        {"f": Net(1)},
    ),
    "samples, as a column": (
        lambda f, x, q: (f(x)[:, None], q),
        "f_neg is what the sampler returned",
        {"f": Net(1)},
    ),
    "samples that carry a gradient": (
        lambda f, x, q: (f(x), q.requires_grad_().squeeze(1)),
        "f_neg is what the sampler returned",
        {"f": Net(1)},
    ),
    "data and samples": (
        lambda f, x, q: (x.requires_grad_(), q),
        "f_neg is what the sampler returned",
        {},
    ),
    "samples on the side of the data": (
        lambda f, x, q: (q.squeeze(1), f(x)),
        "f_pos is what the sampler returned",
        {"f": Net(1)},
    ),
    "data": (lambda f, x, q: (x.squeeze(1), f(q)), "f_pos has had no gradient", {"f": Net(1)}),
    "one tensor": (lambda f, x, q: (f(q),) * 2, "are one tensor", {}),
    "two views of one": (lambda f, x, q: shared(f(x)), "are one tensor", {}),
    "the first half twice": (
        lambda f, x, q: (lambda of: (of[:N], of[:N]))(f(torch.cat([x, q]))),
        "are one tensor",
        {},
    ),
    "the same samples twice": (lambda f, x, q: (f(q), f(q)), "of the same samples", {}),
    "samples and their copy": (lambda f, x, q: (f(q), f(q.clone())), "of the same samples", {}),
    "logits": (lambda f, x, q: (f.body(x), f.body(q)), r"logits\.logsumexp\(1\)", {}),
    "logits, the energies seen": (
        lambda f, x, q: (f(x), f(q)) and (f.body(x), f.body(q)),
        r"shape \(12, 5\), 5 numbers a sample",
        {},
    ),
    "logits, by a method": (
        lambda f, x, q: (f.body(x), f.body(q)),
        r"heads\.sum\(1\)",
        {"energy": "energy", "convention": "energy", "sampler": lambda f, x: langevin(f.energy, x)},
    ),
    "softplus": (lambda f, x, q: (softplus(-f(x)), softplus(f(q))), "softplus", {}),
    "log-sigmoid": (lambda f, x, q: (logsigmoid(f(x)), logsigmoid(f(q))), "log-sigmoid", {}),
    "square": (lambda f, x, q: (f(x) ** 2, f(q) ** 2), "the square of", {}),
    "square of a column": (
        lambda f, x, q: (f(x)[:, None] ** 2, f(q)[:, None] ** 2),
        "the square of",
        {},
    ),
    "samples detached": (
        lambda f, x, q: (f(x), f(q).detach()),
        r"f_neg = f\(samples\) with gradients",
        {},
    ),
    "samples without gradient": (
        lambda f, x, q: (f(x), still(f, q, q)),
        "f_neg has had no gradient",
        {},
    ),
    "data detached": (
        lambda f, x, q: (f(x).detach(), f(q)),
        r"f_pos = f\(x\) with gradients",
        {},
    ),
    "detached, no sampler": (
        lambda f, x, q: (f(x), f(q).detach()),
        "f_neg has had no gradient",
        {"sampler": None, "draw": lambda sample, f, x: x},
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused(name: str) -> None:
    sides, said, options = MISTAKES[name]
    with pytest.raises(LossError, match=said):
        train(sides, **copy.deepcopy(options))


@pytest.mark.parametrize("name", MISTAKES)
def test_without_the_guards_exponent_it_is_said_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    sides, said, options = MISTAKES[name]
    g = train(sides, steps=4, beta_star=0.0, **copy.deepcopy(options))
    assert g.step == 4
    messages = [record.getMessage() for record in caplog.records]
    assert sum(bool(re.search(said, each)) for each in messages) == 1


def test_each_loss_is_refused_until_it_is_right() -> None:
    f, x = Net(), torch.randn(N, 2)
    loss, sample = guard(None, langevin, model=f, beta_star=0.5, output_scale=1.0)
    for _ in range(3):
        q = sample(f, x)
        with pytest.raises(LossError, match="swapped"):
            loss(f(q), f(x))
    q = sample(f, x)
    loss(f(x), f(q)).backward()
    assert not f._forward_hooks


WAYS: dict[str, Sides] = {
    "logits": both,
    "logsumexp": logsumexps,
    "logsumexp of one batch": lambda f, x, q: halves(f(torch.cat([x, q])).logsumexp(1)),
}


def jem_on_digits(sides: Sides, module: Callable[[nn.Module], nn.Module], slope: Any) -> Tensor:
    """The logits of a JEM after 30 updates; ``module`` makes what is sampled of its classifier."""
    torch.manual_seed(0)
    images, labels = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    images = images.float() / 8 - 1
    classifier = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 10))
    f = module(classifier)

    def sampler(f: Any, x: Tensor) -> Tensor:
        for _ in range(5):
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(slope(f(x)).sum(), x)
            x = x + gradient + 0.01 * torch.randn_like(x)
        return x.detach()

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


@pytest.mark.parametrize("way", WAYS)
def test_jem_with_logits_in_forward_is_that_with_their_logsumexp_or_refused(way: str) -> None:
    def of_logits() -> Tensor:
        return jem_on_digits(WAYS[way], lambda f: f, lambda out: out.logsumexp(1))

    if way == "logits":
        with pytest.raises(LossError, match="follows the logsumexp of the network's 10 outputs"):
            of_logits()
        return
    right = jem_on_digits(both, Energies, lambda out: out)
    torch.testing.assert_close(of_logits(), right, rtol=1e-3, atol=1e-3)


# -- right trainers ------------------------------------------------------------------------------


def scaled(f: Any, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    return 3 * f(x) - 1, (3 * f(q) - 1).flip(0)


def tilted(f: Any, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """With a base measure, which has no parameters."""
    return f(x) - x.square().sum(1), f(q) - q.square().sum(1)


def dropped(f: Any, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    f(q).square().mean()  # of another term
    return f(x), f(q)


def augmented(f: Any, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    f(q)
    return f(x), f(q + 0.1 * torch.randn_like(q))


def by_a_function(f: Any, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    call, own = torch.func.functional_call, dict(f.named_parameters())
    return call(f, own, (x,)), torch.vmap(lambda z: call(f, own, (z[None],))[0])(q)


def compiled(f: nn.Module, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    torch.compiler.reset()
    fast = torch.compile(f, backend="eager", fullgraph=True)
    return f(x), fast(q)


def in_half(f: Any, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return f(x).float(), f(q).float()


def of_copies(f: nn.Module, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Averages and files of the model are made at any time."""
    average, read = copy.deepcopy(f), pickle.loads(pickle.dumps(f))
    for each in (average, read):
        each(q).sum().backward()
        hooks = [*each._forward_hooks.values()]
        assert not any(hook.kept for hook in hooks)
    return f(x), f(q)


def parallel(f: nn.Module, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    wrapped = nn.DataParallel(f)
    return wrapped(x), wrapped(q)


def frozen(**options: Any) -> Net:
    f = Net(**options)
    f.body[0].requires_grad_(requires_grad=False)
    return f


def constant(f: Net) -> Net:
    for each in f.body[-1].parameters():
        nn.init.zeros_(each)
    return f


def draws_data(f: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns data of its own beside the samples."""
    return torch.randn_like(x), langevin(f, x)


def flips(f: Any, x: Tensor) -> Tensor:
    """A chain on two bits, whose states are the data's."""
    new = torch.where(torch.rand_like(x) < 0.5, x, 1 - x)
    return torch.where(torch.rand(len(x), 1) < (f(new) - f(x)).exp()[:, None], new, x).detach()


def bits(sample: Any, f: Any, x: Tensor) -> Tensor:
    drawn: Tensor = sample(f, (torch.randn_like(x) > 0).float())
    return drawn


def of_bits(f: Any, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The samples by a way that nothing sees."""
    return f(q[torch.randperm(N)]), f.body(q).logsumexp(1)


def in_place(f: Any, x: Tensor) -> Tensor:
    x.copy_(langevin(f, x))
    return x


RIGHT: dict[str, tuple[Sides, dict[str, Any]]] = {
    "plain": (both, {}),
    "negated, low on data": (
        lambda f, x, q: (f(x), f(q)),
        {"convention": "energy", "sampler": lambda f, x: langevin(f, x, -1.0)},
    ),
    "turned by the trainer": (
        lambda f, x, q: (-f(x), -f(q)),
        {"convention": "energy"},
    ),
    "scaled, in another order": (scaled, {}),
    "a base measure": (tilted, {}),
    "columns": (lambda f, x, q: (f(x)[:, None], f(q)[:, None]), {}),
    "one batch": (lambda f, x, q: halves(f(torch.cat([x, q]))), {}),
    "one batch, samples first": (lambda f, x, q: halves(f(torch.cat([q, x])))[::-1], {}),
    "samples shuffled": (lambda f, x, q: (f(x), f(q[torch.randperm(N)])), {}),
    "samples selected": (lambda f, x, q: (f(x), f(q)[::3]), {}),
    "samples augmented": (augmented, {}),
    "samples augmented before": (lambda f, x, q: (f(x), f(q.flip(1))), {}),
    "of a class": (lambda f, x, q: (f(x, torch.zeros(N).long()), f(q, torch.ones(N).long())), {}),
    "several heads": (both, {"f": Heads()}),
    "logsumexp": (logsumexps, {"f": Heads(), "sampler": of_logits}),
    "logsumexp of one batch": (
        lambda f, x, q: halves(f(torch.cat([x, q])).logsumexp(1)),
        {"f": Heads(), "sampler": of_logits},
    ),
    "logsumexp of equal logits": (logsumexps, {"f": constant(Heads()), "sampler": of_logits}),
    "the logits of labels, and the logsumexp of samples": (
        lambda f, x, q: (f(x)[torch.arange(N), torch.arange(N) % 5], f(q).logsumexp(1)),
        {"f": Heads(), "sampler": of_logits},
    ),
    "one logit of data, and the logsumexp of samples": (
        lambda f, x, q: (f(x)[:, 1], f(q).logsumexp(1)),
        {"f": Heads(), "sampler": of_logits},
    ),
    "a positive of many views, and one chain": (
        lambda f, x, q: (f(x[:1] + 0.1 * torch.randn_like(x)).mean(0, keepdim=True), f(q[:1])),
        {},
    ),
    "one logit": (
        lambda f, x, q: (f(x)[:, 2], f(q)[:, 2]),
        {"f": Heads(), "sampler": lambda f, x: langevin(lambda x: f(x)[:, 2], x)},
    ),
    "the heads of a sum": (
        lambda f, x, q: (f(q), (f.body(x), f.body(q)))[1],
        {"f": Summed()},
    ),
    "dropout": (dropped, {"f": Net(2, nn.Dropout(0.5))}),
    "batch norm": (both, {"f": Net(2, nn.BatchNorm1d(8))}),
    "frozen parts": (both, {"f": frozen()}),
    "a constant at first": (both, {"f": constant(Net())}),
    "half precision": (in_half, {}),
    "compiled": (compiled, {}),
    "functional calls": (by_a_function, {}),
    "data parallel": (parallel, {}),
    "copies": (of_copies, {}),
    "a list of states": (
        lambda f, x, q: (f(x), f(q[-1])),
        {"sampler": lambda f, x: [x, langevin(f, x)]},
    ),
    "data beside the samples": (
        lambda f, x, q: (f(q[0]), f(q[1] + 0.1 * torch.randn_like(x))),
        {"sampler": draws_data},
    ),
    "levels beside the samples": (
        lambda f, x, q: (f(q[1], x), f(q[1], q[0] + 0.1 * torch.randn_like(x))),
        {
            "f": Noisy(1),
            "sampler": lambda f, x: (
                langevin(lambda z: f(x, z), x),
                torch.rand(N, 1),
            ),
        },
    ),
    "two samplers, data last": (
        lambda f, x, q: (f(q[1]), f(q[0])),
        {"draw": lambda sample, f, x: (sample(f, torch.randn_like(x)), sample(f, x))},
    ),
    "every proposal rejected": (
        both,
        {"sampler": lambda f, x: (f(x), x.clone())[1], "draw": lambda sample, f, x: sample(f, x)},
    ),
    "moved in place": (both, {"sampler": in_place}),
    "states of the data": (of_bits, {"sampler": flips, "draw": bits}),
    "energy=": (
        lambda f, x, q: (f.energy(x), f.energy(q)),
        {
            "energy": "energy",
            "convention": "energy",
            "sampler": lambda f, x: langevin(f.energy, x, -1.0),
        },
    ),
    "no sampler": (both, {"sampler": None, "draw": lambda sample, f, x: langevin(f, x)}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_trainer_goes_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    sides, options = RIGHT[name]
    options = copy.deepcopy(options)
    f = options.get("f") or Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(sides, **(options | {"f": f}), steps=7).step == 7
    assert not [each for each in caplog.records if "Write" in each.getMessage()]
    assert not f._forward_hooks


@pytest.mark.parametrize("order", ["together", "data first"])
def test_a_step_may_have_a_loss_for_each_side(order: str) -> None:
    """Each holds the other side still: half of the graph at a time."""
    f = Net()
    optimizer = torch.optim.SGD(f.parameters(), lr=1e-3)
    told: dict[str, Any] = {"model": f, "optimizer": optimizer, "beta_star": 0.5}
    loss, sample = guard(None, langevin, output_scale=1.0, **told)
    for _ in range(3):
        batches = [torch.randn(N, 2) for _ in range(2)]
        pairs = [(x, sample(f, x)) for x in batches]
        if order == "together":
            for x, q in pairs:
                loss(f(x), f(q).detach()).backward()
                loss(f(x).detach(), f(q)).backward()
        else:
            for x, q in pairs:
                loss(f(x), f(q).detach()).backward()
            for x, q in pairs:
                loss(f(x).detach(), f(q)).backward()
        optimizer.step()


def test_reweighting_one_side_only_is_no_mistake() -> None:
    f, x = Net(), torch.randn(N, 2)
    g = guard(None, langevin, model=f, beta_star=0.5, output_scale=1.0)
    for _ in range(4):
        q = g.sampler(f, x)
        _, neg = g.reweight(f(x).detach(), f(q))
        neg.mean().backward()


def test_losses_without_gradient_and_pictures_are_not_looked_at() -> None:
    f, x = Net(), torch.randn(N, 2)
    loss, sample = g = guard(None, langevin, model=f, beta_star=0.5, output_scale=1.0)
    q = sample(f, x)
    with torch.no_grad():
        loss(f(q), f(x))
    with g.paused():
        loss(f(q), f(x))
    with pytest.raises(LossError, match="swapped"):
        loss(f(q), f(x))


def test_closing_takes_the_hook_off() -> None:
    f, x = Net(), torch.randn(N, 2)
    g = guard(None, langevin, model=f, beta_star=0.5, output_scale=1.0)
    g.sampler(f, x)
    assert f._forward_hooks
    g.close()
    assert not f._forward_hooks


def test_energies_that_are_swapped_for_their_sign_are_told_of_the_convention() -> None:
    with pytest.raises(EbmguardError, match="convention='energy'"):
        train(lambda f, x, q: (f(q), f(x)), sampler=lambda f, x: langevin(f, x, -1.0))
    with pytest.raises(ConfigError, match="contradicts the sampler"):
        train(both, sampler=lambda f, x: langevin(f, x, -1.0))
