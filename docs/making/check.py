"""Whether a built site holds together by itself: every link leads somewhere, nothing is fetched.

    python -m docs.making.check build/docs

What a page asks for is read twice: from its HTML, and from what Chromium says that the page
requested when it was opened, where Chromium is installed.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import unquote, urldefrag, urlsplit

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "srcset"}
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run",
         "--virtual-time-budget=3000")  # fmt: skip


class Page(HTMLParser):
    """What a page links to, what it fetches, and the anchors it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what the tag says."""
        held = {name: value for name, value in attrs if value}
        self.anchors |= {held[name] for name in ("id", "name") if name in held}
        if tag == "a" and "href" in held:
            self.links.append(held["href"])
        if tag in FETCHED and FETCHED[tag] in held:
            self.fetched.append(held[FETCHED[tag]])


def flaws(site: Path) -> list[str]:
    """Links and files that lead nowhere, and what would be fetched from elsewhere."""
    pages = {file: Page(file.read_text(encoding="utf-8")) for file in sorted(site.rglob("*.html"))}
    return [
        f"{file.relative_to(site)}: {flaw}"
        for file, page in pages.items()
        for flaw in (*_elsewhere(page), *_nowhere(file, page, pages))
    ]


def _elsewhere(page: Page) -> Iterator[str]:
    """What would be fetched over a network."""
    for one in page.fetched:
        if urlsplit(one).scheme not in ("", "data") or one.startswith("//"):
            yield f"fetches {one}"


def _nowhere(file: Path, page: Page, pages: dict[Path, Page]) -> Iterator[str]:
    """What leads to no file of the site, or to no place in it; other sites are not asked."""
    for one in {*page.links, *page.fetched}:
        path, anchor = urldefrag(one)
        if urlsplit(one).scheme or one.startswith("//"):
            continue
        target = (file.parent / unquote(urlsplit(path).path)).resolve() if path else file.resolve()
        if not target.is_file():
            yield f"leads to {one}, which is not there"
        elif anchor and target in pages and unquote(anchor) not in pages[target].anchors:
            yield f"leads to {one}, where there is no such place"


def requested(page: Path, browser: str) -> list[str]:
    """The addresses beyond this machine's files that a browser asks for when it opens the page."""
    with TemporaryDirectory() as folder:
        log = Path(folder, "net.json")
        told = (f"--user-data-dir={folder}/profile", f"--log-net-log={log}", "--dump-dom")
        command = [browser, *QUIET, *told, page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        return addresses(json.loads(log.read_text(encoding="utf-8")))


def addresses(log: dict) -> list[str]:
    """What a page asked of a network, in a net log of Chromium's; what Chromium asks for its own
    sake, as the time, has no origin."""
    start = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    said = [one.get("params", {}) for one in log["events"] if one["type"] == start]
    asked = {one["url"] for one in said if "url" in one and one["initiator"] != "not an origin"}
    return sorted(one for one in asked if urlsplit(one).scheme in ("http", "https", "ws", "wss"))


def main(site: Path) -> int:
    """Say what is wrong; 0 if nothing is."""
    found = flaws(site.resolve())
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser:
        pages = [site / name for name in ("index.html", "concepts/stability.html", "search.html")]
        found += [f"{one.name} asked for {url}" for one in pages for url in requested(one, browser)]
    print("\n".join(found) or "every link leads somewhere; nothing is fetched", end="")
    print("" if found or browser else "; no browser is here to be asked", flush=True)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
