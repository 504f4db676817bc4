from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.postgresql import MISSING, PostgreSQL, programs, running_postgresql

from potluck.server.store import Store


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    if programs() is None:
        pytest.skip(MISSING)
    with running_postgresql() as server:
        yield server


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'potluck.db'}"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    """Return the URL of an empty database of each kind."""
    if request.param == "sqlite":
        sqlite: str = request.getfixturevalue("sqlite_url")
        return sqlite
    server: PostgreSQL = request.getfixturevalue("postgresql")
    return server.new_schema()


@pytest.fixture
def another_url(url: str, request: pytest.FixtureRequest) -> str:
    """Return the URL of another empty database of the same kind."""
    if url.startswith("sqlite"):
        return f"{url}.other"
    server: PostgreSQL = request.getfixturevalue("postgresql")
    return server.new_schema()


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        yield opened
