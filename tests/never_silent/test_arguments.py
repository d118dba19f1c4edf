"""Arguments of guard() in the wrong place, and energies of a wrong kind: refused with the fix."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebmguard import guard
from ebmguard.errors import ConfigError, EnergyTypeError, LossError, SamplerError
from tests.parts import Bowl, Energy, difference, gradient_at, unit_langevin

X = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
HALF: Any = {"beta_star": 0.5, "output_scale": 1.0}


class Sampler:
    def __init__(self, f: Any = None) -> None:
        self.f = f

    def __call__(self, f: Any, x: Tensor) -> Tensor:
        return unit_langevin(f, x)

    def draw(self) -> Tensor:
        return X


wrong: Any = guard
NET, PART = Bowl(), Energy()


def door(*args: Any, **told: Any) -> tuple[Any, Any]:
    return args, told


# What is said of the arguments.
DOORS = {
    r"guard\(None, unit_langevin, \.\.\.\)": door(unit_langevin),
    r"guard\(None, unit_langevin": door(functools.partial(unit_langevin, steps=9)),
    r"Sampler\(f, x\).*comes second": door(Sampler()),
    r"comes second": door(guard(None, unit_langevin, **HALF).sampler),
    r"Bowl\(x\); expected a function of": door(NET, unit_langevin),
    r"difference\(f_pos, f_neg\), a loss.*comes first": door(None, difference),
    r"is a Tensor; expected one function": door(None, X),
    r"is a list.*Mixture": door(None, [unit_langevin, unit_langevin]),
    r"is the energy of Bowl itself": door(None, NET, model=NET),
    r"energy of Bowl itself": door(None, NET.forward, model=NET),
    r"no method draw; it has forward": door(None, NET, methods=("draw",)),
    r"cannot be called.*It has none": door(None, torch.Generator()),
}


@pytest.mark.parametrize("said", DOORS)
def test_an_argument_in_the_wrong_place_is_refused(said: str) -> None:
    args, told = DOORS[said]
    with pytest.raises(ConfigError, match=f"(?s){said}") as found:
        wrong(*args, **HALF, **told)
    assert len(str(found.value)) < 300


def test_a_network_whose_name_is_not_told_is_refused_at_its_first_call() -> None:
    with pytest.raises(SamplerError, match="a network itself, Bowl"):
        guard(None, NET, **HALF).sampler(X)


@pytest.mark.parametrize(
    "loss",
    [
        difference,
        lambda f, g: difference(f, g),
        lambda *energies: difference(*energies),
        lambda p, n, weight=2.0: weight * difference(p, n),
        functools.partial(lambda weight, p, n: weight * difference(p, n), 2.0),
        nn.L1Loss(),
    ],
)
def test_a_loss_by_any_name_is_taken(loss: Any) -> None:
    guard(loss, unit_langevin, **HALF)


def test_samplers_of_many_kinds_are_taken() -> None:
    class Model(Bowl):
        def sample(self, x: Tensor) -> Tensor:
            return gradient_at(self, x)

        def energy(self, x: Tensor) -> Tensor:
            return Bowl.forward(self, x)

    class Draws(Model):
        def forward(self, x: Tensor) -> Tensor:
            return gradient_at(self.energy, x)

    model, draws = Model(), Draws()
    for g in (
        guard(None, model, methods=("sample",), model=model, **HALF),
        guard(None, model.sample, model=model, **HALF),
        guard(None, draws, model=draws, energy="energy", **HALF),
        guard(None, lambda pos, neg: gradient_at(model, pos), model=model, **HALF),
        guard(None, Sampler(), **HALF),
    ):
        assert g.sampler is not None
    assert torch.equal(guard(None, draws, model=draws, energy="energy", **HALF).sampler(X), -X / 2)


PLAIN = torch.ones(4)
ENERGIES: dict[str, tuple[Tensor, str]] = {
    "meta": (torch.ones(4, device="meta"), "device meta, which has no numbers"),
    "float8": (torch.ones(4).to(torch.float8_e4m3fn), r"float8_e4m3fn.*\.float\(\)"),
    "sparse": (torch.ones(4).to_sparse(), r"sparse_coo.*\.to_dense\(\)"),
    "integers": (torch.ones(4, dtype=torch.int8), "int8; energies must be floating point"),
    "complex": (torch.ones(4, dtype=torch.complex64), "complex64; energies must be"),
}


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", ENERGIES)
def test_energies_that_cannot_be_used_change_nothing(name: str, side: int) -> None:
    energies, said = ENERGIES[name]
    sides = (energies, PLAIN) if side == 0 else (PLAIN, energies)
    for beta_star in (0.5, 0.0):
        g = guard(beta_star=beta_star)
        for call in (g.loss, g.reweight):
            with pytest.raises(EnergyTypeError, match=f"f_{'neg' if side else 'pos'} .*{said}"):
                call(*sides)
        assert (g.step, g.last) == (0, {})
        g.loss(PLAIN, PLAIN.clone())
        assert g.step == 0
    if name != "sparse":  # which has no views
        members = guard(beta_star=torch.ones(1))
        with pytest.raises(EnergyTypeError, match=said):
            members.loss(sides[0][None], sides[1][None])


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda a, b: unit_langevin(a, b), "failed: .*not callable.*comes second"),
        (lambda a, b: a + b, r"got shape \(4,\).*comes second"),
    ],
)
def test_a_sampler_that_was_taken_for_the_loss_is_told_at_the_first_loss(
    loss: Any, said: str
) -> None:
    g = guard(loss, **HALF)
    with pytest.raises(LossError, match=f"(?s){said}"):
        g.loss(PLAIN, PLAIN.clone())
    assert g.step == 0
