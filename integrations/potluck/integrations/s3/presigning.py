"""URLs by which others may fetch or put one object: Signature Version 4 in the query.

Source: Amazon, "Authenticating Requests: Using Query Parameters (AWS Signature Version 4)". Headers
that are signed must be sent with exactly these values, so that a URL to put is good for one content
alone.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import quote, urlsplit

_ALGORITHM = "AWS4-HMAC-SHA256"


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What requests are signed with. session_token: of temporary ones; empty for none."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)


def presigned_url(
    method: str,
    url: str,
    *,
    credentials: Credentials,
    region: str,
    at: datetime,
    seconds: int,
    headers: Mapping[str, str] | None = None,
) -> str:
    """`url`, which has no query, good for one kind of request from `at` (in UTC) on for so long.

    `headers`: by lower-case name, what the request must send besides the host.
    """
    parts = urlsplit(url)
    path = quote(parts.path, safe="/-_.~")
    signed = {"host": parts.netloc, **(headers or {})}
    names = ";".join(sorted(signed))
    time = f"{at:%Y%m%dT%H%M%SZ}"
    scope = f"{at:%Y%m%d}/{region}/s3/aws4_request"
    values = {
        "X-Amz-Algorithm": _ALGORITHM,
        "X-Amz-Credential": f"{credentials.access_key}/{scope}",
        "X-Amz-Date": time,
        "X-Amz-Expires": str(seconds),
        "X-Amz-SignedHeaders": names,
    }
    if credentials.session_token:
        values["X-Amz-Security-Token"] = credentials.session_token
    query = "&".join(f"{_quoted(name)}={_quoted(values[name])}" for name in sorted(values))
    lines = "".join(f"{name}:{signed[name].strip()}\n" for name in sorted(signed))
    request = "\n".join((method, path, query, lines, names, "UNSIGNED-PAYLOAD"))
    digest = hashlib.sha256(request.encode()).hexdigest()
    text = "\n".join((_ALGORITHM, time, scope, digest))
    key = f"AWS4{credentials.secret_key}".encode()
    for step in (*scope.split("/"), text):
        key = hmac.digest(key, step.encode(), "sha256")
    return f"{parts.scheme}://{parts.netloc}{path}?{query}&X-Amz-Signature={key.hex()}"


def _quoted(text: str) -> str:
    return quote(text, safe="-_.~")
