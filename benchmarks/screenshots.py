"""Pictures of what people see, for docs/pictures: made from real runs in a headless Chromium.

    python -m benchmarks.screenshots               # all
    python -m benchmarks.screenshots tensorboard   # these only

Needs Debian's packages chromium and chromium-driver. Runs are kept under runs/screenshots; those
that are there already are not trained again.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from ebmguard.report.page import page as page_of

from .browser import missing, open_browser, serve_tensorboard
from .cells import train_command

RUNS = Path("runs/screenshots")


def dying_run() -> Path:
    """A JEM on digits without the guard's weights, which blows up at step 716: about a minute."""
    return train("dying", "--iterations", "760")


def rescued_run() -> Path:
    """The same run, in which the guard rolls back and goes on with its weights."""
    return train("rescued", "--iterations", "1000", "--action", "rollback")


def train(name: str, *options: str) -> Path:
    """A run at β* = 0, unless it is there already; its folder."""
    folder = RUNS / name
    if not (folder / "results.json").is_file():
        words = ("--beta-star", "0", "--seed", "0", *options)
        subprocess.run(train_command("jem", folder, *words), check=True)
    return folder


def tensorboard(path: Path) -> None:
    """TensorBoard's first page, with the side pane closed, so that there is room for charts."""
    with serve_tensorboard(dying_run()) as url, open_browser(1400, 1200) as page:
        page.open(url)
        # The charts of the first group are drawn when their tables are there.
        page.wait_for_text("_alerts /ERROR_energy_blowup", "_alerts/ref /grad_scale", " 759 ")
        page.click("Toggle settings side pane")
        page.settle()
        page.picture(path)


def report(path: Path) -> None:
    """The page of `ebmguard report` about a run that was rescued."""
    file = RUNS / "report.html"
    file.write_text(page_of([rescued_run()]), encoding="utf-8")
    with open_browser(1400, 1560) as page:
        page.open(file.resolve().as_uri())
        page.wait_for_text("What to do next")
        page.picture(path)


# Name of the picture -> what draws it to a path.
PICTURES: dict[str, Callable[[Path], None]] = {"tensorboard": tensorboard, "report": report}


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
