"""The script for several ranks in docs/frameworks.md runs."""

from __future__ import annotations

import re
from pathlib import Path

from tests import forks
from tests.ranks import torchrun

PAGE = (forks.ROOT / "docs" / "frameworks.md").read_text()
PAGE = PAGE.split("\n## Several ranks\n")[1].split("\n## ")[0]
(SCRIPT,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def printed(source: str, file: Path) -> list[float]:
    """The numbers that two ranks print; torchrun itself starts an example's."""
    file.write_text(source)
    # Gloo writes lines of its own to the same place in some versions.
    found = re.search(r"^GradScale (\S+), energy gap (\S+)$", torchrun(str(file)), re.MULTILINE)
    assert found
    return [float(number) for number in found.groups()]


def test_the_page_runs(tmp_path):
    grad_scale, _ = printed(SCRIPT, tmp_path / "ddp.py")
    assert 0.5 < grad_scale < 1
