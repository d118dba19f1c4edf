"""The public door, wrong values for each argument: a typed error or an answer.

Pure functions that run in every step check nothing; the suite itself holds their annotations (see
``tests/conftest.py``).
"""

from __future__ import annotations

import contextlib
import copy
import enum
import inspect
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ebmguard
from ebmguard import alerts, check, objective, recovery, samplers, sinks
from ebmguard.adapters.webhook import WebhookSink
from ebmguard.diagnostics import buffer_diagnostics
from ebmguard.errors import ConfigError, EbmguardError
from ebmguard.retrofit import Guard, guard
from ebmguard.trainer import TrainerParts
from tests.parts import Energy, climb

ROOMS = (alerts, check, objective, recovery, samplers, sinks)
# What these hand out to be read, and what only the guard calls.
NOT_CALLED = {
    *("Alert", "Limits", "Reading", "Situation", "Judge", "VerdictTracker", "Verdict"),
    *("SelfCheck", "unknown_problems", "Bands", "error_for", "Problem", "Setup"),
    *("find_problems", "by_severity", "Terms", "usable", "mean_difference"),
    *("Recoverer", "Rollback", "load_durably", "save_durably", "Chains", "Proposal"),
    *("PatientSink", "Writer", "alert_markdown", "is_gone", "marker_tag", "to_json", "prefixed"),
}
# Functions of the caller's, whose own errors are right.
CALLED_BACK = {"beta_star", "sampler_scale", "on_step"}
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 0.5, math.nan, math.inf, 1j, "x", "", b"x", object(), type, abs),
    *([], ["x"], [None], (1, 2, 3), {}, {"x": 1}, {1}, np.float32(1), np.ones(2)),
    *(torch.tensor(1.0), torch.ones(0), torch.ones(3), torch.ones(2, 3), torch.ones(3).long()),
    *(torch.tensor([math.nan] * 4), torch.Generator(), nn.Linear(2, 1)),
)


def f(x: Tensor) -> Tensor:
    return -x.square().sum(-1)


def calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """What can be called, by name, with arguments that are right."""
    pos, neg, log_q = torch.randn(6), torch.randn(4), (torch.zeros(6), torch.zeros(4))
    x, rng = torch.randn(4, 2), torch.Generator()
    steps: dict[str, Any] = {"step_size": 0.1, "noise_std": 0.1, "generator": rng}
    chains = samplers.start_chains(f, x)
    sides = {"f_pos": pos, "f_neg": neg}
    groups = (torch.zeros(6), torch.zeros(4))
    loss = {**sides, "beta_star": 0.5, "variant": "default", "log_q": log_q}
    bound = alerts.Bound("ess", "below", 0.1, 5, alerts.Remedies((), (), ()))
    remedies = {"zero": (), "positive": (), "negative": ()}
    buffer = samplers.ReplayBuffer(8, (2,), reinit_rate=0.1, generator=rng)
    shares = {**sides, "groups": groups, "log_q": log_q}
    rules: dict[str, Any] = {
        name: (getattr(alerts, name), {})
        for name in ("CollapsedRule", "FloorRule", "GrowthRule", "NonFiniteRule")
    }
    return rules | {
        "guard": (guard, {"sampler": lambda f, x: x, "beta_star": 0.5, "output_scale": 20.0}),
        "Guard.attach": (guard(None, lambda f, x: x, beta_star=0.5).attach, {}),
        "Guard.loss": (guard(beta_star=0.5).loss, shares),
        "Guard.check": (guard(beta_star=0.5).check, {}),
        "contrastive_loss": (objective.contrastive_loss, loss | {"groups": groups}),
        "coefficients": (objective.coefficients, loss | {"groups": groups}),
        "grad_scale": (objective.grad_scale, {**sides, "beta_star": 0.5, "log_q": log_q}),
        "positive_weights": (
            objective.positive_weights,
            {**sides, "beta_star": 0.5, "log_q": log_q},
        ),
        "weights": (objective.weights, {"f_neg": neg, "beta_star": 0.5, "log_q": log_q[1]}),
        "Change": (recovery.Change, {}),
        "Recovery": (recovery.Recovery, {}),
        "MedianRule": (alerts.MedianRule, {"name": "x", "bounds": (bound,)}),
        "Bound": (alerts.Bound, {k: v for k, v in vars(bound).items() if k != "level"}),
        "Remedies": (alerts.Remedies, remedies),
        "show": (check.show, {"problems": []}),
        "sgld": (samplers.sgld, {"f": f, "x0": x, "steps": 2, **steps}),
        "sgld_step": (samplers.sgld_step, {"f": f, "chains": chains, **steps}),
        "mala": (samplers.mala, {"f": f, "x0": x, "steps": 2, **steps}),
        "mala_step": (samplers.mala_step, {"f": f, "chains": chains, **steps}),
        "hmc": (samplers.hmc, {"f": f, "x0": x, "steps": 2, "leapfrog_steps": 2, **steps}),
        "hmc_step": (samplers.hmc_step, {"f": f, "chains": chains, "leapfrog_steps": 2, **steps}),
        "start_chains": (samplers.start_chains, {"f": f, "x0": x}),
        "annealed": (samplers.annealed, {"first": 1.0, "last": 0.1, "steps": 3}),
        "random_steps": (samplers.random_steps, {"low": 1, "high": 3, "generator": rng}),
        "Mixture": (samplers.Mixture, {"samplers": {"a": f, "b": f}}),
        "ReplayBuffer": (
            samplers.ReplayBuffer,
            {"size": 8, "sample_shape": (2,), "reinit_rate": 0.1, "generator": rng},
        ),
        "ReplayBuffer.sample": (buffer.sample, {"n": 4}),
        "ReplayBuffer.write": (buffer.write, {"indices": torch.arange(4), "samples": x}),
        "AddScalarSink": (sinks.AddScalarSink, {"logger": sinks_logger()}),
        "JsonlSink": (sinks.JsonlSink, {"folder": "runs"}),
        "TensorBoardSink": (sinks.TensorBoardSink, {"folder": "runs"}),
        "WebhookSink": (WebhookSink, {"url": "http://localhost/"}),
        "as_sink": (sinks.as_sink, {"obj": sinks_logger()}),
        "lock_folder": (sinks.lock_folder, {"folder": Path("runs")}),
        "read_jsonl": (sinks.read_jsonl, {"path": "rows.jsonl"}),
        "buffer_diagnostics": (buffer_diagnostics, {"buffer": x}),
    }


class sinks_logger:
    def add_scalar(self, tag: str, value: float, step: int) -> None: ...


def public() -> Iterator[str]:
    """The names that are to be called: those of the facade and of the rooms."""
    for home in (ebmguard, *ROOMS):
        for name in home.__all__:
            found = getattr(home, name)
            is_data = inspect.isclass(found) and (
                issubclass(found, Exception | enum.Enum) or getattr(found, "_is_protocol", False)
            )
            if callable(found) and not is_data and found is not Guard:
                yield name


def test_every_public_callable_is_called():
    assert set(public()) - NOT_CALLED <= set(calls())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", calls())
def test_wrong_values_end_in_a_typed_error_or_an_answer(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("{}\n")
    call, right = calls()[name]
    right = {key: value for key, value in right.items() if value is not ...}
    call(**right)
    untyped = []
    told = TrainerParts.__annotations__ if name in ("guard", "Guard.attach") else {}
    for argument in {**inspect.signature(call).parameters, **told}.keys() - {"parts"}:
        call, right = calls()[name]
        given = {key: value for key, value in right.items() if value is not ...}
        for value in VALUES:
            if argument in CALLED_BACK and callable(value):
                continue
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    call(**{**given, argument: value})
            except (EbmguardError, OSError):  # OSError: what a path leads to
                pass
            except Exception as error:  # noqa: BLE001 - that there is none is the claim
                untyped.append(f"{argument}={value!r}: {type(error).__name__}: {error}"[:300])
    assert not untyped, "\n".join(untyped)


def owners() -> dict[str, Any]:
    """What has a state to load."""
    torch.manual_seed(0)
    net = Energy()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    known: dict[str, Any] = {"step_size": 0.1, "noise_std": 0.1}
    g = guard(None, climb, beta_star=0.5, optimizer=optimizer, **known)
    for _ in range(3):
        x = g.sampler(net, torch.randn(30, 2))
        g.loss_fn(net(torch.randn(30, 2)), net(x)).backward()
        optimizer.step()
    rng = torch.Generator()
    return {
        "guard": g,
        "buffer": samplers.ReplayBuffer(8, (2,), reinit_rate=0.1, generator=rng),
    }


def damaged(state: Any) -> Iterator[Any]:
    """The state without one of its parts, or with another value there."""
    for value in (None, "x", [], [None], object(), ...):
        for place in list(state) if isinstance(state, dict) else range(len(state)):
            changed = copy.copy(state)
            if value is not ...:
                changed[place] = value
            else:
                del changed[place]
            yield changed
    for place, part in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(part, dict | list):
            for other in damaged(part):
                changed = copy.copy(state)
                changed[place] = other
                yield changed


@pytest.mark.parametrize("name", ["guard", "buffer"])
def test_a_damaged_state_is_refused_and_changes_nothing(name):
    owner = owners()[name]
    state = copy.deepcopy(owner.state_dict())
    for wrong in (None, 3, "x", [], {}, *damaged(state)):
        try:
            owner.load_state_dict(wrong)
        except ConfigError:
            assert repr(owner.state_dict()) == repr(state)
        else:
            owner.load_state_dict(state)
