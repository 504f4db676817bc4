"""Submits a job once all clients are connected: `python submit.py ADMIN_KIT JOB CLIENTS RECORD`.

Imports run while the server starts, so their time does not count.
"""

import json
import sys
import time
from pathlib import Path

from nvflare.fuel.flare_api.flare_api import new_secure_session

PATIENCE_SECONDS = 120.0


def connect(kit):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return new_secure_session(
                username=Path(kit).name, startup_kit_location=kit, timeout=PATIENCE_SECONDS
            )
        except Exception:  # NVFlare raises various errors until the server answers
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def main(kit, job, clients, record):
    session = connect(kit)
    while len(session.get_system_info().client_info) < int(clients):
        time.sleep(0.05)
    with Path(record).open("a") as file:
        file.write(json.dumps({"what": "submitted", "at": time.monotonic()}) + "\n")
    session.submit_job(job)
    session.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
