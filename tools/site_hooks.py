"""MkDocs hooks that add pages from outside `docs` and rewrite the links to them.

Pages link to files by their paths in the repository. In the site, README.md is the first page, and
examples and notebooks are pages. Any other linked file becomes a page with its text, so that every
link works without a network.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from notebook_files import markdown_of

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?(?=[)\s])")
_FENCE = re.compile(r"^( *```.*?^ *```\s*$)", re.DOTALL | re.MULTILINE)
_NAMED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing/index.md",
    "CHANGELOG.md": "changes.md",
    "SECURITY.md": "security/reporting.md",
}
MOVED = {
    "architecture.md": "contributing/architecture.md",
    "benchmarks.md": "research/benchmarks.md",
    "best-models.md": "guides/best-models.md",
    "compose.md": "deploy/compose.md",
    "concepts.md": "concepts/federation.md",
    "contributing.md": "contributing/index.md",
    "data-plane.md": "concepts/data-plane.md",
    "deploying.md": "deploy/machines.md",
    "experiments.md": "guides/experiments.md",
    "getting-started.md": "start/first-federation.md",
    "gpu.md": "deploy/gpu.md",
    "label-audit.md": "research/label-audit.md",
    "masked-updates.md": "privacy/masked-updates.md",
    "metrics.md": "reference/metrics.md",
    "moving-a-script.md": "start/your-own-model.md",
    "operations.md": "operate/index.md",
    "page.md": "guides/web-ui.md",
    "personal-models.md": "guides/personal-models.md",
    "profiles.md": "privacy/profiles.md",
    "python.md": "start/selection-in-python.md",
    "relay.md": "deploy/relays.md",
    "reproduction.md": "research/reproduction/index.md",
    "secure-aggregation.md": "security/specification.md",
    "selection-benchmark.md": "research/selection-benchmark.md",
    "selectors.md": "reference/selectors/index.md",
    "strategies.md": "reference/strategies/index.md",
    "threat-model.md": "security/threat-model.md",
    "tracing.md": "operate/tracing.md",
    "trackers.md": "guides/trackers.md",
    "triplet-estimate.md": "research/triplet-estimate.md",
    "writing-a-selector.md": "guides/writing-a-selector.md",
    "writing-a-signal.md": "guides/writing-a-signal.md",
    "writing-a-strategy.md": "guides/writing-a-strategy.md",
    "writing-a-task.md": "guides/writing-a-task.md",
    "writing-a-trainer.md": "guides/writing-a-trainer.md",
}
"""Current path of moved pages by their former path; the former path redirects to it."""
MOVED_FOLDERS = {"adr": "contributing/adr", "api": "reference/api"}
_REDIRECT = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>This page has moved</title>
<link rel="canonical" href="{target}">
<script>location.replace("{target}" + location.hash)</script>
<noscript><meta http-equiv="refresh" content="0; url={target}"></noscript></head>
<body>This page has moved: <a href="{target}">{target}</a></body></html>
"""
_LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".proto": "protobuf", ".sh": "sh"}
_NOT_FOUND_BY_SEARCH = "---\nsearch:\n  exclude: true\n---\n\n"


def site_path(path: str) -> str:
    """Return the path in the site of a file or folder of the repository."""
    if path in _NAMED:
        return _NAMED[path]
    parts = PurePosixPath(path).parts
    if parts[0] == "docs" and not (ROOT / path).is_dir():
        return posixpath.join(*parts[1:])
    if parts[:2] == ("examples", "notebooks") and path.endswith(".ipynb"):
        return f"notebooks/{PurePosixPath(path).stem}.md"
    if parts[0] == "examples" and len(parts) > 1 and parts[2:] in ((), ("README.md",)):
        return f"examples/{parts[1]}.md"
    return f"source/{path}.md"


def linked_in_site(markdown: str, path: str) -> str:
    """Return a page's Markdown with the site's links. path: the page's path in the repository."""
    here = posixpath.dirname(site_path(path))

    def link(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        goal = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if goal.startswith("../") or not (ROOT / goal).exists():
            return match[0]  # a broken link, which MkDocs reports
        return posixpath.relpath(site_path(goal), here) + anchor

    parts = _FENCE.split(markdown)
    return "".join(
        part if number % 2 else _LINK.sub(link, part) for number, part in enumerate(parts)
    )


def links_of(markdown: str, path: str) -> set[str]:
    """Return the files and folders of the repository to which a page links."""
    prose = _FENCE.sub("", markdown)
    targets = {posixpath.join(posixpath.dirname(path), match[1]) for match in _LINK.finditer(prose)}
    return {goal for goal in map(posixpath.normpath, targets) if (ROOT / goal).exists()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages from outside `docs`, and the files to which they link."""
    sources = {file.src_uri: f"docs/{file.src_uri}" for file in files.documentation_pages()}
    pending = {path for path in sources.values() if not path.startswith("docs/reference/api/")}
    pending |= {*_NAMED, *map(_relative, ROOT.glob("examples/notebooks/*.ipynb"))}
    seen = set[str]()
    while pending:
        path = pending.pop()
        seen.add(path)
        pages = path.endswith((".md", ".ipynb")) or (ROOT / path / "README.md").is_file()
        if pages:
            pending |= links_of(_text(path), _place(path)) - seen
        if path.startswith("docs/") and not (ROOT / path).is_dir():
            continue
        content = linked_in_site(_text(path), _place(path)) if pages else _shown(path)
        level = InclusionLevel.INCLUDED if pages else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, site_path(path), content=content, inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page of `docs`; links of other pages are already rewritten."""
    del config, files
    if page.file.generated_by is not None:
        return markdown
    return linked_in_site(markdown, f"docs/{page.file.src_uri}")


def redirects() -> dict[str, str]:
    """Return the current path of each page that has moved, by its former path."""
    inside = {
        f"{old}/{page.name}": f"{new}/{page.name}"
        for old, new in MOVED_FOLDERS.items()
        for page in sorted((ROOT / "docs" / new).glob("*.md"))
    }
    return MOVED | inside


def redirect(old: str, new: str) -> str:
    """Return the HTML that redirects from a former path to the current one, with the anchor."""
    target = posixpath.relpath(new, posixpath.dirname(old) or ".").removesuffix(".md") + ".html"
    return _REDIRECT.format(target=target)


def on_post_build(config: MkDocsConfig) -> None:
    """Write a redirect in place of every page that has moved."""
    for old, new in redirects().items():
        page = Path(config.site_dir, old).with_suffix(".html")
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(redirect(old, new), encoding="utf-8")


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _place(path: str) -> str:
    """Return the path of the shown file: the file itself, or the README.md of a folder."""
    return f"{path}/README.md" if (ROOT / path).is_dir() else path


def _text(path: str) -> str:
    text = (ROOT / _place(path)).read_text(encoding="utf-8")
    return markdown_of(text) if path.endswith(".ipynb") else text


def _shown(path: str) -> str:
    """Return a page with a file's text, or with a folder's list of files."""
    if (ROOT / path).is_dir():
        listed = subprocess.run(
            ["git", "ls-files", path], cwd=ROOT, capture_output=True, text=True, check=True
        )
        here = posixpath.dirname(site_path(path))
        places = {name: site_path(name) for name in listed.stdout.split()}
        names = "\n".join(
            f"- `{name}`"
            if place.startswith("source/")
            else f"- [{name}]({posixpath.relpath(place, here)})"
            for name, place in places.items()
        )
        return f"{_NOT_FOUND_BY_SEARCH}# {path}\n\n{names}\n"
    language = _LANGUAGES.get(PurePosixPath(path).suffix, "text")
    text = (ROOT / path).read_text(encoding="utf-8")
    return f"{_NOT_FOUND_BY_SEARCH}# {path}\n\n``````{language}\n{text}\n``````\n"
