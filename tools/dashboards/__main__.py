"""Writes the JSON files into the folder in the first argument."""

from __future__ import annotations

import sys
from pathlib import Path

from dashboards import dashboard_files

for name, text in dashboard_files().items():
    (Path(sys.argv[1]) / name).write_text(text)
