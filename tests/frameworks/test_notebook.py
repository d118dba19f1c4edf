"""A notebook as people run it: cell by cell, in a kernel of its own."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from ebmguard.adapters.notebook import NotebookSink
from tests.report.folders import rows

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


@pytest.mark.filterwarnings("default")  # of the client's event loop
def test_the_notebook_shows_gap_grad_scale_and_alerts(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    (picture,) = [
        output["data"]["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.output_type == "display_data"
    ]
    # One picture, below the cell that trains, as the last cell has left it.
    assert "<b>step 529</b>" in picture
    assert picture.count("<svg") == 2
    assert "energy gap</text>" in picture
    assert "GradScale</text>" in picture
    assert re.search(r"ERROR</b>\s+\w+ at step 5\d\d", picture)
    assert "ERROR" in notebook.cells[-1].outputs[-1]["data"]["text/plain"]
    assert (tmp_path / "runs" / "ring" / "metrics.jsonl").is_file()


def test_what_a_rollback_undid_is_taken_off(capsys):
    sink = NotebookSink()
    for step, row in rows(range(100), seed=1, beta_star=0.5):
        sink.write_row(step, row, {})
    whole = sink._repr_html_()
    sink.write_recovery({"message": "<Rollback 1>", "restored_step": 50})
    cut = sink._repr_html_()
    assert "&lt;Rollback 1&gt;" in cut
    assert cut.count("L") < whole.count("L")
    sink.write_row(50, {"energy_gap": 1.0, "grad_scale": 0.5, "beta_star": 0.5}, {})
    assert "<b>step 50</b>" in sink._repr_html_()
