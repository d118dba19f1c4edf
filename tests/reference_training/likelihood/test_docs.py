"""The programs of docs/samplers.md about likelihoods."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

PAGE = (Path(__file__).parents[3] / "docs" / "samplers.md").read_text()
PAGE = PAGE.split("\n## Likelihoods\n")[1]


def test_the_page_runs_from_top_to_bottom(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    exec("\n".join(blocks), names)
    # What the page says of it, but for the last digits: another machine may sum in another order.
    printed = capsys.readouterr().out.splitlines()
    told = re.findall(r"^# (.*)$", blocks[0], flags=re.MULTILINE)
    words = [re.sub(r"[-\d.]+", "", line) for line in printed]
    assert words == [re.sub(r"[-\d.]+", "", line) for line in told]
    found, left = names["found"], names["left"]
    assert found.lower < 2.531 < found.upper
    assert left.problems
    torch.testing.assert_close(
        (names["f_neg"] - names["negatives"].log_q).softmax(0),
        names["negatives"].weights,
        check_dtype=False,
        rtol=1e-4,
        atol=1e-6,
    )
    assert torch.isfinite(names["loss"])
