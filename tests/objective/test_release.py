"""What release 0.1.0 computed, frozen as numbers: its formulas, to the rounding of each dtype.

`release.json` was written once, by the functions of commit d74538f in float64, with 15 digits. Of a
batch it has `f_pos`, `f_neg` and, where there are, `groups` and `log_q`. A row of it has β*, and
the form of β* that it holds for: a number, a 0-dim tensor, or both; the weights, GradScale and, for
each variant, [loss, gradient to f_pos, gradient to f_neg]; all heads of a sample have the same.
`coefficients` stands where they are not the gradient: a sample that is not usable spoils the loss
of β* = 0 given as a number, which hides nothing, and has no coefficient. Weights are missing where
those of the release did not keep to the policy: at β* = 0 they took energies beyond 1e30.

The inputs are multiples of powers of two, so that float32 holds the same energies as float64 does.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ebmguard.objective import (
    coefficients,
    contrastive_loss,
    grad_scale,
    positive_weights,
    weights,
)
from tests.objective.oracles import VARIANTS

RELEASE: dict[str, Any] = json.loads(Path(__file__).with_name("release.json").read_text())


def spread(*sides: list[Any]) -> float:
    """Of the numbers that count."""
    each = torch.cat([torch.tensor(side, dtype=torch.float64).flatten() for side in sides])
    kept = each[each.abs() <= 1e30]
    return (kept.max() - kept.min()).item() if len(kept) else 0.0


class Close:
    """Whether numbers are the frozen ones, up to a rounding that follows from dtype and sizes.

    An exponent that counts is at most as large as the logarithm of the smallest number, and each of
    some four operations rounds it relative to its size. So exact are weights, gradients and the
    loss of "default", a mean of positive costs; the others' are sums of costs of either sign, each
    times its slope.
    """

    def __init__(
        self, batch: dict[str, Any], beta_star: float | Tensor, dtype: torch.dtype
    ) -> None:
        info, beta = torch.finfo(dtype), float(beta_star)
        self.dtype = dtype
        self.rtol = -4 * info.eps * math.log(info.tiny)
        # A gradient passes through slope / β*, which may be lost below the smallest number.
        self.least = info.tiny * max(1.0, abs(beta))
        sides = batch["f_pos"], batch["f_neg"]
        count = len(sides[0]) + len(sides[1])
        if abs(beta) < 1e-35:
            # The caller's own loss, of a number, is not relative to any of the energies.
            cost = spread(*sides, *([[0.0]] if isinstance(beta_star, float) else []))
        else:
            scales = batch["groups"][2] if len(batch.get("groups", ())) == 3 else [1.0]
            of_weights = math.log(count) + spread(*batch.get("log_q", [[0.0]]))
            cost = spread(*sides) + of_weights / (abs(beta) * min(scales))
        self.of_costs = info.eps * count * cost

    def __call__(self, found: Tensor, frozen: Any, slopes: float = 0.0) -> bool:
        expected = torch.tensor(frozen, dtype=torch.float64)
        return (
            found.dtype == self.dtype
            and found.shape == expected.shape
            and torch.allclose(
                found.detach().double(),
                expected,
                rtol=self.rtol,
                atol=self.least + slopes * self.of_costs,
                equal_nan=True,
            )
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", RELEASE)
def test_values(name: str, dtype: torch.dtype) -> None:
    batch = RELEASE[name]
    f_pos = torch.tensor(batch["f_pos"], dtype=dtype).requires_grad_()
    f_neg = torch.tensor(batch["f_neg"], dtype=dtype).requires_grad_()
    options: dict[str, Any] = {}
    of_neg: dict[str, Any] = {}
    if "log_q" in batch:
        options["log_q"] = tuple(torch.tensor(q, dtype=dtype) for q in batch["log_q"])
        of_neg["log_q"] = options["log_q"][1]
    of_pos = dict(options)
    if "groups" in batch:
        options["groups"] = tuple(map(torch.tensor, batch["groups"]))
    for row in batch["rows"]:
        value: float = row["beta_star"]
        forms: dict[str, float | Tensor] = {
            "number": value,
            "tensor": torch.tensor(value, dtype=dtype),
        }
        for form in forms if row["as"] == "both" else [row["as"]]:
            beta = forms[form]
            close = Close(batch, beta, dtype)
            if "weights" in row:
                assert close(weights(f_neg, beta, **of_neg), row["weights"]), beta
                found = positive_weights(f_pos, f_neg, beta, **of_pos)
                assert close(found, row["positive_weights"]), beta
                assert close(grad_scale(f_pos, f_neg, beta, **of_pos), row["grad_scale"]), beta
            for variant in (each for each in VARIANTS if each in row):
                at = f"{variant}, beta_star={beta!r}"
                right, *sides = row[variant]
                is_signed = variant != "default" or abs(value) < 1e-35
                loss = contrastive_loss(f_pos, f_neg, beta, variant=variant, **options)
                assert close(loss, right, sum(map(abs, sides[0])) if is_signed else 0.0), at
                for slopes, side in zip(
                    torch.autograd.grad(loss, (f_pos, f_neg)), sides, strict=True
                ):
                    heads = slopes.reshape(len(side), -1).T
                    assert all(close(head, side) for head in heads), at
                closed = coefficients(f_pos, f_neg, beta, variant=variant, **options)
                for found, side in zip(closed, row.get("coefficients", sides), strict=True):
                    assert close(found, side), at
