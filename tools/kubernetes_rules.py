"""Write the alerts and recording rules as a PrometheusRule for the Prometheus operator."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

_RULES = Path(__file__).parents[1] / "deploy" / "assets" / "prometheus"
_HEAD = """# Made of deploy/assets/prometheus/*.rules.yml by `make pages`: edit those.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: potluck
  labels: {app.kubernetes.io/name: potluck}
"""


def kubernetes_rules() -> str:
    """Return the text of deploy/assets/kubernetes/base/rules.yaml."""
    files = (_RULES / f"{name}.rules.yml" for name in ("recording", "alerts"))
    groups = [group for path in files for group in yaml.safe_load(path.read_text())["groups"]]
    spec = yaml.safe_dump({"spec": {"groups": groups}}, sort_keys=False, width=10_000)
    return f"{_HEAD}{spec}"


if __name__ == "__main__":
    sys.stdout.write(kubernetes_rules())
