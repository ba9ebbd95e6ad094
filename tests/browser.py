"""A Chromium that works here: some are stubs, and some may not read temporary folders."""

import functools
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from docs.making.check import BROWSERS

SECONDS = 120  # for one page, on a busy machine


def dom(browser: str, url: str, folder: Path, *options: str) -> str:
    """What the browser has made of a page."""
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
    """The browser; tests are skipped where there is none."""
    if not (found := _working()):
        pytest.skip("needs a Chromium that reads temporary folders")
    return found
