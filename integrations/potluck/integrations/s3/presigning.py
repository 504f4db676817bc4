"""Signed URLs, with which hosts fetch or upload one object: Signature Version 4 in the query.

Source: Amazon, "Authenticating Requests: Using Query Parameters (AWS Signature Version 4)". Signed
headers must be sent with exactly the signed values, so an upload URL is valid for one content only.
"""

from __future__ import annotations

import configparser
import hashlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from urllib.parse import quote, urlsplit

from potluck.common.errors import ConfigurationError
from potluck.common.net.web_origin import web_origin

# URLs ---------------------------------------------------------------------------------------------

_ALGORITHM = "AWS4-HMAC-SHA256"


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Credentials for signing requests. session_token: empty unless they are temporary."""

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
    """Return `url`, which must have no query, signed for one kind of request.

    It is valid from `at` (in UTC) for `seconds`. `headers`: headers that the request must send in
    addition to Host, by lower-case name.
    """
    origin = web_origin(url)  # the signature covers the host as an HTTP client sends it
    path = quote(urlsplit(url).path, safe="/-_.~")
    signed = {"host": urlsplit(origin).netloc, **(headers or {})}
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
    return f"{origin}{path}?{query}&X-Amz-Signature={key.hex()}"


def _quoted(text: str) -> str:
    return quote(text, safe="-_.~")


# Credentials --------------------------------------------------------------------------------------

_NAMES = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")


def read_credentials(file: Path | None) -> Credentials:
    """Read credentials from a file, or from the environment if `file` is None.

    `file`: in the format of AWS's tools, with a profile `default`. It is read again at each call,
    so that temporary credentials may be replaced. Raises ConfigurationError.
    """
    found = dict(os.environ) if file is None else _read(file)
    access_key, secret_key, token = (found.get(name.upper(), "") for name in _NAMES)
    if not access_key or not secret_key:
        where = "the environment" if file is None else str(file)
        raise ConfigurationError(
            f"{where} has no AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for the object store; "
            "set both, or set `credentials` in [files] to a file that has both"
        )
    return Credentials(access_key=access_key, secret_key=secret_key, session_token=token)


def _read(file: Path) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(file.read_text(encoding="utf-8"))
        return {name.upper(): value for name, value in parser["default"].items()}
    except OSError as error:
        raise ConfigurationError(
            f"can't read the credentials file {file}: {error.strerror}", path=file
        ) from error
    # don't chain: their texts show secrets
    except (configparser.Error, KeyError, UnicodeDecodeError):
        raise ConfigurationError(
            f"{file} is not a valid credentials file; the file must have a section [default] with "
            "aws_access_key_id and aws_secret_access_key",
            path=file,
        ) from None
