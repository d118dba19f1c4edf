"""Pictures of what people see, for docs/pictures: made from real runs in a headless Chromium.

    python -m benchmarks.screenshots               # all
    python -m benchmarks.screenshots tensorboard   # these only

Needs Debian's packages chromium and chromium-driver. Runs are kept under runs/screenshots; those
that are there already are not trained again.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ebmguard.report.page import page as page_of

from .browser import missing, open_browser, serve_tensorboard
from .grid import trained

RUNS = Path("runs/screenshots")


# A JEM on digits without the guard's weights, which blows up at step 716, and the same run, in
# which the guard rolls back and goes on with its weights.
OPTIONS = {
    "dying": ("--iterations", "760"),
    "rescued": ("--iterations", "1000", "--action", "rollback"),
}


def run(name: str) -> Path:
    """The folder of a run, which is trained unless it is there already: about a minute."""
    folder = RUNS / name
    if not (folder / "results.json").is_file():
        trained("jem", folder, "--beta-star", "0", "--seed", "0", *OPTIONS[name])
    return folder


def tensorboard(path: Path) -> None:
    """TensorBoard's first page, with the side pane closed, so that there is room for charts."""
    with serve_tensorboard(run("dying")) as url, open_browser(1400, 1200) as page:
        page.open(url)
        # The charts of the first group are drawn when their tables are there.
        page.wait_for_text("_alerts /ERROR_energy_blowup", "_alerts/ref /grad_scale", " 759 ")
        page.click("Toggle settings side pane")
        page.settle()
        page.picture(path)


def report(path: Path, width: int = 1400) -> None:
    """The page of `ebmguard report` about a run that was rescued."""
    file = RUNS / "report.html"
    file.write_text(page_of([run("rescued")]), encoding="utf-8")
    with open_browser(width, 1560) as page:
        page.open(file.resolve().as_uri())
        page.wait_for_text("What to do next")
        page.picture(path)


def demonstration() -> str:
    """What `ebmguard demo` says, unless it has said it already: some three minutes."""
    kept = RUNS / "demo.txt"
    if not kept.is_file():
        kept.write_text(said("demo", "--out", str(RUNS / "demo")), encoding="utf-8")
    return kept.read_text(encoding="utf-8")


def demo(path: Path) -> None:
    """The page of `ebmguard demo`: both verdicts and the first charts, without the advice."""
    demonstration()
    with open_browser(1240, 888) as page:
        page.open((RUNS / "demo" / "demo.html").resolve().as_uri())
        page.wait_for_text("What to do next", "test accuracy")
        page.driver.execute_script('document.querySelector(".advice").closest("section").remove()')
        page.settle()
        page.picture(path)


def said(*words: str) -> str:
    """What a command prints in colour on a terminal of 80 columns."""
    terminal_of_80 = os.environ | {"COLUMNS": "80", "FORCE_COLOR": "1"}
    command = [sys.executable, "-m", "ebmguard", *words]
    done = subprocess.run(command, env=terminal_of_80, check=True, capture_output=True, text=True)
    return done.stdout


def terminal(path: Path, text: str) -> None:
    """A picture of a terminal of 80 columns with a text in it."""
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(Text.from_ansi(text))
    file = RUNS / f"{path.stem}.svg"
    file.write_text(console.export_svg(title="ebmguard"), encoding="utf-8")
    with open_browser(1000, 26 * (text.count("\n") + 4)) as page:
        page.open(file.resolve().as_uri())
        page.settle()
        page.picture(path)


# Name of the picture -> what draws it to a path.
PICTURES: dict[str, Callable[[Path], None]] = {
    "tensorboard": tensorboard,
    "report": report,
    "report_phone": partial(report, width=420),
    "watch": lambda path: terminal(path, said("watch", str(run("dying")), "--once")),
    "demo": demo,
    "demo_terminal": lambda path: terminal(path, demonstration()),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PICTURES)}; none: all")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    options = parser.parse_args(arguments)
    if missing():
        parser.error(f"not installed: {', '.join(missing())} (Debian: chromium, chromium-driver)")
    unknown = set(options.names) - PICTURES.keys()
    if unknown:
        parser.error(f"no pictures: {', '.join(unknown)}; there are {', '.join(PICTURES)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or PICTURES:
        path = options.out / f"{name}.png"
        PICTURES[name](path)
        print(path)


if __name__ == "__main__":
    main()
