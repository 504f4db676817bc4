"""`make docs` builds the site; its links have targets and it loads nothing from other hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from support.doc_pages import NOTEBOOKS
from support.repository import ROOT

import potluck.federation

pytestmark = pytest.mark.slow
NOWHERE = "http://127.0.0.1:9"


class Page(HTMLParser):
    """The anchors, links and loaded resources of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors = set[str]()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values.get("id", ""), values.get("name", "")}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(values.get("href", ""))
        if tag in ("img", "script", "iframe"):
            self.loads.append(values.get("src", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Return the pages of the site, built without network access."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOWHERE)
    done = subprocess.run(
        build,
        cwd=ROOT,
        env=os.environ | proxies | {"PYTHONPATH": "tools", "NO_PROXY": "", "no_proxy": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {path: Page(path.read_text()) for path in folder.rglob("*.html")}


def internal(page: Path, links: list[str]) -> Iterator[tuple[Path, str]]:
    """Yield the target file and anchor of each link within the site."""
    for link in links:
        parts = urlsplit(link)
        if not parts.scheme and not parts.netloc and link:
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            yield target / "index.html" if target.is_dir() else target, unquote(parts.fragment)


def test_every_internal_link_has_a_target(site: dict[Path, Page]) -> None:
    wrong = [
        f"{path.name}: {target}#{anchor}"
        for path, page in site.items()
        if path.name != "404.html"
        for target, anchor in internal(path, page.links)
        if not target.exists() or (anchor and target in site and anchor not in site[target].anchors)
    ]
    assert wrong == []


def test_site_loads_nothing_from_other_hosts(site: dict[Path, Page]) -> None:
    loaded = {load for page in site.values() for load in page.loads}
    assert {load for load in loaded if urlsplit(load).netloc} == set()


def test_site_contains_the_notebooks_and_the_public_api(site: dict[Path, Page]) -> None:
    pages = {path.stem for path in site if path.parent.name == "notebooks"}
    assert pages == {path.stem for path in NOTEBOOKS}
    [federation] = [
        page
        for path, page in site.items()
        if path.parts[-3:] == ("reference", "api", "federation.html")
    ]
    public = {name for name in potluck.federation.__all__ if not name.startswith("__")}
    documented = {anchor.rpartition(".")[2] for anchor in federation.anchors}
    assert public - documented == set()
    assert {
        "potluck.federation.Run.watch",
        "potluck.federation.Federation.run",
    } <= federation.anchors
