"""Every refusal of energies, exponents and groups says what was wrong and what to do."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch

from ebmguard import guard
from ebmguard.energies import check_energies
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
        "exponent of an ensemble": (
            {"beta_star": torch.ones(2)},
            "beta_star has shape (2,); expected a number or a 0-dim tensor, since there is one",
        ),
        "one positive": ({"f_pos": F4[:1], "variant": "true"}, "needs at least two; got one"),
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
        "variant a number": ({"variant": 3}, "variant=3; expected one of default, no_pos"),
        "groups of batch": (
            {"variant": "batch", "groups": PAIR},
            'groups are defined for variant="default" and "no_pos", not for \'batch\'',
        ),
        "groups of true": ({"variant": "true", "groups": PAIR}, "not for 'true'"),
        "log-density at exponent 0": (
            {"log_q": (F4, F3), "beta_star": 0.0},
            "with beta_star = 0 there are none. Pass beta_star=",
        ),
        "exponent a string": ({"beta_star": "0.5"}, "beta_star='0.5'; expected a"),
        "exponent None": ({"beta_star": None}, "beta_star=None; expected a"),
        "exponent NaN": ({"beta_star": float("nan")}, "expected a finite number"),
        "exponent infinite": ({"beta_star": float("inf")}, "beta_star=inf"),
        "exponents": ({"beta_star": [0.5, 1.0]}, "expected a finite number or a 0-dim tensor"),
        "exponent beyond floats": ({"beta_star": 10**400}, "is beyond any float; expected a"),
        "exponent beyond print": ({"beta_star": -(10**5000)}, "is beyond any float; expected a"),
        "fraction beyond floats": ({"beta_star": Fraction(10**5000)}, "is beyond any float"),
        "exponent without a value": (
            {"beta_star": torch.zeros((), device="meta")},
            "beta_star is on the device meta",
        ),
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


@pytest.mark.parametrize(
    ("pos", "neg", "groups", "message"),
    [
        (F4, F3, "rows", "shapes (4,) of positives and (3,) of negatives; expected (N,) or (N, 1)"),
        (F4, torch.zeros(3, 5), "rows", "in row i the M negatives of positive i"),
        (F4.reshape(4, 1), torch.zeros(4, 5, 1), "rows", "expected (N,) or (N, 1), and (N, M)"),
        (F4.mean(), torch.zeros(4, 5), "rows", "shapes () of positives"),
        (F4, torch.zeros(4, 5), "row", "groups='row'; expected \"rows\", or tensors of labels"),
        (F4, torch.zeros(4, 5), None, 'f(x, y), pass groups="rows"'),
        (F4[:, None], torch.zeros(4, 5), None, 'f(x, y), pass groups="rows"'),
    ],
)
def test_rows_are_refused_with_their_message(pos, neg, groups, message):
    guarded = guard(None, None, beta_star=0.5)
    of_functions = partial(contrastive_loss, beta_star=0.5), partial(coefficients, beta_star=0.5)
    for function in (*of_functions, guarded.loss, guarded.reweight):
        with pytest.raises(ShapeError) as caught:
            function(pos, neg, groups=groups)
        assert message in str(caught.value)


def test_errors_are_the_built_in_ones_that_callers_expect():
    assert issubclass(ShapeError, ValueError)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(EnergyTypeError, TypeError)


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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ["f_pos", "f_neg", "beta_star", "log_q", "groups"])
def test_nested_and_sparse_tensors_are_refused_anywhere(name):
    nested = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(4)])
    for x, kind in ((nested, "nested"), (torch.ones(4).to_sparse(), "sparse_coo")):
        part = (x, x) if name in ("log_q", "groups") else x
        call: dict[str, Any] = {"f_pos": F4, "f_neg": F3, "beta_star": 1.0, name: part}
        with pytest.raises(EnergyTypeError, match=f"is .*{kind}, with which little"):
            check_energies(**call)


def test_an_exponent_is_any_number_of_python():
    for f in (F4 + torch.arange(4.0), torch.zeros(4).double()):
        exponents: tuple[Any, ...] = Fraction(1, 2), 10**30
        half, large = (contrastive_loss(f, F3.to(f), x) for x in exponents)
        assert half.equal(contrastive_loss(f, F3.to(f), 0.5))
        assert large.equal(contrastive_loss(f, F3.to(f), 1e30))
