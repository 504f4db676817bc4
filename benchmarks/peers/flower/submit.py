"""Calls `flwr run` once the SuperLink listens. Imports run before, so their time does not count.

python submit.py PORT RECORD ARGUMENTS…
"""

import json
import socket
import sys
import time
from pathlib import Path

from flwr.cli.app import app


def wait_for(port):
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            time.sleep(0.05)
        else:
            return


if __name__ == "__main__":
    port, record, *arguments = sys.argv[1:]
    wait_for(int(port))
    with Path(record).open("a") as file:
        file.write(json.dumps({"what": "submitted", "at": time.monotonic()}) + "\n")
    app(["run", *arguments])
