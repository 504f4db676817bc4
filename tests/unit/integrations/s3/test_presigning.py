from __future__ import annotations

from datetime import UTC, datetime
from unittest import mock
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore import auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as TheirCredentials
from hypothesis import given
from hypothesis import strategies as st

from potluck.integrations.s3.presigning import Credentials, presigned_url

AT = datetime(2013, 5, 24, tzinfo=UTC)
CREDENTIALS = Credentials(
    access_key="AKIAIOSFODNN7EXAMPLE",
    secret_key="wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",  # noqa: S106  # of the source's example
)
TEXT = st.text("abcXYZ019-_.~+ =@:", min_size=1, max_size=20)


def signature(url: str) -> str:
    [found] = parse_qs(urlsplit(url).query)["X-Amz-Signature"]
    return found


def test_presigned_url_equals_the_documented_example() -> None:
    url = presigned_url(
        "GET",
        "https://examplebucket.s3.amazonaws.com/test.txt",
        credentials=CREDENTIALS,
        region="us-east-1",
        at=AT,
        seconds=86400,
    )
    expected = "aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
    assert signature(url) == expected


def theirs(method: str, url: str, headers: dict[str, str], token: str) -> str:
    """Return the signature that botocore computes."""
    keys = TheirCredentials(CREDENTIALS.access_key, CREDENTIALS.secret_key, token or None)
    request = AWSRequest(method=method, url=url, headers=headers)
    with mock.patch.object(auth, "get_current_datetime", return_value=AT.replace(tzinfo=None)):
        auth.S3SigV4QueryAuth(keys, "s3", "eu-north-1", expires=60).add_auth(request)
    return signature(str(request.url))


@pytest.mark.parametrize("method", ["GET", "PUT"])
@given(key=TEXT, token=st.just("") | TEXT, size=st.integers(0, 1 << 40))
def test_presigned_url_signature_equals_that_of_another_library(
    method: str, key: str, token: str, size: int
) -> None:
    url = f"http://127.0.0.1:9000/bucket/one/{key}"
    bound = {"content-length": str(size), "x-amz-checksum-sha256": "MTIz/Cs="}
    headers = bound if method == "PUT" else {}
    ours = presigned_url(
        method,
        url,
        credentials=Credentials(
            access_key=CREDENTIALS.access_key,
            secret_key=CREDENTIALS.secret_key,
            session_token=token,
        ),
        region="eu-north-1",
        at=AT,
        seconds=60,
        headers=headers,
    )
    quoted = ours.partition("?")[0]
    assert signature(ours) == theirs(method, quoted, headers, token)


def test_presigned_url_signature_depends_on_the_content_length() -> None:
    urls = {
        presigned_url(
            "PUT",
            "https://store/x",
            credentials=CREDENTIALS,
            region="r",
            at=AT,
            seconds=60,
            headers={"content-length": str(size)},
        )
        for size in (1, 2)
    }
    assert len(urls) == 2


def test_secret_key_is_not_in_the_repr_of_credentials() -> None:
    assert CREDENTIALS.secret_key not in repr(CREDENTIALS)


def test_presigned_url_signs_the_host_as_http_clients_send_it() -> None:
    urls = {
        presigned_url(
            "GET",
            f"https://{host}/x",
            credentials=CREDENTIALS,
            region="r",
            at=AT,
            seconds=60,
        )
        for host in ("store.example.org", "Store.Example.org", "store.example.org:443")
    }
    assert len(urls) == 1
