"""The scripts for several ranks in docs/frameworks.md run, and print the same numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import forks
from tests.ranks import torchrun

PAGE = (forks.ROOT / "docs" / "frameworks.md").read_text()
PAGE = PAGE.split("\n## Several ranks\n")[1].split("\n## ")[0]


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)
    return str(found)


def patched(source: str, diff: str) -> str:
    """The source with each run of removed lines replaced by the added ones that follow it."""
    for removed, added in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)*)", diff, flags=re.MULTILINE):
        old, new = (re.sub(r"^.", "", part, flags=re.MULTILINE) for part in (removed, added))
        assert source.count(old) == 1
        source = source.replace(old, new)
    return source


def printed(source: str, file: Path) -> list[float]:
    """The numbers that two ranks print; torchrun itself starts an example's."""
    file.write_text(source)
    # Gloo writes lines of its own to the same place in some versions.
    found = re.search(r"^GradScale (\S+), energy gap (\S+)$", torchrun(str(file)), re.MULTILINE)
    assert found
    return [float(number) for number in found.groups()]


def test_the_page_runs_with_ddp_and_with_fsdp2(tmp_path):
    script = block("python")
    grad_scale, gap = printed(script, tmp_path / "ddp.py")
    assert 0.5 < grad_scale < 1
    sharded = printed(patched(script, block("diff")), tmp_path / "fsdp.py")
    assert sharded == pytest.approx([grad_scale, gap], abs=2e-4)
