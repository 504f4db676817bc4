"""moto's S3 server, which changes the last byte of objects while a file exists.

python lying_s3.py PORT PATH_OF_OBJECTS FILE
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

Application = Callable[[dict[str, Any], Any], Iterable[bytes]]


def lying(application: Application, objects: str, lies: Path) -> Application:
    """Wrap the application: it sends changed bytes of files below the path `objects`."""

    def answer(environment: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        content = b"".join(application(environment, start_response))
        fetched = environment["REQUEST_METHOD"] == "GET"
        if content and fetched and environment["PATH_INFO"].startswith(objects) and lies.exists():
            content = content[:-1] + bytes([content[-1] ^ 1])
        return [content]

    return answer


if __name__ == "__main__":
    port, objects, lies = sys.argv[1:]
    served = lying(DomainDispatcherApplication(create_backend_app), objects, Path(lies))
    run_simple("127.0.0.1", int(port), served, threaded=True)
