"""What a person sees: a real run in a real TensorBoard in a real browser."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from ebmguard import guard
from ebmguard.sinks import read_jsonl

STEPS, DIES_AT = 40, 30


@pytest.fixture(scope="module")
def dying_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training whose energies stop being finite, beside tags of the trainer's own."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    f = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(f.parameters(), lr=0.01)
    g = guard(None, None, beta_star=0.5, log_dir=folder)
    g.attach(model=f, optimizer=optimizer)
    with SummaryWriter(str(folder / "trainer")) as writer:
        for step in range(STEPS):
            optimizer.zero_grad()
            negatives = f(torch.randn(64, 2))
            if step == DIES_AT:
                negatives = negatives * torch.inf
            g.loss(f(torch.randn(64, 2)), negatives).backward()
            optimizer.step()
            for tag in ("accuracy/test", "f_score/test", "epoch/time", "loss"):
                writer.add_scalar(tag, 0.5, step)
    g.close()
    return folder


def test_scalars_layout_and_an_alerts_text_are_on_the_pages(
    dying_run: Path, tmp_path: Path
) -> None:
    if importlib.util.find_spec("selenium") is None:
        pytest.skip("the package selenium is not installed")
    from benchmarks.screenshots import missing, open_browser, serve_tensorboard

    if missing():
        pytest.skip(f"not installed: {', '.join(missing())} (Debian: chromium, chromium-driver)")
    if version("tensorboard") < "2.21" and importlib.util.find_spec("pkg_resources") is None:
        pytest.skip("TensorBoard before 2.21 starts with setuptools before 81 alone")
    alert = read_jsonl(dying_run / "alerts.jsonl")[0]
    assert (alert["rule"], alert["level"], alert["step"]) == ("nonfinite", "ERROR", DIES_AT)
    with serve_tensorboard(dying_run) as url, open_browser() as page:
        # The first page, as it opens: the alert's chart comes before those of the trainer's tags,
        # and its table says which step it was.
        page.open(url)
        text = page.wait_for_text("_alerts /ERROR_nonfinite", "accuracy /test", "guard", "Pinned")
        assert text.index("Pinned") < text.index("_alerts /ERROR_nonfinite")
        assert text.index("_alerts /ERROR_nonfinite") < text.index("accuracy /test")
        page.wait_for_text(f"Run Smoothed Value Step Relative . 2 2 {DIES_AT} ")

        page.open(url + "#custom_scalars")
        text = page.wait_for_text("alerts by rule", "medians of f_pos and f_neg", "GradScale")
        titles = [
            "Alerts", "alerts by rule", "Energies", "energy gap: mean f_pos - mean f_neg",
            "f_neg: median, 5% to 95%", "Weights of the negatives", "Sampler",
        ]  # fmt: skip
        places = [text.index(f" {title}") for title in titles]
        assert places == sorted(places)
        page.wait_for_text("_alerts/ERROR_nonfinite", "guard/energy_gap")
        page.wait_for(lambda page: page.lines >= 5, "lines of charts")

        page.open(url + "#text")
        heading = f"ERROR nonfinite at step {DIES_AT}"
        page.wait_for_text(heading, alert["tag"], "Likeliest remedies", *alert["remedies"])
