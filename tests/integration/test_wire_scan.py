"""A coordinator receives, sends, logs, exports and stores no label count of a client.

Each count is a number of 40 bits that occurs nowhere else. The test searches the coordinator's own
messages, inside TLS. The same search finds counts that are sent without masks.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.sum_federation import Members, holding, sum_federation
from support.wire_recording import Recording, forms, traces

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.training.device import TrainingDevice
from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import MeasuredParty
from potluck.secagg.protocol import Masking
from potluck.server.store import RunState

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENTS = 8
RUN_FILE = """
rounds = 1
clients_per_round = 4
expected_clients = 8
task = {{name = "digits", clients = 8}}
selector = {{name = "{selector}"}}
training = {{steps = 1}}
[profiles]
sum_mode = "exact"
disclosure = "{disclosure}"
"""
OPEN = DisclosurePolicy(exact_label_counts=True, exact_sums=True)


def salted(names: Iterable[str]) -> dict[str, list[int]]:
    """Return unique counts, each of which uses all 40 bits that a count may have."""
    generator = random.Random(40)
    return {name: [generator.randrange(2**39, 2**40) for _ in range(10)] for name in names}


@dataclass
class Scan:
    """Bytes that a run left, by place; the numbers to look for; sums the coordinator received."""

    places: Mapping[str, bytes]
    counts: Mapping[str, list[int]]
    sums: list[tuple[int, ...]]

    @property
    def found(self) -> set[tuple[str, str]]:
        return traces([n for counts in self.counts.values() for n in counts], self.places)


async def scanned(
    members: Members,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    *,
    selector: str = "kl",
    disclosure: str = "cells",
) -> Scan:
    """Run clients with salted counts; collect all bytes that the coordinator handles."""
    counts = salted(members.names)
    recording = Recording(spool=folder / "coordinator" / "spool")
    instruments = Instruments(MeasuredParty.COORDINATOR)
    capfd.readouterr()
    monkeypatch.setattr(TrainingDevice, "label_counts", lambda _, __, client: counts[client])
    async with sum_federation(
        members, folder, instruments=instruments, interceptors=[recording]
    ) as federation:
        await federation.start(disclosure=OPEN)
        with holding(monkeypatch, counts):
            text = RUN_FILE.format(selector=selector, disclosure=disclosure)
            row = await federation.finished(text)
            metrics = instruments.exposition()
        assert row.state is RunState.FINISHED, row.reason
        sums = [each.total for each in await federation.stored() if each.total is not None]
    places = {
        "received": b"\0".join(each for some in recording.received.values() for each in some),
        "sent": b"\0".join(each for some in recording.sent.values() for each in some),
        "spool": b"\0".join(recording.spooled.values()),
        "store": _files(folder / "coordinator"),
        "hosts": b"".join(_files(folder / f"host-{number}") for number in range(CLIENTS)),
        "metrics": metrics,
        "logs": "".join(capfd.readouterr()).encode(),
    }
    assert {"Attend", "SubmitUpdate", "FetchModel"} <= recording.received.keys()
    # The searched places are not empty, so finding nothing has a meaning.
    least = {"received": 20_000, "sent": 20_000, "spool": 10_000, "store": 20_000, "logs": 2_000}
    assert {place: len(places[place]) >= size for place, size in least.items()} == dict.fromkeys(
        least, True
    )
    assert b"potluck_" in metrics
    return Scan(places, counts, sums)


def _files(folder: Path) -> bytes:
    return b"\0".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


async def test_coordinator_receives_and_stores_no_label_count(
    members: Members,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    scan = await scanned(members, tmp_path, monkeypatch, capfd)
    assert scan.found == set()
    columns = zip(*scan.counts.values(), strict=True)
    assert scan.sums == [tuple(sum(column) for column in columns)]  # the sum of these counts
    assert traces(scan.sums[0], scan.places) >= {("store", "decimal")}  # the sum itself is stored


async def test_scan_finds_counts_without_masks(
    members: Members,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def unmasked(self: Masking, vector: str, words: Any, first: int = 0) -> None:
        """Add no masks."""

    monkeypatch.setattr(Masking, "add_masks", unmasked)
    scan = await scanned(members, tmp_path, monkeypatch, capfd)
    assert scan.found == {("received", "little-endian")}
    assert not np.array_equal(scan.sums, [np.sum(list(scan.counts.values()), axis=0)])


async def test_scan_finds_disclosed_counts(
    members: Members,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    scan = await scanned(members, tmp_path, monkeypatch, capfd, disclosure="exact")
    assert {("received", "decimal"), ("store", "decimal"), ("hosts", "decimal")} <= scan.found


@pytest.mark.parametrize("place", ["received", "sent", "spool", "store", "metrics", "logs"])
async def test_scan_finds_every_form_in_every_place(place: str) -> None:
    number = 2**39 + 12_345_678_901
    rest = random.Random(1).randbytes(1 << 16)
    for form, written in forms(number).items():
        places = {"received": rest, place: rest[:999] + written + rest[999:]}
        assert (place, form) in traces([number], places)
    assert traces([number], {place: rest}) == set()
