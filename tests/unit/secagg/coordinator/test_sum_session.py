"""Certificates of earlier sums, as the coordinator keeps and shows them."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from support.secure_sums import Federation

from potluck.common.disclosure import SumKind
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.secagg.coordinator.sum_session import SumTerms, earlier_certificates
from potluck.secagg.protocol import CoordinatorStep, SetCertificate, coordinator, encode
from potluck.server.store import Store

FEDERATION = Federation(clients=6)
MANY = 10_000


def terms(**changes: Any) -> SumTerms:
    values: dict[str, Any] = {
        "run_id": "run",
        "kind": SumKind.TOTAL,
        "subject": "label counts",
        "task": rpc.Plugin(),
        "task_reference": "{}",
        "classes": 5,
        "least_hosts": 4,
        "colluding_hosts": None,
        "stage_seconds": 1.0,
    }
    return SumTerms(**(values | changes))


def certificate(number: int, clients: Collection[str] = FEDERATION.names) -> SetCertificate:
    return SetCertificate(
        session_id=f"{number:032x}",
        clients=tuple(clients),
        roster_sha256="00" * 32,
        sharers_sha256="00" * 32,
        signatures=dict.fromkeys(clients, "00" * 64),
    )


async def invitation(store: Store, asked: SumTerms) -> int:
    """Return the size in bytes of the invitation to one more sum."""

    async def in_store(call: Callable[[Store], Any]) -> Any:
        return call(store)

    shown = await earlier_certificates(in_store, asked, FEDERATION.names)
    step: CoordinatorStep = coordinator.invite(
        FEDERATION.header(), FEDERATION.hosts, FEDERATION.root, certified=shown
    )
    return len(encode(step.messages[0][1]))


def keep(store: Store, inputs: str, each: SetCertificate) -> None:
    store.keep_certificate(inputs, each.session_id, each.model_dump_json())


async def test_invitation_size_is_independent_of_the_number_of_earlier_sums(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    with Store.open(f"sqlite:///{path}") as store:
        before = await invitation(store, terms())
        for number in range(8):
            keep(store, terms().inputs, certificate(number))
            keep(store, terms().inputs, certificate(number))  # changes nothing
        after_eight = await invitation(store, terms())
    assert before < after_eight < 8_000
    rows = (
        (number + 1, each.session_id, terms().inputs, each.model_dump_json())
        for number in range(8, MANY)
        for each in [certificate(number)]
    )
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.executemany(
            "INSERT INTO sum_certificates (number, session_id, inputs, certificate)"
            " VALUES (?, ?, ?, ?)",
            rows,
        )
    with Store.open(f"sqlite:///{path}") as store:
        assert len(store.certificates(terms().inputs, limit=2 * MANY)) == MANY
        assert await invitation(store, terms()) == after_eight
        assert await invitation(store, terms(epsilon=1.0)) == before
        assert await invitation(store, terms(kind=SumKind.STEPWISE)) == before


async def test_invitation_contains_only_certificates_of_the_same_inputs_and_clients(
    tmp_path: Path,
) -> None:
    update = terms(kind=SumKind.UPDATE, model="aa")
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite3'}") as store:
        before = await invitation(store, update)
        keep(store, terms().inputs, certificate(1))
        keep(store, terms(kind=SumKind.UPDATE, model="bb").inputs, certificate(2))
        keep(store, update.inputs, certificate(3, ["x", "y"]))
        assert await invitation(store, update) == before
        keep(store, update.inputs, certificate(4))
        assert await invitation(store, update) > before
