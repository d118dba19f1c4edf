"""Several samplers, one set of negatives."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ebmguard.alerts import Bound, Remedies
from ebmguard.errors import ConfigError, SamplerError
from ebmguard.samplers import Mixture
from tests.parts import Bowl, gradient_at


def test_samples_stand_side_by_side_in_the_order_of_their_samplers():
    given: list[object] = []

    def sampler(name, size, value):
        def sample(*args, **kwargs):
            given.append((name, args, kwargs))
            return torch.full((size, 2), value)

        return sample

    mixture = Mixture({"b": sampler("b", 3, 1.0), "a": sampler("a", 2, 2.0)})
    assert mixture.parts == {}
    x = mixture("f", y=7)
    assert given == [("b", ("f",), {"y": 7}), ("a", ("f",), {"y": 7})]
    assert mixture.parts == {"b": slice(0, 3), "a": slice(3, 5)}
    assert torch.equal(x[:, 0], torch.tensor([1.0, 1.0, 1.0, 2.0, 2.0]))


def test_ensembles_join_along_their_batch_dimension():
    parts = {str(n): torch.randn(4, n, 2) for n in (3, 0, 5)}
    mixture = Mixture({name: partial(torch.clone, x) for name, x in parts.items()}, dim=1)
    x = mixture()
    assert x.shape == (4, 8, 2)
    for name, part in parts.items():
        assert torch.equal(x[:, mixture.parts[name]], part)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (None, "'b' returned a NoneType; expected one tensor"),
        (torch.tensor(1.0), r"shape \(\) .*, which has no dimension 0"),
        (torch.zeros(2, 4), r"'b' returned samples of shape \(2, 4\) .*'a' .*\(5, 3\)"),
        (torch.zeros(2, 3, device="meta"), "torch.float32 on meta"),
    ],
)
def test_refuses_samples_that_do_not_fit(second, message):
    """The parts of the call before stay."""
    answers = iter([torch.zeros(1, 3), second])
    mixture = Mixture({"a": lambda: torch.zeros(5, 3), "b": lambda: next(answers)})
    mixture()
    before = mixture.parts
    with pytest.raises(SamplerError, match=message):
        mixture()
    assert mixture.parts is before == {"a": slice(0, 5), "b": slice(5, 6)}


@pytest.mark.parametrize(
    ("samplers", "dim", "message"),
    [
        ({}, 0, "at least one sampler"),
        ({"": gradient_at}, 0, "'' is no name"),
        ({"a": Bowl().height}, 0, "'a' is a Parameter, which cannot be called"),
        ({"a": gradient_at}, -2, "dim is -2"),
    ],
)
def test_refuses_samplers(samplers, dim, message):
    with pytest.raises(ConfigError, match=message):
        Mixture(samplers, dim=dim)


@pytest.mark.parametrize("tag", ["mixture/a/weight", "ref/mixture/a/weight"])
def test_a_rule_on_numbers_that_rows_no_longer_have_is_refused(tag):
    with pytest.raises(ConfigError, match=r"Sum ebmguard\.objective\.weights.*Mixture\.parts"):
        Bound(tag, "below", 0.1, 5, Remedies((), (), ()))


# -- the program of docs/samplers.md ---------------------------------------------------------------


PAGE = (Path(__file__).parents[2] / "docs" / "samplers.md").read_text()
PAGE = PAGE.split("\n## Samplers\n")[1].split("\n## ")[0]


def test_the_page_runs_from_top_to_bottom(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    exec("\n".join(blocks), names)
    # What the page says of it.
    printed = capsys.readouterr().out.splitlines()[0]
    assert f"# {printed}" in PAGE
    acceptance = torch.stack(names["acceptance"])
    assert acceptance[0] > 0.99
    assert acceptance[1800:2000].mean().item() == pytest.approx(0.98, abs=0.01)  # of the first loop
    assert acceptance[-200:].mean().item() == pytest.approx(0.95, abs=0.02)
    f, sample_q = names["f"], names["sample_q"]
    with torch.no_grad():
        f_pos, f_neg = f(names["data"](1000)), f(sample_q(f))
    weights = (0.5 * f_neg).softmax(0)
    assert 0.6 < weights[sample_q.parts["buffer"]].sum() < 0.9
    gaps = {name: f_pos.mean() - f_neg[part].mean() for name, part in sample_q.parts.items()}
    assert gaps["noise"] > 4 * gaps["buffer"]
