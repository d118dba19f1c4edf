"""The scripts save to a folder ``run``, which is each test's own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
