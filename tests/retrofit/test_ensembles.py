"""All members of an ensemble at once: each one's loss, numbers and alerts are as if alone."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebmguard import Alert, Guard, Level, contrastive_loss, errors, guard
from ebmguard.alerts import Verdict
from ebmguard.diagnostics import energy_diagnostics
from ebmguard.diagnostics import weight_diagnostics as weights
from ebmguard.energies import Variant
from ebmguard.errors import ConfigError
from tests.parts import Bowls, Memory, gradient_at, slopes

N, M = 16, 14
STARS = [0.5, 0.0, 2.0]
VARIANTS: list[Variant] = ["default", "no_pos", "batch"]
OUTPUT_SCALE = 4.0
CURVATURES = [1.0, 2.0, 3.0]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


# -- the loss and its numbers --------------------------------------------------------------------

REFERENCE = 0.7
LABELS = torch.tensor([0, 1, 2, 0, 1, 3]), torch.tensor([1, 0, 0, 2, 1, 1, 4, 0])
SCALES = torch.tensor([0.25, 3.0, 1.5, 0.25, 3.0, 2.0], dtype=torch.float64)


@pytest.mark.parametrize("models", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": LABELS, "variant": "no_pos"},
        {"groups": (*LABELS, SCALES), "q": True},
        {"variant": "batch", "q": True},
        {"variant": ["default", "true", "no_pos"], "unusable": True},
        {"groups": LABELS},
    ],
    ids=str,
)
def test_equals_a_loop_over_the_models(gradients, models, options):
    stars = torch.tensor([0.5, 0.0, -2.0, 3.0, 1e-36, 0.5], dtype=torch.float64)
    star = stars[: math.prod(models)].reshape(models)
    pos, neg = (torch.randn(*models, n).double().requires_grad_() for n in (6, 8))
    if options.get("unusable"):
        with torch.no_grad():
            neg.flatten()[1], pos.view(-1)[-1] = torch.inf, torch.nan
    groups, variant = options.get("groups"), options.get("variant", "default")
    if isinstance(variant, list) and len(models) != 1:
        variant = "true"
    q = [torch.randn(*models, n).double() for n in (6, 8)] if "q" in options else []
    g = guard(None, None, beta_star=star, variant=variant, reference_beta_star=REFERENCE)
    given: dict[str, Any] = {"groups": groups, "log_q": tuple(q) or None}
    loss = g.loss_fn(pos, neg, **given)
    found = slopes(loss, pos, neg) if "unusable" in options else gradients(g, pos, neg, **given)

    names = variant if isinstance(variant, list) else [variant] * star.numel()
    flat = [x.reshape(star.numel(), *x.shape[len(models) :]) for x in (pos, neg, star, *q)]
    alone = []
    for row, name, p, n, b, *own in zip(g.members or [g.last], names, *flat, strict=True):
        log_q: Any = tuple(own) or None
        alone.append(contrastive_loss(p, n, b, variant=name, groups=groups, log_q=log_q))
        p, n = p.detach(), n.detach()
        expected = energy_diagnostics(p, n)
        # log q belongs to the exponent in force alone.
        for prefix, at, of in (("", b, log_q), ("ref/", REFERENCE, None)):
            expected |= {prefix + tag: x for tag, x in weights(p, n, at, groups, of).items()}
        for tag, x in expected.items():
            assert row[tag] == pytest.approx(x.item(), rel=1e-10, abs=1e-12, nan_ok=True), tag
    total = torch.stack(alone).sum()
    close(loss, total)
    close(found, slopes(total, pos, neg))


def test_a_schedule_keeps_the_model_dimensions_and_a_variant_has_them():
    with pytest.raises(ValueError, match="has 3 names, but beta_star has model dimensions"):
        ensemble(beta_star=torch.ones(2))
    g = guard(None, None, beta_star=lambda step: torch.ones(4 - step))
    pos, neg = torch.randn(4, N), torch.randn(4, M)
    g.loss_fn(pos, neg)
    with pytest.raises(ConfigError, match=r"dimensions \(3,\) at step 1, but \(4,\) at step 0"):
        g.loss_fn(pos, neg)


# -- rows ----------------------------------------------------------------------------------------


def draws(step: int, bad: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Energies of three members, of which the last goes wrong at step 43, and samples."""
    rng = torch.Generator().manual_seed(step)
    pos, neg, x = (
        torch.randn(shape, generator=rng, dtype=torch.float64)
        for shape in ((3, N), (3, M), (3, M, 2))
    )
    if step >= 43:
        pos[2] += bad
    return pos, neg, x


def ensemble(sampler: Any = None, **options: Any) -> Guard:
    star: Any = torch.tensor(STARS, dtype=torch.float64)
    defaults: dict[str, Any] = {"beta_star": star, "variant": VARIANTS}
    return guard(None, sampler, **(defaults | {"output_scale": OUTPUT_SCALE} | options))


def alone(i: int, sampler: Any = None, **options: Any) -> Guard:
    return ensemble(sampler, beta_star=STARS[i], variant=VARIANTS[i], **options)


def attach(g: Guard, kind: str = "sgd") -> torch.optim.Optimizer:
    kinds: Any = {"sgd": torch.optim.SGD, "fused adam": partial(torch.optim.Adam, fused=True)}
    optimizer: torch.optim.Optimizer = kinds[kind]([nn.Parameter(torch.ones(2))], lr=0.1)
    g.attach(optimizer=optimizer)
    return optimizer


def same_row(actual: dict[str, float], expected: dict[str, float]) -> None:
    # The level is of the row as a whole, and is known only when it has been judged.
    actual, expected = (
        {tag: value for tag, value in row.items() if tag != "alert_level"}
        for row in (actual, expected)
    )
    assert actual == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize(("judge_in_loss", "output_scale"), [(True, OUTPUT_SCALE), (False, None)])
def test_rows_of_members_are_those_of_guards_of_single_models(judge_in_loss, output_scale):
    memory = Memory()
    options: dict[str, Any] = {"judge_in_loss": judge_in_loss, "output_scale": output_scale}
    together = ensemble(gradient_at, **options, sinks=[memory])
    singles = [alone(i, gradient_at, **options) for i in range(3)]
    assert together.members == []
    shapes: list[float] = []
    for step in range(54):
        pos, neg, x = draws(step)
        together.sampler(Bowls(torch.tensor(CURVATURES)), x)
        together.loss_fn(pos, neg)
        for i, single in enumerate(singles):
            single.sampler(Bowls(torch.tensor(CURVATURES[i])), x[i])
            single.loss_fn(pos[i], neg[i])
        assert len(together.members) == (3 if judge_in_loss or step > 2 else 0)
        for row, single in zip(together.members, singles, strict=False):
            same_row(row, single.last)
        shapes += [row["ref/pareto_k"] for row in together.members if "ref/pareto_k" in row]
    assert [math.isfinite(k) for k in shapes] == [False] * 3 + [True] * 3
    # What is kept as the row, and what sinks get, are the means.
    together.close()
    rows = [row for _, row in memory.rows]
    same_row(together.last, rows[-1])
    for tag in together.members[0]:
        mean = sum(row[tag] for row in together.members) / 3
        assert rows[-1][tag] == pytest.approx(mean, rel=1e-9, nan_ok=True)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (["theirs"], [0.0, 0.5, 0.0]),
        (["shared"], [0.5, 0.5, 0.5]),
        (["theirs", "good"], [0.0, 0.25, 0.0]),  # samplers of one step are pooled
    ],
)
def test_samples_of_each_member_and_samples_that_all_share(samples, expected):
    x = draws(0)[2]
    x[1, :7] = torch.inf
    kinds = {"theirs": x, "shared": x[1], "good": torch.zeros(4, 2)}
    returned = iter([kinds[name] for name in samples])
    g = ensemble(lambda: next(returned), output_scale=None)
    for _ in samples:
        g.sampler()
    g.loss_fn(*draws(0)[:2])
    assert [row["nonfinite/samples"] for row in g.members] == expected


# -- alerts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "judge_in_loss", "optimizer"),
    [
        (100.0, True, None),
        (100.0, False, "fused adam"),
        (torch.nan, False, "sgd"),
    ],
)
def test_alerts_are_those_of_the_failing_member_alone(judge_in_loss, optimizer, bad):
    memory, told = Memory(), list[Alert]()
    together = ensemble(judge_in_loss=judge_in_loss, sinks=[memory], on_alert=told.append)
    singles = [alone(i, judge_in_loss=judge_in_loss) for i in range(3)]
    optimizers = [attach(g, optimizer) for g in (together, *singles) if optimizer]
    for step in range(60):
        pos, neg, _ = draws(step, bad)
        together.loss_fn(pos, neg)
        for i, single in enumerate(singles):
            single.loss_fn(pos[i], neg[i])
        for each in optimizers:
            each.step()
    for g in (together, *singles):
        g.close()
    assert [single.alerts for single in singles[:2]] == [[], []]
    expected = [replace(alert, member=2) for alert in singles[2].alerts]
    assert expected[0].rule == ("energy_blowup" if bad == 100 else "nonfinite")
    # An ensemble cannot roll back, and is not told to.
    advised = [repr(alert).replace('; action="rollback" next time', "") for alert in expected]
    assert [repr(alert) for alert in together.alerts] == advised
    assert told == together.alerts
    assert [record["member"] for record in memory.alerts] == [2] * len(expected)
    # A member that is lost stays so, whatever the others do.
    first = next(alert.step for alert in expected if alert.level is Level.ERROR)
    lost = [step for step, row in memory.rows if row["alert_level"] == Level.ERROR]
    assert lost == list(range(first, 60))
    assert together.verdict == Verdict("lost", first, expected[0].rule)


def test_any_members_error_raises_and_withholds_the_loss():
    g = ensemble(action="raise")
    optimizer = attach(g)
    for step in range(40, 44):
        pos, neg, _ = draws(step, torch.nan)
        loss = g.loss_fn(pos.requires_grad_(), neg.requires_grad_())
        (slope,) = torch.autograd.grad(loss, pos)
        assert bool(slope.any()) is (step < 43)
        if step < 43:
            optimizer.step()
    with pytest.raises(errors.NonFiniteError, match=r"at step 3, member 2: nonfinite/energies"):
        optimizer.step()


def test_skips_by_the_scaler_are_no_members():
    g = ensemble(judge_in_loss=True)
    optimizer, scaler = attach(g), torch.amp.GradScaler("cpu")
    g.attach(scaler=scaler)
    g.loss_fn(*draws(0)[:2])
    (parameter,) = optimizer.param_groups[0]["params"]
    scaler.scale(torch.inf * parameter.sum()).backward()
    scaler.step(optimizer)
    assert [(alert.rule, alert.level, alert.member) for alert in g.alerts] == [
        ("amp_skip", Level.INFO, None)
    ]
