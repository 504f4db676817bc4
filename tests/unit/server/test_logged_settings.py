"""A coordinator logs its configuration without passwords."""

from __future__ import annotations

import json
from typing import Any

import pytest

from potluck.common.settings.configuration import validate
from potluck.server.cli import settings_for_the_log
from potluck.server.config import CoordinatorConfig

TLS = {"certificate": "a.pem", "key": "a.key", "authority": "b.pem"}


@pytest.mark.parametrize(
    ("database", "shown"),
    [
        ({}, "sqlite:////state/potluck.sqlite3"),
        (
            {"database": "postgresql+psycopg://me:s3cret@host/runs"},
            "postgresql+psycopg://me:***@host/runs",
        ),
        (
            {"database": "postgresql://me@host/runs?password=s3cret"},
            "postgresql+psycopg://me@host/runs?password=%2A%2A%2A",
        ),
    ],
)
def test_logged_coordinator_settings_contain_no_passwords(
    database: dict[str, Any], shown: str
) -> None:
    sinks = {"mlflow": {"tracking_uri": "http://me:s3cret@host"}}
    values = {"state_directory": "/state", "tls": TLS, "sinks": sinks, **database}
    logged = settings_for_the_log(validate(CoordinatorConfig, values, source="x"))
    assert logged["database"] == shown
    assert logged["listen"] == "127.0.0.1:7443"
    assert "s3cret" not in json.dumps(logged)
