"""Every method brings a model to data of another model, and refuses nonsense."""

from __future__ import annotations

import re

import pytest
import torch

from ebmguard.reference_training.bism.config import UpdateSettings
from ebmguard.reference_training.bism.methods import Update
from ebmguard.reference_training.bism.rbm import GaussianBernoulliRBM

from .parts import rbm, rng

COUNT, BATCH = 2000, 100


@pytest.fixture(scope="module")
def data():
    truth = rbm().float()
    return truth, truth.gibbs(torch.zeros(2 * COUNT, 2), 50, rng(1)).split(COUNT)


def begin(method: str, **options: object) -> tuple[GaussianBernoulliRBM, Update]:
    model, generator = GaussianBernoulliRBM(2, 4, rng(3)), rng(4)
    settings = {
        "lr": 0.01,
        "noise_std": 0.1,
        "noise_range": (0.05, 0.3),
        "inner_steps": 2,
        "unrolled_steps": 2,
        **options,
    }
    return model, Update(model, UpdateSettings(method=method, **settings), generator)


@torch.no_grad()
def nats(model: GaussianBernoulliRBM, v: torch.Tensor) -> float:
    return float((model(v) - model.log_z()).mean())


# Nats per sample that are left to the model that drew the data, of 4.8 at the beginning. NCE's
# noise is far from the data. BiSSM with few unrolled steps leaves the optimum again: its partial
# gradient is not 0 there, since the trace of the Hessian has no part in it. That of the others is,
# because the residual of denoising has no mean given the noisy sample.
LEFT = {
    **dict.fromkeys(("dsm", "ssm", "mdsm", "cd1", "pcd5"), 0.15),
    **dict.fromkeys(("bidsm", "bimdsm"), 0.4),
    **dict.fromkeys(("nce", "vnce", "bissm"), 1.0),
}


@pytest.mark.parametrize("method", LEFT)
def test_every_method_comes_close_to_the_datas_model(method, data):
    truth, (trained, held_out) = data
    best = nats(truth, held_out)
    lr, updates = (0.01, 400) if LEFT[method] == 0.15 else (0.016, 250)  # the others cost more
    model, update = begin(method, lr=lr)
    assert best - nats(model, held_out) > 4
    order = rng(5)
    for _ in range(updates):
        numbers = update(trained[torch.randint(COUNT, (BATCH,), generator=order)])
        assert all(x.isfinite() for x in numbers.values())
    assert best - nats(model, held_out) < LEFT[method]


def test_the_drift_is_that_of_the_unrolled_steps(data):
    _, (trained, _) = data
    for steps, moves in ((0, False), (5, True)):
        _, update = begin("bidsm", unrolled_steps=steps)
        assert bool(update(trained[:BATCH])["drift"] > 0) is moves


def test_inner_steps_see_the_minibatches_that_are_drawn_for_them(data):
    _, (trained, _) = data
    v, *others = trained.split(BATCH)
    given = iter(others)
    found = []
    for inner in (None, lambda: v, lambda: next(given)):
        _, update = begin("bidsm")
        update(v, inner)
        found.append(update.posterior.weight.detach())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert sum(1 for _ in given) == len(others) - 2  # K of them are gone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "cd0"}, "method is 'cd0'.*cdK"),
        ({"method": "adam"}, "method is 'adam'"),
        ({"noise_std": 0.0}, "noise_std is 0.0, expected a positive number"),
        ({"noise_range": (0.3, 0.1)}, "noise_range is 0.3 to 0.1, expected 0 < least < most"),
        ({"inner_steps": -1}, "inner_steps is -1, expected 0 or more"),
        ({"lr": float("nan")}, "lr is nan"),
    ],
)
def test_settings_that_make_no_update_are_named(options, message):
    (problem,) = UpdateSettings(**options).update_problems()
    assert re.match(message, problem)
