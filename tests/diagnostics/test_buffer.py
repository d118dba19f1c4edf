"""What a buffer says of its draws, whoever has written it."""

from __future__ import annotations

import pytest
import torch

from ebmguard.diagnostics import buffer_diagnostics
from ebmguard.errors import ConfigError


class Answers:
    def __init__(self, answer):
        self.answer = answer

    def diagnostics(self):
        return self.answer


def test_numbers_are_taken_over_detached():
    age = torch.tensor(3.0, requires_grad=True)
    found = buffer_diagnostics(Answers({"age": age, "full": torch.tensor(7)}))
    assert {name: x.item() for name, x in found.items()} == {"buffer/age": 3.0, "buffer/full": 7}
    assert not found["buffer/age"].requires_grad


class Silent:
    diagnostics = "not a method"


@pytest.mark.parametrize("buffer", [None, torch.zeros(3), [torch.zeros(3)], object(), Silent()])
def test_nothing_is_known_of_others(buffer):
    assert buffer_diagnostics(buffer) == {}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"Answers\.diagnostics\(\) returned a NoneType; expected 0-dim tensors"),
        ({"age": 3.0}, "has a float under 'age'"),
        ({"age": torch.zeros(2)}, r"shape \(2,\) and torch.float32 under 'age'"),
        ({"age": torch.tensor(1j)}, "torch.complex64"),
        ({"full": torch.tensor(True)}, "torch.bool"),
    ],
)
def test_what_cannot_be_a_row_is_refused(answer, message):
    with pytest.raises(ConfigError, match=message):
        buffer_diagnostics(Answers(answer))
