from __future__ import annotations

from pathlib import Path

import pytest

from potluck.common.errors import ConfigurationError
from potluck.integrations.s3.presigning import read_credentials

WHOLE = """[default]
aws_access_key_id = one
aws_secret_access_key = two%three
aws_session_token = four
"""


def test_s3_credentials_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    path.write_text(WHOLE)
    found = read_credentials(path)
    assert (found.access_key, found.secret_key, found.session_token) == ("one", "two%three", "four")


def test_s3_credentials_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "one")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "two")
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    found = read_credentials(None)
    assert (found.access_key, found.secret_key, found.session_token) == ("one", "two", "")


@pytest.mark.parametrize("text", ["two-secret", "[other]\na = two-secret", "[default]\nb = 1", ""])
def test_invalid_credentials_file_is_refused_without_showing_secrets(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "credentials"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as raised:
        read_credentials(path)
    assert "two-secret" not in raised.value.message
    assert str(path) in raised.value.message


def test_missing_s3_credential_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    with pytest.raises(ConfigurationError, match="AWS_SECRET_ACCESS_KEY"):
        read_credentials(None)


def test_missing_credentials_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        read_credentials(tmp_path / "none")
