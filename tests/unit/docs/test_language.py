"""Sentences follow the house language: none matches a pattern that readers find hard."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from house_figures import statements

HOUSE = Path(__file__).resolve().parents[3]
NOT_SEARCHED = {Path(__file__).name, "constraints.txt", "LICENSE"}
SUFFIXES = {".md", ".py", ".pyi", ".proto", ".toml", ".yml", ".yaml", ".js", ".css", ".sh", ".txt"}

PHRASES = re.compile(
    # "there is no run yet" is plain English; "x is no run" is not.
    r"\b(anew|nobody|whoever|so many|but for|told apart|goes with)\b"
    r"|(?<!there )\b(is|are) no (?!longer)[a-z]+\b",
    re.IGNORECASE,
)
OPENINGS = re.compile(r"(What|Whether|Who|Where|Of)\b")
MOST_WORDS = 35

CODE_BLOCK = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
END_OF_SENTENCE = re.compile(r"(?<=[.!?])[\")*_]*\s+(?=[\"(*_`A-Z])")
NOT_PROSE = re.compile(r" *(\||#|<|:::|!!!|---|\[[\w-]+\]: )")
ITEM = re.compile(r" *([-*]|\d+\.) ")


def files() -> Iterator[Path]:
    """Yield the project's text files, as git lists them."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=HOUSE,
        capture_output=True,
        check=True,
        text=True,
    )
    for name in listing.stdout.split("\0"):
        path = HOUSE / name
        if path.suffix in SUFFIXES and path.name not in NOT_SEARCHED and path.is_file():
            yield path


def phrases(text: str) -> Iterator[str]:
    """Yield each line that contains a phrase to avoid, once per phrase."""
    for line in text.splitlines():
        for _ in PHRASES.finditer(line):
            yield squeezed(line)


def openings(source: str) -> Iterator[str]:
    """Yield the first lines of docstrings that start with a word that hides the actor."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(source)
    for node in (tree, *statements(tree)):
        if isinstance(node, documented):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if OPENINGS.match(first):
                yield squeezed(first)


def long_sentences(page: str) -> Iterator[str]:
    """Yield the sentences of a Markdown page that have more than `MOST_WORDS` words."""
    for paragraph in paragraphs(CODE_BLOCK.sub("\n\n", page)):
        for sentence in END_OF_SENTENCE.split(LINK.sub(r"\1", paragraph)):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            if len(words) > MOST_WORDS:
                yield " ".join(words[:12])


def paragraphs(page: str) -> Iterator[str]:
    """Yield paragraphs and list items of a page, each on one line, without tables and headings."""
    lines: list[str] = []
    for line in [*page.splitlines(), ""]:
        item = ITEM.match(line)
        if not line.strip() or NOT_PROSE.match(line) or item:
            if lines:
                yield " ".join(lines)
            lines = [line[item.end() :].strip()] if item else []
        else:
            lines.append(line.strip())


def squeezed(line: str) -> str:
    return " ".join(line.split())


def matches() -> Iterator[str]:
    """Yield every match in the project, with its file."""
    for path in files():
        text, name = path.read_text(), path.relative_to(HOUSE)
        yield from (f"{name}: phrase: {each}" for each in phrases(text))
        if path.suffix == ".py":
            yield from (f"{name}: opening: {each}" for each in openings(text))
        if path.suffix == ".md" and path.is_relative_to(HOUSE / "docs"):
            yield from (f"{name}: long sentence: {each}" for each in long_sentences(text))


def test_sentences_avoid_the_listed_patterns() -> None:
    assert list(matches()) == []


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("Hosts are made anew.", 1),
        ("Nobody waits, and so many rounds pass.", 2),
        ("'x' is no host name", 1),
        ("'x' is not a valid host name", 0),
        ("There is no run yet.", 0),
        ("Its host is no longer asked.", 0),
    ],
)
def test_phrases_to_avoid_are_detected(line: str, count: int) -> None:
    assert list(phrases(line)) == [line] * count


def test_docstring_openings_to_avoid_are_detected() -> None:
    source = (
        '"""What a module is."""\n'
        'class A:\n    """Store it."""\n    def f(self):\n        """Of one."""\n'
    )
    assert list(openings(source)) == ["What a module is.", "Of one."]


@pytest.mark.parametrize(("words", "found"), [(MOST_WORDS, 0), (MOST_WORDS + 1, 1)])
def test_long_sentences_are_detected_only_in_prose(words: int, found: int) -> None:
    long = " ".join(["word"] * (words - 1))
    page = (
        f"# {long} title\n\nShort. A\n{long}. Short.\n\n"
        f"```\n{long} {long}\n```\n\n| {long} x | {long} |\n"
    )
    assert len(list(long_sentences(page))) == found
