"""The dashboards that come with Potluck; `make pages` writes their JSON files.

Edit this package, not the JSON files: a test checks that they are what the package makes.
"""

from __future__ import annotations

import json

from dashboards.federation_dashboard import FEDERATION
from dashboards.grafana_json import dashboard_json
from dashboards.hosts_dashboard import HOSTS
from dashboards.round_dashboard import ROUND
from dashboards.selection_dashboard import SELECTION

DASHBOARDS = {
    "federation": FEDERATION,
    "round": ROUND,
    "selection": SELECTION,
    "hosts": HOSTS,
}


def dashboard_files() -> dict[str, str]:
    """Return the JSON text of each dashboard, by file name."""
    return {
        f"{name}.json": json.dumps(dashboard_json(dashboard), indent=2, ensure_ascii=False) + "\n"
        for name, dashboard in DASHBOARDS.items()
    }
