"""The settings of papers as run files to start from; assumptions of ours are marked.

A preset is the paper's own scale. An assumption is a value that we chose because the paper names
none, or names several, or because we have not read it: everybody who prints or uses a preset gets
to see them. Each is a TOML file of this folder. Imports errors only; a name comes in, a run file
goes out.
"""

from potluck.experiments.presets.catalogue import preset_named, preset_names, preset_run_file
from potluck.experiments.presets.preset import Assumption, Preset

__all__ = ["Assumption", "Preset", "preset_named", "preset_names", "preset_run_file"]
