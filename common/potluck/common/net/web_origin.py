"""Scheme, host and port of a URL, in one spelling."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}


def web_origin(url: str) -> str:
    """Return the scheme, host and port of an HTTP URL, as HTTP clients send them.

    The host is in lower case, and the default port of the scheme is omitted. Raises ValueError if
    the port is not a number.
    """
    parts = urlsplit(url)
    host = parts.netloc.lower()
    if parts.port in (None, _DEFAULT_PORTS.get(parts.scheme)):
        host = re.sub(r":[0-9]*$", "", host)
    return f"{parts.scheme}://{host}"
