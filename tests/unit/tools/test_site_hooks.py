"""Redirects of pages that have moved."""

from pathlib import Path
from typing import cast

from mkdocs.config.defaults import MkDocsConfig
from support.repository import ROOT

from site_hooks import on_post_build, redirect, redirects


def test_every_redirect_target_exists() -> None:
    gone = [new for new in redirects().values() if not (ROOT / "docs" / new).is_file()]
    assert set(gone) <= {"contributing/index.md"}  # generated from CONTRIBUTING.md
    assert [old for old in redirects() if (ROOT / "docs" / old).exists()] == []


def test_redirect_page_keeps_the_anchor_and_works_without_scripts() -> None:
    page = redirect("adr/0002-identity.md", "contributing/adr/0002-identity.md")
    target = "../contributing/adr/0002-identity.html"
    assert f'location.replace("{target}" + location.hash)' in page
    assert f'content="0; url={target}"' in page
    assert f'<a href="{target}">' in page


def test_built_site_has_a_redirect_page_for_each_former_path(tmp_path: Path) -> None:
    config = cast(MkDocsConfig, MkDocsConfig())  # type: ignore[redundant-cast]  # not for pyright
    config.site_dir = str(tmp_path)
    on_post_build(config)
    written = {path.relative_to(tmp_path).with_suffix(".md") for path in tmp_path.rglob("*.html")}
    assert written == {Path(old) for old in redirects()}
