"""Options of the test suite."""

from __future__ import annotations

import pytest

import potluck.common.errors  # noqa: F401  # before grpc, which reads its settings once: as programs do


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--rewrite` accepts what transcripts answer now."""
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write what the round machine answers now into tests/testdata/rounds",
    )
