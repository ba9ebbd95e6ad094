"""A Chromium that works here: some are stubs, and some may not read temporary folders."""

import base64
import functools
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from matplotlib import get_data_path

from docs.making.check import BROWSERS

PATIENT = "--virtual-time-budget=30000"  # half a minute of the browser's own time
SECONDS = 120  # for one page, on a busy machine


FONT = Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")  # a wide one


def in_one_font(page: str) -> str:
    """The page with every text in a font that is the same on all machines. Its last line has the
    font loaded before the page is."""
    data = base64.b64encode(FONT.read_bytes()).decode()
    face = f"font-family: shipped; font-weight: 100 900; src: url(data:font/ttf;base64,{data})"
    style = f"<style>@font-face {{ {face} }} * {{ font-family: shipped !important; }}</style>"
    load = "<script>document.body.offsetWidth;</script>"
    return page.replace("</body>", f"{style}{load}</body>")


def dom(browser: str, url: str, folder: Path, *options: str) -> str:
    return subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", *options,
         f"--user-data-dir={folder / 'profile'}", "--dump-dom", url],
        capture_output=True, text=True, timeout=SECONDS, check=True,
    ).stdout  # fmt: skip


@functools.cache
def _working() -> str:
    for browser in filter(None, map(shutil.which, BROWSERS)):
        with TemporaryDirectory() as folder:
            page = Path(folder, "page.html")
            page.write_text("<p>seen by a browser</p>", encoding="utf-8")
            try:
                if "seen by a browser" in dom(browser, page.as_uri(), Path(folder)):
                    return browser
            except (OSError, subprocess.SubprocessError):
                continue
    return ""


@pytest.fixture(scope="session")
def chromium() -> str:
    if not (found := _working()):
        pytest.skip("needs a Chromium that reads temporary folders")
    return found
