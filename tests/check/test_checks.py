"""Each check finds its problem in a trainer with just that one, and is quiet about a sound one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ebmguard import Level
from ebmguard.check import Problem, Setup, find_problems
from ebmguard.samplers import ReplayBuffer
from ebmguard.trainer import Trainer
from tests.parts import Energy

X = torch.linspace(-1, 1, 16).reshape(8, 2)


class Returns(nn.Module):
    """Whatever it is told to return for x."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.answer = answer

    def forward(self, x):
        return self.answer(self.scale * x)


def sound(model: nn.Module | None = None, **changes: Any) -> Setup:
    """A trainer without a problem, but for the changes."""
    model = Energy() if model is None else model
    trainer = Trainer(
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        buffer=ReplayBuffer(10, (2,), reinit_rate=0.05, generator=torch.Generator()),
        step_size=1.0,
        noise_std=0.01,
        clamp=(-1.0, 1.0),
    )
    setup = Setup(
        trainer=trainer,
        output_scale=20_000.0,
        tempers=True,
        factor=(1 - 0.5 / 20_000,),
        example=X,
    )
    return changed(setup, **changes)


def changed(setup: Setup, **changes: Any) -> Setup:
    """The same, where some of the changes are of the rest of the trainer."""
    of_trainer = {name: value for name, value in changes.items() if hasattr(setup.trainer, name)}
    own = {name: value for name, value in changes.items() if name in vars(setup)}
    assert own.keys() | of_trainer.keys() == changes.keys()
    return replace(setup, **{"trainer": replace(setup.trainer, **of_trainer)} | own)


def found(setup: Setup, name: str) -> Problem:
    """The only problem of this name."""
    (problem,) = [each for each in find_problems(setup) if each.name == name]
    assert problem.what
    assert problem.fix.endswith(".")
    return problem


@pytest.mark.parametrize(
    "setup",
    [
        sound(),
        sound(judge_in_loss=True),  # it costs nothing without a GPU
        *(sound(Energy(x)) for x in (nn.Dropout(0.0), nn.LayerNorm(8), nn.Dropout(0.1).eval())),
        sound(Energy(nn.BatchNorm1d(8).eval())),
        # Noise on the data lies a little outside; without an example nothing is known.
        sound(clamp=(-0.95, 0.95)),
        sound(clamp=(0.0, 1.0), example=None),
        # Of these buffers nothing can be said.
        *(sound(buffer=x) for x in (torch.zeros(4, 2).byte(), torch.zeros(0, 2), [X], object())),
    ],
)
def test_a_sound_trainer_has_no_problems(setup):
    assert find_problems(setup) == []


@pytest.mark.parametrize(
    ("changes", "name", "level"),
    [
        ({"example": X[:1]}, "example", Level.INFO),
        ({"example": X.long()}, "example", Level.INFO),
        ({"example": torch.tensor(1.0)}, "example", Level.INFO),
        ({"factor": (1.0, 0.0)}, "sampler_factor", Level.ERROR),
        ({"factor": (1.0, -0.5)}, "sampler_factor", Level.ERROR),
        ({"factor": (1.0, 0.01)}, "sampler_factor", Level.WARN),
        ({"clamp": (0.0, 1.0)}, "clamp", Level.ERROR),
        ({"clamp": (-1.0, 0.5)}, "clamp", Level.ERROR),
        ({"optimizer": None}, "no_optimizer", Level.INFO),
        ({"misses_ranks": True}, "ranks", Level.WARN),
        ({"has_sinks": False}, "no_sinks", Level.INFO),
    ],
)
def test_one_wrong_setting_is_one_problem(changes, name, level):
    assert found(sound(**changes), name).severity is level


def test_every_problem_is_listed_at_once_the_worst_first():
    net = Energy(nn.BatchNorm1d(8), nn.Dropout(0.5))
    problems = find_problems(sound(net, output_scale=1.0, clamp=(0.0, 0.5), has_sinks=False))
    names = [problem.name for problem in problems]
    assert {"batch_norm", "dropout", "output_scale", "clamp", "no_sinks"} <= set(names)
    levels = [problem.severity for problem in problems]
    assert levels == sorted(levels, reverse=True)


# -- the network -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (nn.BatchNorm1d(8), "batch_norm"),
        (nn.BatchNorm1d(8, track_running_stats=False).eval(), "batch_norm"),
        (nn.SyncBatchNorm(8), "batch_norm"),
        (nn.Dropout(0.1), "dropout"),
        (nn.AlphaDropout(0.1), "dropout"),
    ],
)
def test_layers_that_depend_on_more_than_x(layer, name):
    problem = found(sound(Energy(layer), example=None), name)
    assert problem.severity is Level.WARN
    assert f"{type(layer).__name__} net.1" in problem.what


@pytest.mark.parametrize(
    ("layer", "is_said"),
    [
        (nn.BatchNorm1d(8), True),
        (nn.SyncBatchNorm(8), True),
        (nn.BatchNorm1d(8, track_running_stats=False), False),
        (nn.BatchNorm1d(8).eval(), False),
        (nn.InstanceNorm1d(8), False),
    ],
)
def test_running_statistics_that_negatives_move_are_named(layer, is_said):
    problems = find_problems(sound(Energy(layer), example=None))
    told = [each for each in problems if "running statistics" in each.what]
    assert len(told) == is_said
    assert all("momentum = 0.0" in each.fix for each in told)


def test_eval_mode_is_told_where_it_matters():
    assert found(sound(Energy(nn.Dropout(0.5)).eval()), "eval_mode").severity is Level.INFO
    assert find_problems(sound(Energy().eval())) == []


def test_frozen_parameters():
    net = Energy()
    net.net[0].requires_grad_(False)
    some = found(sound(net), "frozen")
    assert some.severity is Level.INFO
    assert "2 of 4 parameters are frozen (net.0.weight, net.0.bias)" in some.what
    assert found(sound(net.requires_grad_(False)), "frozen").severity is Level.ERROR


def test_parameters_of_a_lost_run():
    net = Energy()
    with torch.no_grad():
        next(net.parameters())[0] = torch.nan
    assert found(sound(net), "nonfinite_parameters").severity is Level.ERROR


def test_float16_parameters():
    assert found(sound(Energy().half(), example=None), "float16").severity is Level.WARN
    assert find_problems(sound(Energy().bfloat16(), example=None)) == []


@pytest.mark.parametrize(
    "norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm], ids=["old", "new"]
)
def test_spectral_norm_is_worth_knowing(norm):
    problem = found(sound(Energy(norm(nn.Linear(8, 8))), example=None), "spectral_norm")
    assert problem.severity is Level.INFO
    assert "net.1" in problem.what


# -- what it returns ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "name", "level", "words"),
    [
        (lambda x: x.sum(1).mean(), "mean", Level.ERROR, "one number for 8 samples"),
        (lambda x: x.sum().reshape(1), "mean", Level.ERROR, "one number for 8 samples"),
        (lambda x: (x.sum(1), x), "not_a_tensor", Level.ERROR, "returns a tuple"),
        (lambda x: x.sum(1).long(), "dtype", Level.ERROR, "torch.int64"),
        (lambda x: x.sum(1)[:5], "shape", Level.ERROR, r"shape (5,) for 8 samples"),
        (lambda x: x[:, :, None], "shape", Level.ERROR, r"shape (8, 2, 1)"),
        (lambda x: x.sum(1)[None, :, None], "shape", Level.ERROR, r"shape (1, 8, 1)"),
        (lambda x: torch.cat([x] * 5, 1), "heads", Level.WARN, "10 numbers per sample"),
        (lambda x: x.sum(1).sqrt(), "nonfinite_energies", Level.ERROR, "4 of 8 energies"),
        (lambda x: x.detach().sum(1), "no_gradient", Level.ERROR, "no gradient to follow"),
        (lambda x: x[99], "model_fails", Level.ERROR, "IndexError"),
        (lambda x: x @ torch.ones(3), "model_fails", Level.ERROR, "shape (8, 2)"),
        (lambda x: (x - x.mean(0)).square().sum(1), "batch_dependence", Level.WARN, "gradient"),
        (lambda x: x.sum(1) + torch.randn(len(x)), "random_energy", Level.WARN, "different"),
        (lambda x: x.sum(1).squeeze(), "single_sample", Level.INFO, "shape ()"),
        (lambda x: 100 * x.sum(1), "weights_collapse", Level.WARN, "beta_star = 0.5"),
    ],
)
def test_what_a_model_returns(answer, name, level, words):
    x = torch.linspace(-1, 1, 32).reshape(16, 2) if name == "weights_collapse" else X
    problem = found(sound(Returns(answer), example=x), name)
    assert problem.severity is level
    assert words in problem.what


@pytest.mark.parametrize(
    "answer",
    [
        lambda x: x.sum(1),
        lambda x: x.sum(1, keepdim=True),
        lambda x: x.sum(1)[:, None, None, None],
    ],
    ids=["(B,)", "(B, 1)", "(B, 1, 1, 1)"],
)
def test_energies_as_they_should_be(answer):
    assert find_problems(sound(Returns(answer))) == []


def test_batch_norm_is_seen_in_the_gradients_too():
    problem = found(sound(Energy(nn.BatchNorm1d(8))), "batch_dependence")
    assert problem.severity is Level.WARN
    assert "batch_dependence" not in [
        each.name for each in find_problems(sound(Energy(nn.BatchNorm1d(8).eval())))
    ]


def test_ensembles_return_their_model_dimensions_first():
    good = sound(Returns(lambda x: x.sum(1).expand(3, 8)), models=1)
    assert find_problems(good) == []
    assert found(sound(models=1), "shape").severity is Level.ERROR


@pytest.mark.parametrize("mode", [True, False])
def test_trying_a_model_leaves_no_trace(mode):
    net = Energy(nn.BatchNorm1d(8), nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Dropout(0.5))
    net.train(mode)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    rng = torch.get_rng_state()
    assert find_problems(sound(net))
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert net.training is mode
    assert X.grad is None
    assert not X.requires_grad


# -- numbers of the sampler --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "noise", "scale"), [(1.0, 0.01, 2e4), (10.0, 0.005, 8e5), (0.5e-4, 0.01, 1.0)]
)
def test_an_output_scale_that_fits(step, noise, scale):
    setup = sound(step_size=step, noise_std=noise, output_scale=scale)
    assert find_problems(setup) == []
    wrong = found(changed(setup, output_scale=2.1 * scale), "output_scale")
    assert wrong.severity is Level.ERROR
    assert f"= {scale:g}" in wrong.what


def test_an_output_scale_of_a_sampler_without_noise():
    assert "no noise" in found(sound(noise_std=0.0), "output_scale").what


def test_a_sampler_that_stays_untempered():
    setup = sound(output_scale=None, tempers=False, factor=(1.0,))
    known = found(setup, "no_output_scale")
    assert known.severity is Level.WARN
    assert "output_scale=20000" in known.fix or "20000" in known.fix
    unknown = found(changed(setup, step_size=None), "no_output_scale")
    assert unknown.severity is Level.INFO
    for quiet in ({"noise_std": 0.0}, {"beta_star": (0.0,)}, {"has_sampler": False}):
        assert find_problems(changed(setup, **quiet)) == []


def test_a_buffer_that_starts_elsewhere():
    def buffer(low: float, high: float) -> torch.Tensor:
        return torch.linspace(low, high, 20).reshape(10, 2)

    assert found(sound(buffer=buffer(0, 1)), "buffer_range").severity is Level.WARN
    wide = sound(buffer=buffer(-1, 1), example=(X + 1) / 2)
    assert found(wide, "buffer_range").severity is Level.INFO
    assert find_problems(sound(buffer=buffer(-1, 1))) == []
    assert found(sound(buffer=torch.zeros(10, 3)), "buffer_shape").severity is Level.WARN
    bad = buffer(-1, 1)
    bad[3, 1] = torch.inf
    assert "1 of its 10 rows" in found(sound(buffer=bad), "buffer_nonfinite").what


# -- training ----------------------------------------------------------------------------------


def test_parameters_that_the_optimizer_does_not_have():
    net = Energy()
    problem = found(sound(net, optimizer=torch.optim.SGD(net.net[0].parameters())), "not_trained")
    assert problem.severity is Level.WARN
    assert "2 parameters" in problem.what
    assert "net.2.weight, net.2.bias" in problem.what
    net.net[2].requires_grad_(False)
    quiet = sound(net, optimizer=torch.optim.SGD(net.net[0].parameters()))
    assert [each.name for each in find_problems(quiet)] == ["frozen"]


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        (torch.optim.Adam, Level.WARN),
        (torch.optim.AdamW, Level.INFO),
        (torch.optim.SGD, Level.INFO),
    ],
)
def test_weight_decay(kind, level):
    net = Energy()
    optimizer = kind(net.parameters(), lr=0.1, weight_decay=0.25)
    problem = found(sound(net, optimizer=optimizer), "weight_decay")
    assert problem.severity is level
    assert "weight_decay=0.25" in problem.what


def test_float16_without_a_scaler():
    with torch.autocast("cpu", torch.float16):
        assert found(sound(example=None), "no_scaler").severity is Level.WARN
        attached = sound(example=None, scaler=torch.amp.GradScaler("cpu"))
        assert find_problems(attached) == []
    with torch.autocast("cpu", torch.bfloat16):
        assert find_problems(sound(example=None)) == []


# -- consequences ------------------------------------------------------------------------------


def test_rollback_needs_what_it_takes_back():
    setup = sound(action="rollback", scheduler=object(), ema=object())
    setup = changed(setup, generators=(torch.Generator(),))
    assert find_problems(setup) == []
    problem = found(changed(setup, optimizer=None), "rollback_incomplete")
    assert problem.severity is Level.ERROR
    assert "g.attach(optimizer=...)" in problem.fix
    assert found(changed(setup, buffer=None), "rollback_incomplete").severity is Level.WARN
    problem = found(changed(setup, scheduler=None, ema=None), "rollback_incomplete")
    assert problem.severity is Level.INFO
    assert "g.attach(scheduler=..., ema=...)" in problem.fix


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_hold_and_determinism_on_a_gpu():
    net = Energy().cuda()
    setup = sound(net, judge_in_loss=True, action="rollback", example=X.cuda())
    assert found(setup, "judge_in_loss").severity is Level.INFO
