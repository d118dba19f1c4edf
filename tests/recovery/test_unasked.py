"""Where nobody has asked for a rollback, and where it cannot be meant."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
from torch import nn

from ebmguard import Level, Recovery, guard
from ebmguard.errors import ConfigError
from ebmguard.recovery import Change
from tests.parts import gradient_at
from tests.recovery.parts import Loop, scale_last_layer


class Broken:
    """A buffer that cannot be copied."""

    def state_dict(self) -> Any:
        raise RuntimeError("it is on another machine")

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def test_a_run_that_can_be_taken_back_is() -> None:
    plain, asked = Loop(), Loop(action="rollback")
    for each in (plain, asked):
        each.steps(60)
        each.step(1e9)
        each.steps(10)
        assert [x.step for x in each.g.rollbacks] == [60]
    assert all(map(torch.equal, plain.f.parameters(), asked.f.parameters()))


def test_a_batch_that_is_no_number_is_left_out_and_what_stays_is_taken_back() -> None:
    plain = Loop()
    plain.steps(60)
    before = copy.deepcopy(plain.f.state_dict())
    plain.step(math.nan)
    assert all(map(torch.equal, before.values(), plain.f.state_dict().values()))
    plain.steps(10)
    assert plain.g.attempt == 0
    scale_last_layer(plain.f, math.nan)
    plain.steps(3)
    assert plain.g.attempt == 1
    assert all(bool(p.isfinite().all()) for p in plain.f.parameters())


CANNOT: dict[str, tuple[dict[str, Any], str]] = {
    "no optimizer": ({"optimizer": None}, ""),
    "an ensemble": ({"beta_star": torch.tensor([0.5])}, ""),
    "asked not to": ({"action": "warn"}, ""),
    "what cannot be copied": ({"buffer": Broken()}, "it is on another machine"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_taken_back_goes_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    told, said = CANNOT[name]
    caplog.set_level(logging.WARNING)
    if name == "an ensemble":
        assert guard(None, gradient_at, **told).attempt == 0
        return
    plain = Loop(**told)
    plain.steps(20)
    assert ("no ERROR takes the run back" in caplog.text) == bool(said)
    assert said in caplog.text
    plain.step(1e9)
    plain.steps(10)
    assert plain.g.attempt == 0
    assert any(alert.level is Level.ERROR for alert in plain.g.alerts)


def test_parameters_of_no_optimizer_and_a_second_guard_end_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    plain = Loop()
    plain.f.register_parameter("more", nn.Parameter(torch.ones(1)))
    plain.steps(3)
    assert "no attached optimizer has these parameters of the model" in caplog.text
    one, caplog_text = Loop(), caplog.text
    other = guard(None, gradient_at, beta_star=0.5, model=one.f, optimizer=one.optimizer)
    one.steps(3)
    assert "another guard has the optimizer, too" in caplog.text.replace(caplog_text, "")
    del other


def test_a_spent_budget_ends_no_run_that_did_not_ask() -> None:
    plain = Loop()
    for _ in range(8):
        plain.steps(60)
        plain.step(1e9)
    scale_last_layer(plain.f, 1e12)
    plain.steps(120)
    assert plain.g.attempt == Recovery().budget


# -- what is refused ---------------------------------------------------------------------------


def test_what_is_missing_is_named_before_the_first_step() -> None:
    model = torch.nn.Linear(2, 1)
    g = guard(None, None, beta_star=0.5, action="rollback")
    f = model(torch.ones(3, 2)).squeeze(1)
    with pytest.raises(ConfigError, match=r"g\.attach\(model=\.\.\., optimizer=\.\.\.\)"):
        g.loss_fn(f, f.clone())
    assert g.step == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recovery": Recovery(), "action": "warn"}, "settings of action"),
        ({"action": "rollback", "beta_star": torch.ones(2)}, "one member of an ensemble"),
    ],
)
def test_arguments_that_cannot_be_meant(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        guard(None, None, **({"beta_star": 0.5} | options))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Recovery, {"budget": -1}),
        (Recovery, {"keep": True}),
        (Recovery, {"ladder": ()}),
        (Recovery, {"certify_after": 1.5}),
        (Change, {"lr": 0.0}),
        (Change, {"beta_star": 0.0}),
        (Change, {"substeps": 0}),
    ],
)
def test_settings_out_of_range(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=kind.__name__):
        kind(**settings)


def test_a_sampler_without_that_parameter_cannot_be_given_its_steps() -> None:
    model = torch.nn.Linear(2, 1)
    g = guard(None, lambda f: torch.ones(3, 2), beta_star=0.5, action="rollback")
    g.attach(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="no parameter of that name"):
        g.attach(steps_argument="n_steps", sgld_steps=3).sampler(model)
