"""Generate the table of what leaves a client, for each kind of run.

`tools/reference_pages.py` writes it into the page for owners of data. Each kind of run is planned
as the coordinator plans a run. The table's entries are derived from the instruction that clients
would receive, from the parts of a report that the coordinator reads, and from the settings that it
refuses before the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from potluck.client.private_training import hides_update
from potluck.common.errors import ConfigurationError
from potluck.rpc.v1 import coordinator_pb2, transfer_pb2
from potluck.secagg.masked_vectors import metric_names
from potluck.server.hosts.instructions import check_instruction
from potluck.server.plan.plan import RunPlan, draw_up
from potluck.server.updates.report_checks import report_said

RUNS: Final = {
    "plain run": ("", ""),
    "masks": ("secure_aggregation = true\n", ""),
    'noise, `unit = "record"`': (
        "",
        "[privacy]\nnoise_multiplier = 1.0\nanswer_noise_multiplier = 20.0\n",
    ),
    'masks and noise, `unit = "record"`': (
        "secure_aggregation = true\n",
        "[privacy]\nnoise_multiplier = 1.0\nanswer_noise_multiplier = 20.0\n",
    ),
    'masks and noise, `unit = "client"`': (
        "secure_aggregation = true\n",
        '[privacy]\nunit = "client"\nnoise_multiplier = 5.0\n',
    ),
    'noise at the coordinator, `unit = "client"`': (
        "",
        '[privacy]\nunit = "client"\nnoise = "coordinator"\nnoise_multiplier = 5.0\n',
    ),
}
"""Settings of each kind of run by its title, as TOML: top-level keys, then tables."""
_TASK = 'clients_per_round = 20\n[task]\nname = "digits"\n'
_BY_OWNER = "{} †"
"""Form of an entry about data that leave only if the client's owner allows it."""
_IN_SUM = "in a sum over hosts"
_REFUSED = "refused"


@dataclass(frozen=True)
class Configuration:
    """The settings of one kind of run."""

    first: str
    tables: str

    def plan(self, selector: str = "uniform", profiles: str = "") -> RunPlan:
        """Return the plan of a run. Raises ConfigurationError if it is refused."""
        tables = f'[selector]\nname = "{selector}"\n[profiles]\n{profiles}{self.tables}'
        return draw_up(f"{self.first}{_TASK}{tables}", source="run file")

    def allows(self, selector: str, profiles: str = "") -> bool:
        """Return True if a run with this selector would start."""
        try:
            self.plan(selector, profiles)
        except ConfigurationError:
            return False
        return True

    @property
    def training(self) -> coordinator_pb2.Train:
        """The training instruction that clients would receive."""
        return check_instruction(self.plan(), "id", "run", 1, "client", b"").check.train

    @property
    def masked(self) -> bool:
        """True if updates leave in sums only."""
        return self.training.encoding == transfer_pb2.ENCODING_MASKED_UINT32

    @property
    def noisy(self) -> bool:
        """True if updates have noise when they leave the client."""
        return self.training.HasField("privacy")

    @property
    def hides_updates(self) -> bool:
        """True if clients add noise that hides their whole update."""
        return hides_update(self.training)

    @property
    def noised_later(self) -> bool:
        """True if the noise is added later, by the coordinator, to sums of updates."""
        privacy = self.plan().run_file.privacy
        return privacy is not None and privacy.at_coordinator


def _update(run: Configuration) -> str:
    seen = _IN_SUM if run.masked else "each client's own"
    if run.noised_later:
        return f"{seen}; the models have noise that hides a client"
    noise = f", with noise that hides a {run.training.privacy.unit}" if run.noisy else ""
    return f"{seen}{noise}"


def _samples(run: Configuration) -> str:
    if run.masked:
        return "no" if run.hides_updates else _IN_SUM
    return "as `weighting` allows"


def _loss(run: Configuration) -> str:
    if run.masked:
        return _IN_SUM if metric_names(normalized=False, noisy=run.noisy) else "no"
    report = transfer_pb2.TrainingReport(samples=1, loss=0.5)
    if report_said(run.plan(), report).loss is not None:
        return "exact"
    return "exact; the coordinator drops it" if run.noised_later else "no"


def _label_counts(run: Configuration) -> str:
    exact = run.allows("fedentopt", 'disclosure = "exact"\n')
    return _BY_OWNER.format("once, noisy or exact" if exact else "once, with noise")


def _sums(run: Configuration) -> str:
    exact = run.allows("fedentopt", 'disclosure = "cells"\nsum_mode = "exact"\n')
    return _BY_OWNER.format("once, noisy or exact" if exact else "once, with noise")


def _other_profiles(run: Configuration) -> str:
    found = [name for name in ("feddiverse", "known-matrix") if run.allows(name)]
    return _BY_OWNER.format("once, noisy or exact") if found else _REFUSED


def _answers(run: Configuration) -> str:
    if not run.allows("pow-d"):
        return _REFUSED
    return _BY_OWNER.format("with noise" if run.noisy else "exact")


def _reports(run: Configuration) -> str:
    if not run.allows("oort"):
        return _REFUSED
    return "with noise" if run.noisy else "exact"


def _failures(run: Configuration) -> str:
    if run.masked:
        return "no" if run.hides_updates else "their number, without reasons"
    return "one fixed sentence" if run.noisy else "one line of text"


def _always(text: str) -> Callable[[Configuration], str]:
    return lambda _: text


ROWS: Final[dict[str, Callable[[Configuration], str]]] = {
    "model update": _update,
    "number of training samples": _samples,
    "training loss and metrics": _loss,
    "label counts, for selectors that need them": _label_counts,
    "label counts in secure sums": _sums,
    "triplets and matrices, for selectors that need them": _other_profiles,
    "answers to a selector's questions": _answers,
    "numbers that a selector wants with updates": _reports,
    "counts on held-out samples": _always(_BY_OWNER.format("exact")),
    "failures of a training": _failures,
    "times of messages, number of rounds": _always("yes"),
}
"""Functions that return a row's entry for a kind of run, by the row's title."""


def leaving_table() -> str:
    """Return the table in the Markdown of the docs."""
    runs = [Configuration(*settings) for settings in RUNS.values()]
    lines = [["leaves the client", *RUNS], ["---"] * (1 + len(RUNS))]
    lines += [[title, *map(cell, runs)] for title, cell in ROWS.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
