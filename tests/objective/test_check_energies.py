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

# What is said: what is not as in a call that is accepted.
REFUSED: dict[type[Exception], dict[str, dict[str, Any]]] = {
    EnergyTypeError: {
        "f_pos is of type list; expected a tensor": {"f_pos": [0.0, 1.0]},
        "f_neg is of type float; expected a tensor": {"f_neg": 1.5},
        "f_pos has dtype torch.int64; energies must": {"f_pos": F4.long()},
        "f_neg has dtype torch.bool": {"f_neg": F3.bool()},
        "Pass the network's raw output, not labels": {"f_neg": F3 * 1j},
        "log_q_pos is list; expected a floating-point tensor": {"log_q": ([0.0] * 4, F3)},
        "log_q_pos is torch.int64; expected a floating-point tensor": {"log_q": (Y4, F3)},
        "the output scales have dtype torch.int64; expected floating point": {
            "groups": (Y4, Y3, Y4)
        },
    },
    ShapeError: {
        "f_pos is a single number, probably a": {"f_pos": F4.mean()},
        "Pass the vector before `.mean()`": {"f_neg": F3.mean()},
        "f_pos has shape (0,): it holds no sample": {"f_pos": F4[:0]},
        "f_neg has shape (0,): it holds no sample": {"f_neg": F3[:0]},
        "(4, 0): it holds no sample": {"f_pos": F4.reshape(4, 1)[:, :0]},
        "f_pos has shape (4, 1) and f_neg": {"f_pos": F4.reshape(4, 1)},
        "would broadcast to a matrix": {"f_neg": F4.reshape(4, 1)},
        "Squeeze or index the extra dimension of one of them": {
            "f_pos": F4.reshape(2, 2),
            "f_neg": F3.reshape(1, 3),
        },
        "f_pos is on cpu and f_neg on meta": {"f_neg": F3.to("meta")},
        "beta_star has shape (2,); expected a number or a 0-dim tensor, since there is one": {
            "beta_star": torch.ones(2)
        },
        "needs at least two; got one": {"f_pos": F4[:1], "variant": "true"},
        "must be a pair (y_pos, y_neg)": {"groups": (Y4,)},
        "must be a pair (y_pos, y_neg) of tensors": {"groups": ([0] * 4, [0] * 3)},
        "groups: y_pos has shape (3,); expected (4,), one label per sample": {"groups": (Y3, Y4)},
        "groups: scale has shape (3,); expected (4,), one number per sample": {
            "groups": (Y4, Y3, F3)
        },
        "groups: y_neg has shape (3, 10); expected (3,)": {"groups": (Y4, torch.zeros(3, 10))},
        "log_q must be a pair": {"log_q": F4},
        "log_q must be a pair (log_q_pos, log_q_neg)": {"log_q": (F4,)},
        "log_q_pos has shape (3,); expected (4,), one log-density per sample": {"log_q": (F3, F4)},
        "log_q_neg has shape (3, 1); expected (3,)": {"log_q": (F4, F3.unsqueeze(1))},
        "shape (4, 2); expected (4,), one log-density per sample: log q(x), summed": {
            "f_pos": torch.zeros(4, 2),
            "f_neg": torch.zeros(3, 2),
            "log_q": (torch.zeros(4, 2), F3),
        },
        "log_q_neg is on meta and the energies on cpu": {
            "log_q": (F4, torch.zeros(3, device="meta"))
        },
    },
    ConfigError: {
        "variant='nopos'; expected one of default, no_pos, batch, true": {"variant": "nopos"},
        "variant=3; expected one of default, no_pos": {"variant": 3},
        'groups are defined for variant="default" and "no_pos", not for \'batch\'': {
            "variant": "batch",
            "groups": PAIR,
        },
        "not for 'true'": {"variant": "true", "groups": PAIR},
        "with beta_star = 0 there are none. Pass beta_star=": {"log_q": (F4, F3), "beta_star": 0.0},
        "beta_star='0.5'; expected a": {"beta_star": "0.5"},
        "beta_star=None; expected a": {"beta_star": None},
        "expected a finite number": {"beta_star": float("nan")},
        "beta_star=inf": {"beta_star": float("inf")},
        "expected a finite number or a 0-dim tensor": {"beta_star": [0.5, 1.0]},
        "is beyond any float; expected a": {"beta_star": -(10**5000)},
        "is beyond any float": {"beta_star": Fraction(10**5000)},
        "beta_star is on the device meta": {"beta_star": torch.zeros((), device="meta")},
    },
}


@pytest.mark.parametrize(
    ("error", "message"), [(error, said) for error, rows in REFUSED.items() for said in rows]
)
def test_refused_with_its_message(error, message):
    change = REFUSED[error][message]
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
