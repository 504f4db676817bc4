"""A module that can't be imported twice in a process, like libraries that register kernels."""

from __future__ import annotations

import sys

import potluck_crash_points
import potluck_crash_trainers

if hasattr(sys, "potluck_crash_imported"):
    raise ImportError("potluck_crash_imported is registered already")
sys.potluck_crash_imported = True  # type: ignore[attr-defined]  # kept if the module is dropped
potluck_crash_points.reach(f"import-{potluck_crash_trainers.importing}")
STEP = 0.5
