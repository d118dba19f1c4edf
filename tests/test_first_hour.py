"""What a newcomer does: a wheel in a fresh environment, and what the README shows, from there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.folders import write

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
START = (ROOT / "docs" / "index.md").read_text()
SOURCES = ("ebmguard", "adapters", "reference_training", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory):
    """A folder with what is published, and an environment with the wheel of it.

    The extra is that of the README's install line.
    """
    folder = tmp_path_factory.mktemp("newcomer")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, source / name)
    pip = ["-m", "pip", "--disable-pip-version-check", "--quiet"]
    # The sdist, and of the sdist the wheel.
    build = [sys.executable, "-m", "build", "--outdir", folder / "dist", source]
    subprocess.run(build, check=True, cwd=folder, capture_output=True)
    shutil.rmtree(source)
    (wheel,) = (folder / "dist").glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    python = folder / "env" / "bin" / "python"
    (extra,) = re.findall(r'^    pip install "\.(\[\w+\])"$', README, re.MULTILINE)
    pinned = ["--no-compile", "-c", str(ROOT / "constraints.txt"), f"{wheel}{extra}"]
    subprocess.run([python, *pip, "install", *pinned], check=True, cwd=folder)
    return folder


def go(folder: Path, *words: str, status: int = 0) -> str:
    """What a command of the environment prints, with its errors where it is to fail."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    environment.pop("PYTHONPATH", None)
    command = [str(folder / "env" / "bin" / words[0]), *words[1:]]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr if status else done.stdout


@pytest.mark.slow
def test_what_is_published_is_as_pypi_wants_it(newcomer):
    files = sorted((newcomer / "dist").iterdir())
    assert [path.suffix for path in files] == [".whl", ".gz"]
    check = [sys.executable, "-m", "twine", "check", "--strict", *files]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 2


@pytest.mark.slow
def test_all_that_the_readme_shows_works_outside_the_clone(newcomer):
    assert go(newcomer, "ebmguard", "--version").startswith("ebmguard ")
    assert "usage" in go(newcomer, "ebmguard", "--help")
    asked = "import pathlib, ebmguard.adapters, ebmguard.reference_training.jem as jem; "
    asked += "here = pathlib.Path(ebmguard.__file__).parent; print((here / 'py.typed').exists(), "
    asked += "pathlib.Path(jem.__file__).is_relative_to(here / 'reference_training'))"
    assert go(newcomer, "python", "-c", asked) == "True True\n"
    (code, shown), *_ = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", README, re.DOTALL)
    (newcomer / "ring.py").write_text(code)
    printed = go(newcomer, "python", "ring.py")
    assert re.sub(r"[\d.-]+", "#", printed) == re.sub(r"[\d.-]+", "#", shown)
    for name in "AB":
        write(newcomer / name)
    # The same trainer before there was a guard in it: what `ebmguard trace` is for.
    plain = re.sub(r"(?s)loss_fn, sample = g = guard\(.*?\n\)\n", "sample = langevin\n", code)
    plain = re.sub(r"    g\.log\(.*\n", "", plain)
    plain = re.sub(r"while g\.step < (\d+):.*", r"for _ in range(\1):", plain)
    plain = re.sub(r"loss_fn\(.*\)", "energy(data).mean() - energy(chains).mean()", plain)
    (newcomer / "train.py").write_text(re.sub(r"(?s)    if g\.step % 200.*", "", plain))
    command_line = r"^    ebmguard (.+?)(?:  |$)|`ebmguard (trace [^`]+)`"
    commands = re.findall(command_line, README + START, re.MULTILINE)
    for command in dict.fromkeys("".join(pair) for pair in commands):
        words = command.split()
        said = go(newcomer, "ebmguard", *words, *(["--once"] if words[0] == "watch" else []))
        assert said, command
    assert (newcomer / "runs/ring/report.html").stat().st_size > 10_000
    assert (newcomer / "compare.html").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem
)
def test_every_example_runs_or_says_what_to_install(newcomer, path):
    first = path.read_text().splitlines()[0]
    shutil.copy(path, newcomer)
    if "pip install" in first:
        said = go(newcomer, "python", path.name, "runs", status=1)
        assert "pip install" in said
    elif "torchrun" in first:
        assert "2 ranks, 10 steps" in go(newcomer, *first.strip('"').split(": ")[1].split(), "10")
    else:
        assert go(newcomer, "python", path.name)
