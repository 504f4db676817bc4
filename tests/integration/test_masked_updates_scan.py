"""A coordinator receives, stores, logs and exports nothing of a client's masked update.

Each client's update, number of samples and loss are numbers that occur nowhere else. The test
searches the coordinator's own messages, inside TLS. The same search finds all these numbers if
clients add no masks.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.sum_federation import Members, sum_federation
from support.wire_recording import Recording, traces

from potluck.client.training.unmasked_update import Differences
from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import MeasuredParty
from potluck.common.updates.update_report import UpdateReport
from potluck.secagg.host.masked_updates import write_masked
from potluck.secagg.protocol import Masking
from potluck.secagg.protocol.vectors.updates import BodyEncoder
from potluck.server.store import RunState

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENTS = 6
RUN_FILE = f"""
secure_aggregation = true
rounds = 1
clients_per_round = {CLIENTS}
expected_clients = {CLIENTS}
task = {{name = "digits", clients = {CLIENTS}}}
training = {{steps = 1}}
masking = {{weight_cap = 2147483648}}
"""
PLACES = ("received", "spool", "store", "logs", "metrics")


class Salted:
    """Values that each client sends in place of its training's results."""

    def __init__(self, clients: int) -> None:
        generator = random.Random(32)
        self.steps = [np.float32(generator.uniform(0.1, 0.4)) for _ in range(clients)]
        self.samples = [generator.randrange(2**30, 2**31) for _ in range(clients)]
        self.losses = [generator.uniform(1, 9) for _ in range(clients)]
        self.words = dict[int, np.uint32]()

    def write(self, path: Path, update: Differences, _: UpdateReport, masking: Masking) -> Any:
        client = int(path.parts[-3].removeprefix("host-"))
        update.body[:] = self.steps[client]
        weight = self.samples[client]
        encoder = BodyEncoder(masking.header, masking.header.vector("body"), CLIENTS, weight)
        word = np.empty(1, "<u4")
        encoder.encode(update.body[:1], word)
        self.words[client] = word[0]
        numbers = UpdateReport(samples=weight, loss=self.losses[client], normalizer=1.0)
        return write_masked(path, update, numbers, masking)

    def found(self, places: dict[str, bytes]) -> set[tuple[str, str]]:
        """Return each place that holds a single client's value, with the kind of value."""
        found = {(place, "samples") for place, _ in traces(self.samples, places)}
        for place, content in places.items():
            for loss in self.losses:
                if np.float64(loss).tobytes() in content or repr(loss).encode() in content:
                    found.add((place, "loss"))
            for step in self.steps:
                if step.tobytes() * 2 in content:  # all numbers of the update are equal
                    found.add((place, "update"))
            for word in self.words.values():
                if word.tobytes() * 2 in content:
                    found.add((place, "words"))
        return found


async def scanned(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> set[tuple[str, str]]:
    """Run all clients; return the single clients' values found afterwards."""
    members, salted = Members.make(folder / "members", CLIENTS), Salted(CLIENTS)
    recording = Recording(spool=folder / "coordinator" / "spool")
    instruments = Instruments(MeasuredParty.COORDINATOR)
    monkeypatch.setattr("potluck.secagg.host.sum_sessions.write_masked", salted.write)
    capfd.readouterr()
    async with sum_federation(
        members, folder, instruments=instruments, interceptors=[recording]
    ) as federation:
        await federation.start()
        row = await federation.finished(RUN_FILE)
        metrics = instruments.exposition()
    assert row.state is RunState.FINISHED, row.reason
    coordinator = folder / "coordinator"
    files = [path.read_bytes() for path in coordinator.rglob("*") if path.is_file()]
    places = {
        "received": b"\0".join(each for some in recording.received.values() for each in some),
        "spool": b"\0".join(recording.spooled.values()),
        "store": b"\0".join(files),
        "logs": "".join(capfd.readouterr()).encode(),
        "metrics": metrics,
    }
    assert len(recording.spooled) >= CLIENTS  # some were copied while they arrived
    assert min(len(places[place]) for place in PLACES) > 1000
    assert len(salted.words) == CLIENTS
    return salted.found(places)


async def test_coordinator_receives_and_stores_nothing_of_a_masked_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert await scanned(tmp_path, monkeypatch, capfd) == set()


async def test_scan_finds_updates_without_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def unmasked(self: Masking, vector: str, words: Any, first: int = 0) -> None:
        """Add no masks."""

    def removed(*_: Any) -> None:
        """Remove no masks, since there are none."""

    monkeypatch.setattr(Masking, "add_masks", unmasked)
    monkeypatch.setattr("potluck.secagg.protocol.Unmasking.remove", removed)
    found = await scanned(tmp_path, monkeypatch, capfd)
    assert found >= {("received", "words"), ("spool", "words"), ("spool", "samples")}
