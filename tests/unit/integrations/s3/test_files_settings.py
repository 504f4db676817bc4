from __future__ import annotations

import pytest
from pydantic import ValidationError

from potluck.server.config import FilesSettings


@pytest.mark.parametrize(
    ("store", "bucket", "prefix"),
    [
        ("", "", ""),
        ("s3://models", "models", ""),
        ("s3://models/", "models", ""),
        ("s3://a.b-c/one/two", "a.b-c", "one/two/"),
        ("s3://models/one/", "models", "one/"),
    ],
)
def test_store_url_is_split_into_bucket_and_prefix(store: str, bucket: str, prefix: str) -> None:
    files = FilesSettings(store=store)
    assert (files.bucket, files.prefix) == (bucket, prefix)


@pytest.mark.parametrize(
    "store", ["models", "s3://", "s3://AB", "s3://models/../x", "s3://me:secret@x", "gs://models"]
)
def test_invalid_store_url_is_refused(store: str) -> None:
    with pytest.raises(ValidationError):
        FilesSettings(store=store)


@pytest.mark.parametrize(
    "endpoint", ["store:9000", "https://me@store", "https://store/bucket", "https://store:port"]
)
def test_invalid_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValidationError):
        FilesSettings(endpoint=endpoint)


def test_endpoint_is_spelled_as_http_clients_send_it() -> None:
    assert FilesSettings(endpoint="https://Minio.example.org:443/").endpoint == (
        "https://minio.example.org"
    )
    assert FilesSettings(endpoint="").endpoint == ""
