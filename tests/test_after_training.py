"""The code of docs/after.md runs, behind the ring of the examples, and does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "after.md").read_text()
RING = (ROOT / "examples" / "ring.py").read_text()


@pytest.fixture
def names(tmp_path, monkeypatch) -> dict[str, Any]:
    """What the ring leaves behind, after a few updates."""
    monkeypatch.chdir(tmp_path)
    ring: dict[str, Any] = {}
    exec(re.sub(r"\b1000\b|\b1001\b", "30", RING), ring)
    return ring


def test_the_page_runs_from_top_to_bottom(names):
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 8
    names["g"].last.setdefault("sampler/substeps", 1)
    rows = names["g"].step
    # Few chains and steps are enough here.
    code = "\n".join(blocks).replace("200", "5")
    exec(code, names)
    assert names["g"].step == rows
    assert names["resampled"].shape == (64, 2)
    assert torch.isfinite(names["held_out"])
    assert {*names["parts"]} == {"model", "optimizer", "chains", "rng", "guard"}
    assert Path("energy.pt").is_file()


def test_the_network_is_the_unguarded_one_and_original_takes_your_own_steps(names):
    layers = [f"{i}.{part}" for i in (0, 2, 4) for part in ("weight", "bias")]
    assert [*names["energy"].state_dict()] == layers
    assert names["sample"].original is names["langevin"]
    start = torch.zeros(8, 2)
    torch.manual_seed(1)
    expected = names["langevin"](names["energy"], start)
    with names["g"].paused():
        torch.manual_seed(1)
        assert torch.equal(names["sample"](names["energy"], start), expected)
