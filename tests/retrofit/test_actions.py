"""When a step is judged, what is withheld from then on, and where the action is carried out."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from ebmguard import Alert, Guard, Level, errors, guard
from tests.parts import Energy, Memory, Script, energies, slopes

X = torch.ones(4, 2)
ERROR_AT_2 = {2: Level.ERROR}


def make(levels=ERROR_AT_2, *, sampler: Any = None, optimizer=False, rule="energy_blowup", **more):
    """A guard whose detector fires as told, and an optimizer that moves f's parameters."""
    options: dict[str, Any] = {"beta_star": 1.0, "action": "raise", "model": Energy()} | more
    g = guard(None, sampler, **options)
    detector: Any = Script(levels, rule)
    g._loop.judge = detector
    sgd = None
    if optimizer:
        sgd = torch.optim.SGD(options["model"].parameters(), lr=0.1)
        g.attach(optimizer=sgd)
    return g, detector, sgd, options["model"]


def gradient(g: Guard) -> torch.Tensor:
    pos, neg = energies()
    return torch.cat(slopes(g.loss_fn(pos, neg), pos, neg))


# -- judged in the loss (a CPU's default) -----------------------------------------------------


@pytest.mark.parametrize("judge_in_loss", [None, True])
def test_judging_inside_the_loss(judge_in_loss):
    g, detector, sgd, _ = make({1: Level.WARN}, optimizer=True, judge_in_loss=judge_in_loss)
    for step in range(3):
        gradient(g)
        assert [seen for seen, _ in detector.seen] == list(range(step + 1))
        assert len(g.alerts) == (step >= 1)
        assert g.last == detector.seen[-1][1]
        sgd.step()


def test_raise_withholds_at_once_and_raises_after_the_update():
    memory = Memory()
    g, _, sgd, f = make(optimizer=True, sinks=[memory])
    before = [p.detach().clone() for p in f.parameters()]
    for _ in range(2):
        gradient(g)
        sgd.step()
    pos, neg = energies()
    loss = g.loss_fn(pos, neg)
    # Its value stays, for who keeps the best model by it (the closed form of Eq. 8).
    assert loss.item() == pytest.approx(
        (neg.logsumexp(0) - pos).detach().double().exp().log1p().mean().item()
    )
    other_term = sum(p.sum() for p in f.parameters())  # the classifier's part of the loss
    (loss + other_term).backward()
    assert all(x.grad is not None and not x.grad.any() for x in (pos, neg))
    assert gradient(g).abs().sum() == 0  # a second loss of the same step
    with pytest.raises(errors.EnergyBlowupError) as caught:
        sgd.step()
    assert caught.value.alert is g.alerts[0]
    assert caught.value.alert.step == 2
    assert str(caught.value) == g.alerts[0].message
    # Its row is on the disk before the error can end the process.
    assert memory.steps == [0, 1, 2]
    assert memory.flushed_rows[-1] == 3
    # The update was made, of the rest of the loss alone.
    for p, old in zip(f.parameters(), before, strict=True):
        torch.testing.assert_close(p, old - 0.1)
    # Who goes on after the error has the loss back.
    assert gradient(g).abs().sum() > 0
    sgd.step()
    assert g.step == 4


@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.parametrize("place", ["sampler", "inline", "loss"])
def test_raise_before_what_comes_next(place, losses):
    """A sampler call, an inline evaluation, or where there is neither the next loss."""
    calls: list[Any] = []
    g, _, _, _ = make(sampler=calls.append if place == "sampler" else None)
    places: dict[str, Any] = {"inline": lambda: g.temper(X[0]), "loss": lambda: gradient(g)}
    begin = places.get(place, lambda: g.sampler(X))
    for step in range(3):
        if place != "loss":
            begin()
        for _ in range(1 if place == "loss" else losses):
            assert bool(gradient(g).abs().sum() > 0) is (step < 2)
    with pytest.raises(errors.EnergyBlowupError):
        begin()
    assert len(calls) == (3 if place == "sampler" else 0)


def test_pause_is_no_safe_point_for_a_sampler():
    calls: list[Any] = []
    g, _, _, _ = make({0: Level.ERROR}, sampler=calls.append)
    g.sampler(X)
    gradient(g)
    with g.paused():
        g.sampler(X)  # the plot before the run ends
    assert len(calls) == 2


def test_withheld_gradient_of_nan_is_zero_in_every_layout_and_the_loss_no_number():
    for shape, beta_star in (((4,), 1.0), ((4, 1), 1.0), ((4, 3), 1.0), ((2, 4), torch.ones(2))):
        g, _, _, _ = make({0: Level.ERROR}, beta_star=beta_star)
        f = torch.full(shape, torch.nan, requires_grad=True)
        loss = g.loss_fn(f, f.clone())
        assert loss.shape == ()
        assert loss.isnan()
        (grad,) = slopes(loss, f)
        assert torch.equal(grad, torch.zeros(shape))


def test_reweighting_is_withheld_too():
    g, _, _, _ = make({0: Level.ERROR})
    pos = torch.tensor([1.0, torch.nan], requires_grad=True)
    neg = torch.tensor([[0.0], [1.0], [2.0]])[:, 0].requires_grad_()
    same_pos, same_neg = g.reweight(pos, neg)
    assert torch.equal(same_neg, neg)
    to_pos, to_neg = slopes((same_neg.mean() - same_pos.mean()), pos, neg)
    assert to_pos.tolist() == [0.0, 0.0]
    assert to_neg.tolist() == [0.0, 0.0, 0.0]


# -- with a lag (a GPU's default) --------------------------------------------------------------


def test_lag_judges_exactly_two_steps_later():
    memory = Memory()
    g, detector, sgd, _ = make({1: Level.WARN}, optimizer=True, judge_in_loss=False, sinks=[memory])
    for step in range(6):
        gradient(g)
        seen = [step for step, _ in detector.seen]
        assert seen == list(range(max(0, step - 2)))
        sgd.step()
        seen = [step for step, _ in detector.seen]
        assert seen == memory.steps == list(range(max(0, step - 1)))
    assert [alert.step for alert in g.alerts] == [1]
    g.close()
    assert [step for step, _ in detector.seen] == memory.steps == list(range(6))
    assert memory.column("alert_level") == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_lag_raises_after_the_update_that_is_two_steps_later():
    g, _, sgd, _ = make({1: Level.ERROR}, optimizer=True, judge_in_loss=False)
    for _ in range(3):
        assert gradient(g).abs().sum() > 0
        sgd.step()
    assert gradient(g).abs().sum() > 0
    with pytest.raises(errors.EnergyBlowupError):
        sgd.step()
    assert g.step == 4


def test_lag_without_an_optimizer():
    calls: list[Any] = []
    g, _, _, _ = make({0: Level.ERROR}, sampler=calls.append, judge_in_loss=False)
    for _ in range(3):
        g.sampler(X)
        assert gradient(g).abs().sum() > 0
    with pytest.raises(errors.EnergyBlowupError):
        g.sampler(X)
    assert len(calls) == 3


def test_lag_with_losses_alone_withholds_one_loss():
    g, _, _, _ = make({0: Level.ERROR}, judge_in_loss=False)
    for _ in range(3):
        assert gradient(g).abs().sum() > 0
    assert gradient(g).abs().sum() == 0  # here step 2 ended, and step 0 was judged
    with pytest.raises(errors.EnergyBlowupError):
        gradient(g)


# -- what alerts do besides --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "error"),
    [
        ("nonfinite", errors.NonFiniteError),
        ("energy_blowup", errors.EnergyBlowupError),
        ("sampler_failing", errors.SamplerFailingError),
        ("weights_degenerate", errors.WeightsDegenerateError),
        ("a_rule_of_ones_own", errors.DivergenceError),
    ],
)
def test_error_of_the_rule(rule, error):
    g, _, sgd, _ = make({0: Level.ERROR}, rule=rule, optimizer=True)
    gradient(g)
    with pytest.raises(errors.DivergenceError) as caught:
        sgd.step()
    assert type(caught.value) is error
    assert isinstance(caught.value, RuntimeError)


def test_warnings_never_raise_and_errors_only_with_raise():
    g, _, sgd, _ = make({0: Level.WARN, 1: Level.INFO}, optimizer=True)
    h, _, sgd_of_h, _ = make({0: Level.ERROR}, optimizer=True, action="warn")
    for guarded, optimizer in ((g, sgd), (h, sgd_of_h)):
        for _ in range(3):
            assert gradient(guarded).abs().sum() > 0
            optimizer.step()


def test_every_alert_is_recorded_said_and_called_back(caplog):
    memory = Memory()
    called: list[Alert] = []
    levels = {0: Level.INFO, 1: Level.WARN, 2: Level.ERROR, 3: Level.ERROR}
    g, _, sgd, _ = make(
        levels, optimizer=True, action="warn", on_alert=called.append, sinks=[memory]
    )
    with caplog.at_level(logging.DEBUG, "ebmguard"):
        for _ in range(5):
            gradient(g)
            assert called == g.alerts  # inside the loss, not later
            sgd.step()
    assert called == g.alerts
    assert [alert.level for alert in called] == list(levels.values())
    assert memory.alerts == [alert.record() for alert in called]
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [(a.level.name.replace("WARN", "WARNING"), a.message) for a in called[1:]]
    assert memory.column("alert_level") == [0.0, 1.0, 2.0, 2.0, 0.0]


@pytest.mark.parametrize("asked", [False, True])
def test_sinks_are_flushed_by_an_alert_and_when_asked(asked):
    memory = Memory()
    levels = {} if asked else {3: Level.WARN}
    g, _, sgd, _ = make(levels, optimizer=True, sinks=[memory], flush_every=50)
    for step in range(5):
        gradient(g)
        sgd.step()
        if asked and step == 3:
            g.flush()
        assert memory.flushed_rows == ([] if step < 3 else [4 if asked else 3])
