"""`ebmguard doctor`, end to end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ebmguard import cli
from tests.doctor.trainers import JEM, SHORT_RUN
from tests.report.test_problems import rows_with, write


def test_a_trainer_with_an_error(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(JEM)
    assert cli.main(["doctor", str(path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("1 error\n  train.py:")
    assert "to guard train.py:\n" in out
    assert "    - l_p_x = -(fp - fq)\n    + l_p_x = cd_loss(fp_all, fq_all)\n" in out


def test_a_trainer_without_one(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(SHORT_RUN)
    assert cli.main(["doctor", str(path)]) == 0
    assert "error" not in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(("ess", "grad_scale", "status"), [(0.6, 0.98, 0), (0.02, 0.01, 1)])
def test_a_run(ess, grad_scale, status, tmp_path, capsys):
    write(tmp_path, rows_with(ess=ess, grad_scale=grad_scale))
    assert cli.main(["doctor", str(tmp_path)]) == status
    assert ("no problems found" in capsys.readouterr().out) == (status == 0)


def test_what_does_not_exist(tmp_path, capsys):
    assert cli.main(["doctor", str(tmp_path / "nothing")]) == cli.USAGE_ERROR
    assert "does not exist" in capsys.readouterr().err


def test_a_trainer_is_not_run(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(JEM + "\nraise SystemExit('it was run')\n")
    done = subprocess.run(
        [sys.executable, "-m", "ebmguard", "doctor", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "it was run" not in done.stdout + done.stderr
