"""Check that a built site is self-contained: its links, its fetched files and its page widths.

    python -m docs.making.check build/docs

Every link must lead to an existing place, no page may fetch anything from a network, and no page
may be wider than its screen. The requests of a page are read from its HTML. If Chromium is
installed, they are also read from the requests that Chromium reports when it opens the page.
"""

import json
import re
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
WIDTHS = 390, 768, 1280, 1600
# Opens every page in a frame of one width, one after the other. At the end, the body contains the
# list of pages that are wider than the frame.
FRAMES = """<body></body><script>
const wide = [], show = ([page, ...others]) => {
  if (!page) { document.body.textContent = JSON.stringify(wide); return; }
  const frame = document.createElement("iframe");
  frame.width = WIDTH; frame.height = 900; frame.src = page;
  frame.onload = () => {
    const seen = frame.contentDocument.documentElement;
    if (seen.scrollWidth > seen.clientWidth) wide.push(page);
    frame.remove(); show(others);
  };
  document.body.append(frame);
}; show(PAGES)</script>"""
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run",
         "--virtual-time-budget=60000")  # fmt: skip


class Page(HTMLParser):
    """The content of a page that is checked: its links, fetched files and anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the links, files or anchors that an opening tag contains."""
        held = {name: value for name, value in attrs if value}
        self.anchors |= {held[name] for name in ("id", "name") if name in held}
        if tag == "a" and "href" in held:
            self.links.append(held["href"])
        if tag in FETCHED and FETCHED[tag] in held:
            self.fetched.append(held[FETCHED[tag]])


def flaws(site: Path) -> list[str]:
    """Return a line for each broken link, each missing file and each network fetch."""
    pages = {file: Page(file.read_text(encoding="utf-8")) for file in sorted(site.rglob("*.html"))}
    return [
        f"{file.relative_to(site)}: {flaw}"
        for file, page in pages.items()
        for flaw in (*_elsewhere(page), *_nowhere(file, page, pages))
    ]


def _elsewhere(page: Page) -> Iterator[str]:
    """Yield a line for each file that would be fetched over a network."""
    for one in page.fetched:
        if urlsplit(one).scheme not in ("", "data") or one.startswith("//"):
            yield f"fetches {one}"


def _nowhere(file: Path, page: Page, pages: dict[Path, Page]) -> Iterator[str]:
    """Yield one line of text for each link to a file or anchor of the site that does not exist.

    Links to other sites are not checked.
    """
    for one in {*page.links, *page.fetched}:
        path, anchor = urldefrag(one)
        if urlsplit(one).scheme or one.startswith("//"):
            continue
        target = (file.parent / unquote(urlsplit(path).path)).resolve() if path else file.resolve()
        if not target.is_file():
            yield f"links to {one}, which does not exist"
        elif anchor and target in pages and unquote(anchor) not in pages[target].anchors:
            yield f"links to {one}, but that page has no such anchor"


def requested(page: Path, browser: str) -> list[str]:
    """Return the network addresses that a page requests when a browser opens it."""
    with TemporaryDirectory() as folder:
        log = Path(folder, "net.json")
        opened(page, browser, f"--log-net-log={log}")
        return addresses(json.loads(log.read_text(encoding="utf-8")))


def opened(page: Path, browser: str, *more: str) -> str:
    """Open a page in a browser, and return the HTML of the page after its scripts ran."""
    with TemporaryDirectory() as folder:
        told = (f"--user-data-dir={folder}", "--dump-dom", *more, page.resolve().as_uri())
        ended = subprocess.run(
            [browser, *QUIET, *told], check=True, capture_output=True, timeout=180
        )
        return ended.stdout.decode()


def wider(site: Path, browser: str, width: int) -> list[str]:
    """Return the pages that would scroll sideways on a screen of this width."""
    pages = json.dumps([one.resolve().as_uri() for one in sorted(site.rglob("*.html"))])
    with TemporaryDirectory() as folder:
        frames = Path(folder, "frames.html")
        frames.write_text(FRAMES.replace("WIDTH", str(width)).replace("PAGES", pages))
        left = opened(frames, browser, "--allow-file-access-from-files", "--window-size=1400,1000")
        found = re.search(r"<body>(\[.*?\])", left)
        if not found:
            raise SystemExit(
                "The browser stopped before it had opened all pages. Run the check again."
            )
        return [unquote(one.rpartition("/")[2]) for one in json.loads(found[1])]


def addresses(log: dict) -> list[str]:
    """Return the network addresses that a page requested, from a net log of Chromium.

    Requests that Chromium makes for itself, such as the time, have no origin and are left out.
    """
    start = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    said = [one.get("params", {}) for one in log["events"] if one["type"] == start]
    asked = {one["url"] for one in said if "url" in one and one.get("initiator") != "not an origin"}
    return sorted(one for one in asked if urlsplit(one).scheme in ("http", "https", "ws", "wss"))


def main(site: Path) -> int:
    """Print all problems of the built site. Return 0 if there are no problems, and 1 otherwise."""
    found = flaws(site.resolve())
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser:
        pages = [site / name for name in ("index.html", "concepts/stability.html", "search.html")]
        found += [
            f"{one.name} requests {url} from the network"
            for one in pages
            for url in requested(one, browser)
        ]
        found += [f"{one} is wider than a screen of {width} pixels"
                  for width in WIDTHS for one in wider(site, browser, width)]  # fmt: skip
    whole = (
        "All links work, no page loads files from other sites, and no page is wider than its "
        "screen."
    )
    alone = (
        "All links work. Page widths and requests were not checked, because no browser is "
        "installed."
    )
    print("\n".join(found) or (whole if browser else alone))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
