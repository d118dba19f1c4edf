"""The matrix of environments: what it counts, what it writes, and what it says it cannot run."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET

from tests import matrix

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
