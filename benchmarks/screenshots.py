"""What people see, in a headless Chromium: pictures of real runs for docs/pictures, and for tests.

    python -m benchmarks.screenshots               # all
    python -m benchmarks.screenshots tensorboard   # these only

Needs Debian's packages chromium and chromium-driver, or another Chromium with its driver. Runs are
kept under runs/screenshots; those that are there already are not trained again.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text
from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

from ebmguard.report.page import page as page_of

from .grid import trained

RUNS = Path("runs/screenshots")
PROGRAMS = ("chromium", "chromedriver")
PATIENCE = 90.0
"""Seconds that a page may take to show what is looked for."""

# The text of all elements, those inside of shadow roots included, which innerText leaves out.
_TEXT = """
const text = node => node.nodeType == Node.TEXT_NODE ? node.textContent
  : ['STYLE', 'SCRIPT', 'TEMPLATE', 'NOSCRIPT'].includes(node.nodeName) ? ''
  : [...(node.shadowRoot?.childNodes ?? []), ...node.childNodes].map(text).join(' ');
return text(document.body).replace(/\\s+/g, ' ');
"""
# How many lines with two points or more the Custom Scalars page has drawn.
_LINES = """
const nodes = root => [...root.querySelectorAll('*')].flatMap(
  node => [node, ...(node.shadowRoot ? nodes(node.shadowRoot) : [])]);
return nodes(document).filter(node => node.matches('path.line')
  && (node.getAttribute('d') ?? '').includes('L')).length;
"""


def missing() -> list[str]:
    """The programs that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


class Page:
    """What the browser of Selenium shows."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Go to an address, also where it differs from the present one in its fragment alone."""
        self.driver.get("about:blank")
        self.driver.get(url)

    @property
    def text(self) -> str:
        """All text of the page, in its order, with single spaces."""
        return str(self.driver.execute_script(_TEXT))

    @property
    def lines(self) -> int:
        """How many lines the charts of TensorBoard's Custom Scalars page have drawn."""
        return int(self.driver.execute_script(_LINES))

    def click(self, label: str) -> None:
        """Click the button that says of itself that it does this."""
        self.driver.find_element("css selector", f'button[aria-label="{label}"]').click()

    def wait_for(self, found: Callable[[Page], bool], what: str) -> None:
        """Wait until the page is so.

        Raises:
            TimeoutError: if it takes too long; names what was looked for, and the page's text.
        """
        try:
            WebDriverWait(self.driver, PATIENCE).until(lambda _: found(self))
        except TimeoutException as error:
            raise TimeoutError(f"The page does not show {what}, but: {self.text}") from error

    def wait_for_text(self, *parts: str) -> str:
        """Wait until the page shows all of these, and return its text."""
        self.wait_for(lambda page: all(part in page.text for part in parts), repr(parts))
        return self.text

    def picture(self, path: Path) -> None:
        """Save what the window shows as a PNG, when it is the same twice, a second apart."""
        before = b""
        while (now := self.driver.get_screenshot_as_png()) != before:
            before = now
            time.sleep(1)
        path.write_bytes(now)


@contextmanager
def open_browser(width: int = 1400, height: int = 1000) -> Iterator[Page]:
    """A browser with one page of so many pixels, closed at the end."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in (
        "--headless=new",
        "--no-sandbox",  # which root, as in a container, cannot have
        "--disable-dev-shm-usage",
        "--enable-unsafe-swiftshader",  # TensorBoard draws by WebGL, here without a GPU
        "--hide-scrollbars",
        f"--window-size={width},{height}",
    ):
        options.add_argument(argument)
    driver = webdriver.Chrome(options, Service(str(shutil.which("chromedriver"))))
    # A window has at least 500 pixels; a page may have fewer.
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        yield Page(driver)
    finally:
        driver.quit()


@contextmanager
def serve_tensorboard(folder: Path) -> Iterator[str]:
    """A TensorBoard of the folder, stopped at the end; its address."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", "0"]
    command += ["--samples_per_plugin", "scalars=100000,text=1000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said = ""
        try:
            for line in server.stderr:
                said += line
                found = re.search(r"http://\S+:\d+/", line)
                if found:
                    yield found[0]
                    return
            raise RuntimeError(f"TensorBoard did not start: {said}")
        finally:
            server.terminate()


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
        page.picture(path)


def report(path: Path, width: int = 1400) -> None:
    """The page of `ebmguard report` about a run that was rescued."""
    file = RUNS / "report.html"
    file.write_text(page_of([run("rescued")]), encoding="utf-8")
    with open_browser(width, 1560) as page:
        page.open(file.resolve().as_uri())
        page.wait_for_text("What to do next")
        page.picture(path)


def demo(path: Path) -> None:
    """The page of `ebmguard demo`: both verdicts and the first charts, without the advice.

    Its trainings take some five minutes.
    """
    file = RUNS / "demo" / "demo.html"
    if not file.is_file():
        said("demo", "--out", str(file.parent))
    with open_browser(1240, 936) as page:
        page.open(file.resolve().as_uri())
        page.wait_for_text("What to do next", "test accuracy")
        page.driver.execute_script('document.querySelector(".advice").closest("section").remove()')
        page.picture(path)


def said(*words: str) -> str:
    """What a command prints in colour on a terminal of 80 columns."""
    terminal_of_80 = os.environ | {"COLUMNS": "80", "FORCE_COLOR": "1"}
    command = [sys.executable, "-m", "ebmguard", *words]
    done = subprocess.run(command, env=terminal_of_80, check=True, capture_output=True, text=True)
    return done.stdout


def svg_of(text: str) -> str:
    """A terminal of 80 columns with a text in it, as SVG."""
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(Text.from_ansi(text))
    return console.export_svg(title="ebmguard")


def terminal(path: Path, text: str) -> None:
    """A picture of a terminal of 80 columns with a text in it."""
    file = RUNS / f"{path.stem}.svg"
    file.write_text(svg_of(text), encoding="utf-8")
    with open_browser(1000, 26 * (text.count("\n") + 4)) as page:
        page.open(file.resolve().as_uri())
        page.picture(path)


# Name of the picture -> what draws it to a path.
PICTURES: dict[str, Callable[[Path], None]] = {
    "tensorboard": tensorboard,
    "report": report,
    "report_phone": partial(report, width=420),
    "watch": lambda path: terminal(path, said("watch", str(run("dying")), "--once")),
    "demo": demo,
}


def main(
    arguments: Sequence[str] | None = None,
    *,
    about: str = __doc__,
    pictures: Mapping[str, Callable[[Path], None]] = PICTURES,
    out: Path = Path("docs/pictures"),
) -> None:
    """Draw the pictures that are named, or all; another module passes its own."""
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(pictures)}; none: all")
    parser.add_argument("--out", type=Path, default=out)
    options = parser.parse_args(arguments)
    if missing():
        parser.error(f"not installed: {', '.join(missing())} (Debian: chromium, chromium-driver)")
    unknown = set(options.names) - pictures.keys()
    if unknown:
        parser.error(f"no pictures: {', '.join(unknown)}; there are {', '.join(pictures)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or pictures:
        path = options.out / f"{name}.png"
        pictures[name](path)
        print(path)


if __name__ == "__main__":
    main()
