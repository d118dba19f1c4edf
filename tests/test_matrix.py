"""The matrix of environments: what it counts, what it writes, and what it says it cannot run."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from tests import matrix
from tests.matrix import ENVIRONMENTS, CannotRunError, Environment, Outcome

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
    found = matrix.outcome(ET.parse(tmp_path / "report.xml").getroot())
    failed = "test_few::test_bad", "test_few::test_breaks_at_its_end"
    assert found == Outcome(1, failed, 1)


def test_a_row_replaces_that_of_its_environment_alone():
    table = ""
    for name, found in (
        ("threads", Outcome(7, (), 1)),
        ("plain", Outcome(5, ("tests::one",), 0)),
        ("threads", "no such wheel"),
    ):
        line = matrix.row(name, ENVIRONMENTS[name], "3.11.2, 2.13.0", found)
        table = matrix.written(table, name, line)
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert [each[0] for each in rows] == ["| plain", "| threads"]
    assert [each[4:] for each in rows] == [
        ["5", "1: `tests::one`", "0 |"],
        ["-", "not run: no such wheel", "- |"],
    ]


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


def test_the_lowest_versions_are_those_of_pyproject():
    lowest = {matrix.lowest(each) for each in matrix.requirements(["train"])}
    assert {"tensorboard==2.18", "tyro==1.0.13", "pillow==10"} <= lowest
    assert all(each.count("==") == 1 for each in lowest)
