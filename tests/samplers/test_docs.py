"""The program of docs/samplers.md about samplers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

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
