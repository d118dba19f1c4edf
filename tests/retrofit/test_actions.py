"""When a step is judged, what is withheld, where the action is carried out, and what is advised."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ebmguard import Guard, errors, guard
from ebmguard.alerts import Alert, Level, Remedy
from tests.parts import Energy, Memory, Script, energies, slopes
from tests.runs import Training

X = torch.ones(4, 2)
ERROR_AT_2 = {2: Level.ERROR}


def make(levels: Any = ERROR_AT_2, *, optimizer: bool = False, rule: str = "energy_blowup", **more):
    """A guard whose judge fires as told, and an optimizer that moves f's parameters."""
    options: dict[str, Any] = {"beta_star": 1.0, "action": "raise", "model": Energy()} | more
    g = guard(None, **options)
    sgd: Any = None
    if optimizer:
        sgd = torch.optim.SGD(options["model"].parameters(), lr=0.1)
        g.attach(optimizer=sgd)
    return g, Script(levels, rule).watches(g), sgd, options["model"]


def gradient(g: Guard) -> torch.Tensor:
    pos, neg = energies()
    return torch.cat(slopes(g.loss_fn(pos, neg), pos, neg))


# -- judged in the loss (a CPU's default) -----------------------------------------------------


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
    with g.paused():
        assert gradient(g).abs().sum() == 0  # and one that leaves no trace
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


@pytest.mark.parametrize(("place", "losses"), [("sampler", 2), ("inline", 1), ("loss", 1)])
def test_raise_before_what_comes_next(place, losses):
    """A sampler call, an inline evaluation, or where there is neither the next loss."""
    calls: list[Any] = []
    g, *_ = make(sampler=calls.append if place == "sampler" else None)
    places: dict[str, Any] = {"inline": lambda: g.temper(X[0]), "loss": lambda: gradient(g)}
    begin = places.get(place, lambda: g.sampler(X))
    for step in range(3):
        if place != "loss":
            begin()
        for _ in range(1 if place == "loss" else losses):
            assert bool(gradient(g).abs().sum() > 0) is (step < 2)
    if place == "sampler":
        with g.paused():
            g.sampler(X)  # the plot before the run ends
    with pytest.raises(errors.EnergyBlowupError):
        begin()
    assert len(calls) == (4 if place == "sampler" else 0)


def test_withheld_gradient_of_nan_is_zero_in_every_layout_and_the_loss_no_number():
    for shape, beta_star in (((4,), 1.0), ((4, 1), 1.0), ((4, 3), 1.0), ((2, 4), torch.ones(2))):
        g, *_ = make({0: Level.ERROR}, beta_star=beta_star)
        f = torch.full(shape, torch.nan, requires_grad=True)
        loss = g.loss_fn(f, f.clone())
        assert loss.shape == ()
        assert loss.isnan()
        (grad,) = slopes(loss, f)
        assert torch.equal(grad, torch.zeros(shape))


def test_reweighting_is_withheld_too():
    g, *_ = make({0: Level.ERROR})
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
    g, script, sgd, _ = make({1: Level.WARN}, optimizer=True, judge_in_loss=False, sinks=[memory])
    for step in range(6):
        gradient(g)
        assert [seen for seen, _ in script.seen] == list(range(max(0, step - 2)))
        sgd.step()
        assert [seen for seen, _ in script.seen] == memory.steps == list(range(max(0, step - 1)))
    assert [alert.step for alert in g.alerts] == [1]
    g.close()
    assert [seen for seen, _ in script.seen] == memory.steps == list(range(6))
    assert memory.column("alert_level") == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("place", ["optimizer", "loss"])
def test_lag_raises_where_the_step_ends_that_is_two_later(place):
    g, _, sgd, _ = make({0: Level.ERROR}, optimizer=place == "optimizer", judge_in_loss=False)
    for step in range(3):
        assert gradient(g).abs().sum() > 0
        if sgd and step < 2:
            sgd.step()
    if place == "loss":
        assert gradient(g).abs().sum() == 0  # here step 2 ended, and step 0 was judged
    with pytest.raises(errors.EnergyBlowupError):
        sgd.step() if sgd else gradient(g)
    assert g.step == 3


# -- what alerts do besides --------------------------------------------------------------------


def test_warnings_never_raise():
    g, _, sgd, _ = make({0: Level.WARN, 1: Level.INFO}, optimizer=True)
    for _ in range(3):
        assert gradient(g).abs().sum() > 0
        sgd.step()


def test_every_alert_is_recorded_said_and_called_back(caplog):
    memory, called = Memory(), list[Alert]()
    levels = {0: Level.INFO, 1: Level.WARN, 2: Level.ERROR, 3: Level.ERROR}
    options: dict[str, Any] = {"on_alert": called.append, "sinks": [memory], "action": "warn"}
    g, _, sgd, _ = make(levels, optimizer=True, **options)
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


# -- what a run is advised: what it allows, two remedies at most, nothing that contradicts ---------

R = Remedy
BACK = 'begin again, as no checkpoint is of before step 0; action="rollback" next time'
LONG = (R.ROLL_BACK, R.RAISE_BETA, R.LOWER_LR, R.MORE_STEPS)
UP_AND_DOWN = {0: (R.RAISE_BETA,), 2: (R.LOWER_BETA, R.LOWER_LR), 3: (R.RAISE_BETA,)}


class Advising(Script):
    """Warns at given steps, each time with remedies of its own, of one model or of members."""

    def __init__(self, advice: Mapping[int, tuple[str, ...]], members: Any = (None,)) -> None:
        super().__init__({})
        self.advice, self.members = advice, members

    def observe(self, step: int, row: Any, members: Any = ()) -> list[Alert]:
        what = "energy_blowup", Level.WARN, step, "energy_gap", 9.0, 1.0, 5
        own = self.members if step in self.advice else ()
        return [Alert(*what, self.advice[step], member) for member in own]


def advising(advice: Mapping[int, tuple[str, ...]], **options: Any) -> Guard:
    g = guard(None, None, **({"beta_star": 0.5} | options))
    Advising(advice).watches(g)
    return g


def advised(g: Guard, steps: int = 4, shift: float = 0.0) -> list[Any]:
    for _ in range(steps):
        pos, neg = energies()
        g.loss_fn(pos + shift, neg)
    return [alert.remedies for alert in g.alerts]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (BACK, R.RAISE_BETA)),
        ({"output_scale": 1.0, "beta_star": 0.2}, (BACK, R.RAISE_BETA)),
        ({"output_scale": 1.0, "sampler_scale": 0.5}, (BACK, R.LOWER_LR)),
        ({"output_scale": 1.4, "beta_star": lambda _: torch.tensor(0.7)}, (BACK, R.LOWER_LR)),
    ],
)
def test_two_at_most_that_the_run_allows(options, expected):
    memory = Memory()
    assert advised(advising({0: LONG}, sinks=[memory], **options), 1, 9.0) == [expected]
    (record,) = memory.alerts
    assert record["remedies"] == [str(remedy) for remedy in expected]
    assert record["message"].endswith(f"{expected[0]}; {expected[1]}.")


def test_no_more_steps_for_samples_that_lie_above_the_data():
    for shift, expected in ((9.0, (R.MORE_STEPS,)), (-9.0, ())):
        assert advised(advising({0: (R.MORE_STEPS,)}), 1, shift) == [expected]


@pytest.mark.parametrize(
    ("beta_star", "expected"),
    [
        (None, [(R.RAISE_BETA,), (R.LOWER_LR,), (R.RAISE_BETA,)]),
        (lambda t: 0.5 if t < 2 else 1.0, [(R.RAISE_BETA,), (R.LOWER_BETA, R.LOWER_LR), ()]),
        # By a hundredth only.
        (lambda step: 0.5 + 0.002 * step, [(R.RAISE_BETA,), (R.LOWER_LR,), (R.RAISE_BETA,)]),
    ],
)
def test_no_advice_contradicts_another_until_the_run_changes(beta_star, expected):
    options = {"beta_star": 0.5 if beta_star is None else beta_star}
    assert advised(advising(UP_AND_DOWN, **options)) == expected
    # Through a checkpoint.
    first, second = (advising(UP_AND_DOWN, **options) for _ in range(2))
    before = advised(first, 1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + advised(second, 3) == expected


def test_a_rate_that_changes_is_a_change_and_a_guard_that_rolls_back_does_not_say_so():
    slope = torch.nn.Linear(2, 1)
    slope.weight.data.fill_(9.0)  # data lie above the negatives
    training = Training(f=slope, action="warn")
    Advising(UP_AND_DOWN).watches(training.g)
    training.go()
    training.optimizer.param_groups[0]["lr"] = 0.001
    training.go(3)
    found = [alert.remedies for alert in training.g.alerts]
    assert found == [(R.RAISE_BETA,), (R.LOWER_BETA, R.LOWER_LR), ()]
    rolls_back = Training(f=slope, action="rollback")
    Advising({0: LONG}).watches(rolls_back.g)
    rolls_back.go()
    assert rolls_back.g.alerts[0].remedies == (R.RAISE_BETA, R.LOWER_LR)


def test_members_are_advised_apart():
    """At 0 there is nothing to lower; the other may do so, and is not told both."""
    g = guard(None, None, beta_star=torch.tensor([0.0, 2.0]))
    Advising({0: (R.LOWER_BETA, R.RAISE_BETA)}, members=(0, 1)).watches(g)
    g.loss_fn(torch.randn(2, 4), torch.randn(2, 4))
    assert [alert.remedies for alert in g.alerts] == [(R.RAISE_BETA,), (R.LOWER_BETA,)]
