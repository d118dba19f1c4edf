"""Every script of examples/, run in small, and what it says it did. The README's is one of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ebmguard import cli
from ebmguard.sinks import read_jsonl
from tests import forks

EXAMPLES = forks.ROOT / "examples"
README = (forks.ROOT / "README.md").read_text()
START = (forks.ROOT / "docs" / "index.md").read_text()
LONGEST = 60
Start = Callable[..., subprocess.CompletedProcess[str]]


def torchrun(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """What a person types for two ranks."""
    own = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return subprocess.run(
        [sys.executable, *own, *words],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


# Of each script how it is started, its arguments, and what it prints.
TABLE: dict[str, tuple[Start, tuple[str, ...], str]] = {
    "ring": (
        forks.run,
        (),
        r"(step \d+: gap .*\n){5}samples: mean radius (0\.9|1\.[01])\d\n",
    ),
    "jem_digits": (forks.run, ("60",), r"test accuracy \d\d\.\d%, GradScale [01]\.\d\d\n"),
    "images": (forks.run, ("10",), r"healthy; samples.png: two rows of data, four of samples\n"),
    "regression": (
        forks.run,
        ("150",),
        r"KL\(data \|\| model\) 0\.[01]\d\d nats, GradScale 0\.\d\d of 0\.89\n",
    ),
    "saves_itself": (
        forks.run,
        (),
        r"(?s)Rollback 1.*finished at step 500, energy gap \S+\n",
    ),
    "own_rule_and_sink": (forks.run, (), r"(?s)step 0: .*WARN drifting at step \d+\n.*"),
    # Gloo writes lines of its own to the same place in some versions.
    "two_ranks": (
        torchrun,
        ("10",),
        r"(?s)(\[Gloo\].*\n)?2 ranks, 10 steps, GradScale 0\.9\d\d\n",
    ),
    "lightning_ring": (forks.run, ("10",), r"(?s).*GradScale 0\.\d+, energy gap \S+\n"),
    "read_runs": (
        forks.run,
        ("run",),
        r"(?s).*\nrun +0\.5 +0\.9\n.*7 +WARN +overshoot\n",
    ),
}


def run(name: str, folder: Path) -> str:
    start, words, _ = TABLE[name]
    done = start(str(EXAMPLES / f"{name}.py"), *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_script_is_tried_and_short_and_says_what_it_needs():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(TABLE)
    for path in EXAMPLES.glob("*.py"):
        first, *others = path.read_text().splitlines()
        assert 1 + len(others) < LONGEST, path
        assert re.fullmatch(r'""".* [nN]eeds \w.*"""', first), path


def test_the_notebook_has_its_outputs():
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    assert "It needs `pip install" in "".join(cells[0]["source"])
    shown = [output for cell in cells for output in cell.get("outputs", ())]
    (picture,) = [output["data"] for output in shown if output["output_type"] == "display_data"]
    assert "".join(picture["text/html"]).count("<svg") == 2
    assert not [output for output in shown if output["output_type"] == "error"]


@pytest.mark.parametrize("name", [name for name in TABLE if name != "ring"])
def test_runs_and_says_what_it_did(name, tmp_path):
    if name == "lightning_ring":
        pytest.importorskip("lightning")
    if name == "read_runs":
        (tmp_path / "run").mkdir()
        rows = "".join(f'{{"step":{i},"energy_gap":0.5,"grad_scale":0.9}}\n' for i in range(100))
        (tmp_path / "run" / "metrics.jsonl").write_text(rows)
        alert = '{"step":7,"level":"WARN","rule":"overshoot","remedies":["fewer SGLD steps"],'
        alert += '"tag":"energy_overlap","value":1.0,"limit":0.95,"window":50,"message":"m"}\n'
        (tmp_path / "run" / "alerts.jsonl").write_text(alert)
    assert re.fullmatch(TABLE[name][2], run(name, tmp_path))


def test_the_readme_shows_the_ring_and_what_it_prints(tmp_path):
    (code, shown), *_ = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", README, re.DOTALL)
    assert code == (EXAMPLES / "ring.py").read_text()
    printed = run("ring", tmp_path)
    assert re.fullmatch(TABLE["ring"][2], printed)
    numbers = [
        [float(n) for n in re.findall(r"[-\d.]+(?=[,\n])", text)] for text in (printed, shown)
    ]
    # Other instructions round otherwise, and 1,000 steps of Langevin dynamics multiply that.
    assert numbers[0] == pytest.approx(numbers[1], abs=0.6)
    assert re.sub(r"[\d.-]+", "#", printed) == re.sub(r"[\d.-]+", "#", shown)
    rows = read_jsonl(tmp_path / "runs" / "ring" / "metrics.jsonl")
    assert len(rows) == 1000
    assert rows[-1]["energy_gap"] == pytest.approx(numbers[0][-3], abs=0.01)
    assert cli.main(["watch", str(tmp_path / "runs" / "ring"), "--once"]) == 0


def test_every_command_of_the_readme_is_one():
    commands = re.findall(r"^    ebmguard (.+?)(?:  |$)", README + START, re.MULTILINE)
    assert len(commands) > 4
    for command in commands:
        found, taken = cli.find(command.split())
        assert len(found) == 1, command
        assert taken == len(found[0]), command
