"""Options of the test suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--rewrite` accepts what transcripts answer now."""
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write what the round machine answers now into tests/testdata/rounds",
    )
