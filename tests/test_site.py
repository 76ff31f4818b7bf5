"""The built documentation in headless Chromium: navigation, search, width, copying, links."""

from __future__ import annotations

import functools
import http.server
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlparse

import pytest

ROOT = Path(__file__).parents[1]
WIDTHS = {"desktop": 1280, "phone": 390}
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run")  # fmt: skip
SETTLE_MS = 20_000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it: warnings are errors."""
    pytest.importorskip("furo", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    words = ["-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", str(folder)]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(built: Path) -> Iterator[str]:
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words: Any) -> None:
            pass

    serve = functools.partial(Handler, directory=str(built))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs the extra docs")
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt install chromium")
    with api.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=[*QUIET])
        yield chromium
        chromium.close()


class Page(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors.add(found.get("id") or "")
        for key in ("href", "src"):
            link = found.get(key)
            if link is not None and tag in ("a", "img", "link", "script"):
                self.links.add(link)


def pages(built: Path) -> dict[str, Page]:
    return {
        str(path.relative_to(built)): Page(path.read_text(encoding="utf-8"))
        for path in built.rglob("*.html")
    }


def test_links_lead_to_pages_and_anchors_that_exist(built: Path) -> None:
    found = pages(built)
    dead = []
    for name, page in found.items():
        for link in page.links:
            target, anchor = urldefrag(urljoin(f"site:///{name}", link))
            if urlparse(target).scheme != "site":
                continue
            path = unquote(urlparse(target).path).lstrip("/")
            there = (built / path).is_file()
            if not there or (path in found and unquote(anchor) not in found[path].anchors):
                dead.append(f"{name}: {link}")
    assert not dead
    assert len(found) > 40


def test_every_page_stands_in_the_navigation(built: Path) -> None:
    found = pages(built)
    listed = {urldefrag(link)[0] for link in found["index.html"].links} | {"", "index.html"}
    own = {f"{path.relative_to(ROOT / 'docs').with_suffix('.html')}" for path in
           (ROOT / "docs").rglob("*.md") if "_build" not in path.parts}  # fmt: skip
    assert own <= listed
    assert own <= set(found)


@pytest.mark.parametrize("kind", WIDTHS)
def test_no_page_is_wider_than_the_window(
    kind: str, built: Path, address: str, browser: Any
) -> None:
    tab = browser.new_page(viewport={"width": WIDTHS[kind], "height": 900})
    wide = {}
    for path in sorted(built.rglob("*.html")):
        tab.goto(address + str(path.relative_to(built)), wait_until="load")
        excess = tab.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        if excess > 0:
            wide[path.name] = excess
    tab.close()
    assert not wide


def test_navigation_opens_a_page_on_desktop_and_on_a_phone(address: str, browser: Any) -> None:
    for width in WIDTHS.values():
        tab = browser.new_page(viewport={"width": width, "height": 900})
        tab.goto(address)
        link = tab.locator(".sidebar-tree a", has_text="Quick start").first
        if width == WIDTHS["phone"]:
            assert not link.is_visible() or link.bounding_box()["x"] < 0
            tab.locator("label.nav-overlay-icon").first.click()
        link.click(timeout=SETTLE_MS)
        tab.wait_for_url("**/how-to/quick-start.html", timeout=SETTLE_MS)
        assert "Quick start" in tab.locator("h1").first.inner_text()
        tab.close()


@pytest.mark.parametrize(
    ("words", "page"),
    [("straggler", "averaging"), ("PowerSGD", "compression"), ("WINGBEAT_LOG", "environment")],
)
def test_search_finds_the_page_of_a_word(words: str, page: str, address: str, browser: Any) -> None:
    tab = browser.new_page(viewport={"width": WIDTHS["desktop"], "height": 900})
    tab.goto(address)
    tab.locator("input[name=q]").first.fill(words)
    tab.keyboard.press("Enter")
    result = tab.locator(f"#search-results a[href*='{page}.html']").first
    result.click(timeout=SETTLE_MS)
    tab.wait_for_url(f"**/{page}.html*", timeout=SETTLE_MS)
    assert words.lower() in tab.locator("article").first.inner_text().lower()
    tab.close()


def test_code_is_copied_without_prompts(address: str, browser: Any) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    tab = context.new_page()
    tab.goto(address + "how-to/lab.html")
    for language in ("sh", "console"):
        block = tab.locator(f".highlight-{language}").first
        block.hover(timeout=SETTLE_MS)  # fails if the page has none
        block.locator("button.copybtn").click()
        copied = tab.evaluate("navigator.clipboard.readText()")
        shown = block.locator("pre").inner_text()
        assert copied.strip()
        lines = [line[2:] for line in shown.splitlines() if line.startswith("$ ")]
        expected = "\n".join(lines) if lines else shown.strip()
        assert copied.strip() == expected
    context.close()
