"""`ebmguard check RUN`, end to end."""

from __future__ import annotations

import pytest

from ebmguard import cli
from tests.report.test_problems import rows_with, write


@pytest.mark.parametrize(("ess", "grad_scale", "status"), [(0.6, 0.98, 0), (0.02, 0.01, 1)])
def test_a_run(ess, grad_scale, status, tmp_path, capsys):
    write(tmp_path, rows_with(ess=ess, grad_scale=grad_scale))
    assert cli.main(["check", str(tmp_path)]) == status
    assert ("no problems found" in capsys.readouterr().out) == (status == 0)


def test_what_does_not_exist(tmp_path, capsys):
    assert cli.main(["check", str(tmp_path / "nothing")]) == cli.USAGE_ERROR
    assert "nothing" in capsys.readouterr().err
