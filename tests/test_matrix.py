"""The matrix of environments: what it counts, what it writes, and what it says it cannot run."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from tests import matrix
from tests.matrix import CannotRunError, Environment

OWN = f"python{sys.version_info.major}.{sys.version_info.minor}"

RUN = """
import pytest

def test_good(): pass
def test_bad(): assert False
def test_left_out(): pytest.skip("why")

@pytest.fixture
def broken():
    yield
    raise ValueError

def test_breaks_at_its_end(broken): pass
"""


def test_it_counts_what_pytest_reports(tmp_path):
    (tmp_path / "test_few.py").write_text(RUN)
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml"]
    subprocess.run([sys.executable, *words], cwd=tmp_path, check=False, capture_output=True)
    found = matrix.counts(ET.parse(tmp_path / "report.xml").getroot())
    assert found == ["1", "2: `test_few::test_bad`, `test_few::test_breaks_at_its_end`", "1"]


def test_a_row_replaces_that_of_its_environment_alone():
    table = matrix.TABLE.read_text()
    before = table.splitlines()
    for name, found in (("threads", ["7", "1: `tests::one`", "0"]), ("plain", ["5", "0", "1"])):
        line = matrix.row(name, "3.11.2, 2.13.0", found)
        table = matrix.written(table, name, line)
        assert line.endswith(f" | {' | '.join(found)} |")
    after = table.splitlines()
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert "passed in 10 of 11" in after[changed[0]]
    assert [after[i].split()[1] for i in changed[-2:]] == ["plain", "threads"]


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (Environment("", python="python3.999"), "no python3.999 on the PATH"),
        (Environment("", needs="avx999"), "knows no avx999"),
        (Environment("", python=OWN), "it is the plain environment"),
    ],
)
def test_what_is_not_there_is_said(environment, says):
    with pytest.raises(CannotRunError, match=says):
        matrix.interpreter(environment)
