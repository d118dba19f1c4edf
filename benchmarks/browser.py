"""Web pages in a headless Chromium: for tests of what people see, and for the pictures in docs/.

Needs Debian's packages chromium and chromium-driver, or another Chromium with its driver.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

PROGRAMS = ("chromium", "chromedriver")

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
    """What the browser shows.

    Args:
        driver: of Selenium.
        patience: seconds that a page may take to show what is looked for.
    """

    def __init__(self, driver: webdriver.Chrome, patience: float) -> None:
        self.driver = driver
        self._wait = WebDriverWait(driver, patience)

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
            self._wait.until(lambda _: found(self))
        except TimeoutException as error:
            raise TimeoutError(f"The page does not show {what}, but: {self.text}") from error

    def wait_for_text(self, *parts: str) -> str:
        """Wait until the page shows all of these, and return its text."""
        self.wait_for(lambda page: all(part in page.text for part in parts), repr(parts))
        return self.text

    def settle(self) -> None:
        """Wait until the page looks the same twice, a second apart: nothing moves any more."""
        before = b""
        while (now := self.driver.get_screenshot_as_png()) != before:
            before = now
            time.sleep(1)

    def picture(self, path: Path) -> None:
        """Save what the window shows as a PNG."""
        self.driver.save_screenshot(str(path))


@contextmanager
def open_browser(width: int = 1400, height: int = 1000, patience: float = 90) -> Iterator[Page]:
    """A browser with one page, closed at the end.

    Args:
        width, height: of the page in pixels.
        patience: seconds that a page may take to show what is looked for.
    """
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
        yield Page(driver, patience)
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
