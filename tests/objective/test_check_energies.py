"""Every refusal of energies, exponents and groups says what was wrong and what to do."""

from __future__ import annotations

import numbers
from fractions import Fraction
from typing import Any

import pytest
import torch

from ebmguard.energies import check_energies, model_dimensions
from ebmguard.errors import ConfigError, EbmguardError, EnergyTypeError, ShapeError
from ebmguard.objective import (
    coefficients,
    contrastive_loss,
    grad_scale,
    positive_weights,
    weights,
)

F4, F3 = torch.zeros(4), torch.zeros(3)
Y4, Y3 = torch.zeros(4, dtype=torch.long), torch.zeros(3, dtype=torch.long)
PAIR = (Y4, Y3)

# error: {name: (what is not as in a call that is accepted, part of the message)}
REFUSED: dict[type[Exception], dict[str, tuple[dict[str, Any], str]]] = {
    EnergyTypeError: {
        "list": ({"f_pos": [0.0, 1.0]}, "f_pos is of type list; expected a tensor"),
        "float": ({"f_neg": 1.5}, "f_neg is of type float; expected a tensor"),
        "integers": ({"f_pos": F4.long()}, "f_pos has dtype torch.int64; energies must"),
        "booleans": ({"f_neg": F3.bool()}, "f_neg has dtype torch.bool"),
        "complex": ({"f_neg": F3 * 1j}, "Pass the network's raw output, not labels"),
        "log-density a list": (
            {"log_q": ([0.0] * 4, F3)},
            "log_q_pos is list; expected a floating-point tensor",
        ),
        "log-density of integers": (
            {"log_q": (Y4, F3)},
            "log_q_pos is torch.int64; expected a floating-point tensor",
        ),
        "output scales of integers": (
            {"groups": (Y4, Y3, Y4)},
            "the output scales have dtype torch.int64; expected floating point",
        ),
    },
    ShapeError: {
        "mean of positives": ({"f_pos": F4.mean()}, "f_pos is a single number, probably a"),
        "mean of negatives": ({"f_neg": F3.mean()}, "Pass the vector before `.mean()`"),
        "no positives": ({"f_pos": F4[:0]}, r"f_pos has shape (0,): it holds no sample"),
        "no negatives": ({"f_neg": F3[:0]}, r"f_neg has shape (0,): it holds no sample"),
        "no heads": ({"f_pos": F4.reshape(4, 1)[:, :0]}, "(4, 0): it holds no sample"),
        "column and row": ({"f_pos": F4.reshape(4, 1)}, "f_pos has shape (4, 1) and f_neg"),
        "row and column": ({"f_neg": F4.reshape(4, 1)}, "would broadcast to a matrix"),
        "other heads": (
            {"f_pos": F4.reshape(2, 2), "f_neg": F3.reshape(1, 3)},
            "Squeeze or index the extra dimension of one of them",
        ),
        "devices": ({"f_neg": F3.to("meta")}, "f_pos is on cpu and f_neg on meta"),
        "models missing": (
            {"beta_star": torch.ones(2)},
            "beta_star has model dimensions (2,), so f_pos must have shape (2, samples); got (4,)",
        ),
        "models differ": (
            {"f_pos": torch.zeros(2, 4), "f_neg": torch.zeros(3, 4), "beta_star": torch.ones(2)},
            "f_neg must have shape (2, samples); got (3, 4)",
        ),
        "models and heads": (
            {
                "f_pos": torch.zeros(2, 4, 1),
                "f_neg": torch.zeros(2, 4, 1),
                "beta_star": torch.ones(2),
            },
            "got (2, 4, 1)",
        ),
        "two model dimensions": (
            {"f_pos": torch.zeros(6, 4), "f_neg": torch.zeros(6, 4), "beta_star": torch.ones(2, 3)},
            "must have shape (2, 3, samples); got (6, 4)",
        ),
        "one positive": ({"f_pos": F4[:1], "variant": "true"}, "needs at least two; got one"),
        "one positive of two models": (
            {
                "f_pos": torch.zeros(2, 1),
                "f_neg": torch.zeros(2, 3),
                "variant": "true",
                "beta_star": torch.ones(2),
            },
            "needs at least two; got one",
        ),
        "one label vector": ({"groups": (Y4,)}, "must be a pair (y_pos, y_neg)"),
        "labels as lists": (
            {"groups": ([0] * 4, [0] * 3)},
            "must be a pair (y_pos, y_neg) of tensors",
        ),
        "labels swapped": (
            {"groups": (Y3, Y4)},
            "groups: y_pos has shape (3,); expected (4,), one label per sample",
        ),
        "output scales of the negatives": (
            {"groups": (Y4, Y3, F3)},
            "groups: scale has shape (3,); expected (4,), one number per sample",
        ),
        "one-hot labels": (
            {"groups": (Y4, torch.zeros(3, 10))},
            "groups: y_neg has shape (3, 10); expected (3,)",
        ),
        "one log-density vector": ({"log_q": F4}, "must be a pair (log_q_pos, lo"),
        "log-densities in one": ({"log_q": (F4,)}, "must be a pair (log_q_pos, "),
        "log-densities swapped": (
            {"log_q": (F3, F4)},
            "log_q_pos has shape (3,); expected (4,), one log-density per sample",
        ),
        "log-density as a column": (
            {"log_q": (F4, F3.unsqueeze(1))},
            "log_q_neg has shape (3, 1); expected (3,)",
        ),
        "log-density of each dimension": (
            {
                "f_pos": torch.zeros(4, 2),
                "f_neg": torch.zeros(3, 2),
                "log_q": (torch.zeros(4, 2), F3),
            },
            "shape (4, 2); expected (4,), one log-density per sample: log q(x), summed",
        ),
        "log-density that models share": (
            {
                "f_pos": torch.zeros(2, 4),
                "f_neg": torch.zeros(2, 3),
                "log_q": (F4, F3),
                "beta_star": torch.ones(2),
            },
            "log_q_pos has shape (4,); expected (2, 4)",
        ),
        "log-density on another device": (
            {"log_q": (F4, torch.zeros(3, device="meta"))},
            "log_q_neg is on meta and the energies on cpu",
        ),
    },
    ConfigError: {
        "variant": (
            {"variant": "nopos"},
            "variant='nopos'; expected one of default, no_pos, batch, true",
        ),
        "reduce": ({"reduce": "max"}, "reduce='max'; expected one of sum, mean"),
        "groups of batch": (
            {"variant": "batch", "groups": PAIR},
            'groups are defined for variant="default" and "no_pos", not for \'batch\'',
        ),
        "groups of true": ({"variant": "true", "groups": PAIR}, "not for 'true'"),
        "log-density at exponent 0": (
            {"log_q": (F4, F3), "beta_star": 0.0},
            "with beta_star = 0 there are none. Pass beta_star=",
        ),
        "log-density with a 0 among the exponents": (
            {"log_q": (F4, F3), "beta_star": [0.5, 0]},
            "with beta_star = 0 there are none",
        ),
        "exponent a string": ({"beta_star": "0.5"}, "beta_star='0.5'; expected a"),
        "exponent None": ({"beta_star": None}, "beta_star=None; expected a"),
        "exponent NaN": ({"beta_star": float("nan")}, "expected a finite number"),
        "exponent infinite": ({"beta_star": float("inf")}, "beta_star=inf"),
        "exponents empty": ({"beta_star": []}, "with at least one entry"),
        "exponents with a string": ({"beta_star": [0.5, "1"]}, "beta_star='1'"),
        "exponents with NaN": ({"beta_star": [0.5, float("nan")]}, "=nan"),
    },
}


@pytest.mark.parametrize(
    ("error", "change", "message"),
    [
        pytest.param(error, *row, id=name)
        for error, rows in REFUSED.items()
        for name, row in rows.items()
    ],
)
def test_refused_with_its_message(error, change, message):
    call = {"f_pos": F4, "f_neg": F3, "beta_star": 1.0, **change}
    for function in (check_energies, contrastive_loss, coefficients):
        with pytest.raises(error) as caught:
            function(**call)
        assert message in str(caught.value)
        assert isinstance(caught.value, EbmguardError)


def test_errors_are_the_built_in_ones_that_callers_expect():
    assert issubclass(ShapeError, ValueError)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(EnergyTypeError, TypeError)


@pytest.mark.parametrize(
    "beta_star",
    [0, 1, -0.5, Fraction(1, 2), torch.tensor(0.5), torch.tensor(2), [0.5, 1], (0.0,)],
    ids=str,
)
def test_accepted_exponents(beta_star):
    check_energies(F4, F3, beta_star)
    if not isinstance(beta_star, numbers.Rational):
        assert contrastive_loss(F4, F3, beta_star).isfinite()


@pytest.mark.parametrize("heads", [(), (1,), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_accepted_energies(heads, dtype):
    pos, neg = torch.zeros(4, *heads, dtype=dtype), torch.zeros(3, *heads, dtype=dtype)
    check_energies(pos, neg, 0.5, groups=(Y4, Y3))
    if not heads:
        check_energies(pos.expand(2, 4), neg.expand(2, 3), torch.ones(2))


def test_reads_no_value():
    meta = torch.zeros(4, device="meta")
    check_energies(meta, meta, torch.tensor(0.5, device="meta"), variant="true")


def test_weights_and_grad_scale_refuse_log_densities_that_do_not_match():
    for function in (positive_weights, grad_scale):
        with pytest.raises(ShapeError, match="log_q_neg has shape"):
            function(F4, F3, 0.5, log_q=(F4, F4))
        with pytest.raises(ConfigError, match="with beta_star = 0 there are none"):
            function(F4, F3, 0.0, log_q=(F4, F3))
    with pytest.raises(ShapeError, match=r"log_q has shape \(4,\); expected \(3,\)"):
        weights(F3, 0.5, log_q=F4)
    with pytest.raises(ConfigError, match="with beta_star = 0 there are none"):
        weights(F3, 0, log_q=F3)


@pytest.mark.parametrize(
    ("beta_star", "variant"),
    [
        (0.5, "default"),
        (0.0, "no_pos"),
        ([0.5, 1.0, 2.0], "true"),
        (torch.ones(4), ["default", "batch", "batch", "true"]),
        ([torch.ones(4), 0.5], ["default", "batch", "batch", "true"]),
    ],
    ids=str,
)
def test_each_call_checks_its_energies_once(monkeypatch, beta_star, variant):
    asked = []
    monkeypatch.setattr(
        "ebmguard.objective.losses.check_energies", lambda *args, **_: asked.append(args)
    )
    models = model_dimensions(beta_star)
    for calls, function in enumerate((contrastive_loss, coefficients), 1):
        function(torch.zeros(*models, 5), torch.zeros(*models, 3), beta_star, variant=variant)
        assert len(asked) == calls
