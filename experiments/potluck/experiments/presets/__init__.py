"""The settings of papers as run files to start from; our assumptions are marked.

A preset has the paper's own scale. An assumption is a value that we chose because the paper gives
none or several, or because we have not read it. Assumptions are shown when a preset is printed or
used. Each preset is a TOML file of this folder. Imports errors only. Input: a name. Output: a run
file.
"""

from potluck.experiments.presets.catalogue import (
    Assumption,
    Preset,
    preset_named,
    preset_names,
    preset_run_file,
)

__all__ = ["Assumption", "Preset", "preset_named", "preset_names", "preset_run_file"]
