"""Clients, quarantine and profiles, on both databases."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from support.stored import AT, RUN, begun_run, committed, see_client, selected

from potluck.common.errors import NotFoundError, ProtocolError
from potluck.server.store import (
    AttemptKey,
    ClientRow,
    ClientSeen,
    Profile,
    QuarantineRow,
    Store,
)

LATER = AT + timedelta(days=1)
PROFILE = Profile(
    client_id="a",
    data_epoch=1,
    signal="label_counts",
    parameters_json='{"epsilon":1.0}',
    payload_json='{"counts":[1.5,-0.25]}',
    signature=b"\x00\xff" * 32,
    received_at=AT,
)


def test_store_records_when_and_where_each_client_was_last_seen(store: Store) -> None:
    assert store.clients() == []
    store.see_clients([])
    see_client(store, "b", "h1")
    store.see_clients(
        [
            ClientSeen(client_id="b", host_id="h2", device="cuda:0", at=LATER),
            ClientSeen(client_id="a.1", host_id="h1", device="cpu", at=LATER),
        ]
    )
    first, second = store.clients()
    assert first.client_id == "a.1"
    assert second == ClientRow(
        client_id="b",
        host_id="h2",
        device="cuda:0",
        first_seen_at=AT,
        last_seen_at=LATER,
        selected=0,
        included=0,
        quarantine=None,
    )


def test_selection_counts_include_all_runs_and_attempts(store: Store) -> None:
    store.see_clients(
        [ClientSeen(client_id=c, host_id="h", device="cpu", at=AT) for c in ("a", "b", "d")]
    )
    begun_run(store)
    begun_run(store, "other")
    selected(store, AttemptKey(RUN.run_id, 1, 1))
    store.abandon_attempt(AttemptKey(RUN.run_id, 1, 1), "no quorum")
    committed(store, AttemptKey(RUN.run_id, 1, 2))
    committed(store, AttemptKey("other", 1, 1))
    counts = {row.client_id: (row.selected, row.included) for row in store.clients()}
    assert counts == {"a": (3, 2), "b": (3, 0), "d": (0, 0)}


def test_clients_are_listed_in_pages(store: Store) -> None:
    names = [f"client-{number}" for number in range(7)]
    store.see_clients([ClientSeen(client_id=c, host_id="h", device="cpu", at=AT) for c in names])
    store.see_clients([ClientSeen(client_id="b", host_id="h", device="cpu", at=AT)])
    begun_run(store)
    committed(store, AttemptKey(RUN.run_id, 1, 1))
    pages = [store.clients(limit=3)]
    while len(pages[-1]) == 3:
        pages.append(store.clients(after=pages[-1][-1].client_id, limit=3))
    assert [len(page) for page in pages] == [3, 3, 2]
    found = [row for page in pages for row in page]
    assert sorted(found, key=lambda row: row.client_id) == store.clients()
    assert {row.client_id: row.selected for row in found} == {"b": 1} | dict.fromkeys(names, 0)


def test_quarantined_client_is_listed_until_it_is_readmitted(store: Store) -> None:
    see_client(store)
    store.quarantine("a", "claims impossible counts", AT)
    store.quarantine("a", "claims zero classes", LATER)
    store.quarantine("0-never-seen", "stolen key", AT)
    assert store.quarantined() == [
        QuarantineRow(client_id="0-never-seen", reason="stolen key", at=AT),
        QuarantineRow(client_id="a", reason="claims zero classes", at=LATER),
    ]
    assert [row.quarantine for row in store.clients()] == ["claims zero classes"]
    store.readmit("a")
    assert [row.quarantine for row in store.clients()] == [None]
    with pytest.raises(
        NotFoundError, match="'a' is not in quarantine; clients in quarantine: 0-never-seen"
    ):
        store.readmit("a")


def test_profile_is_stored_unchanged_and_once(store: Store) -> None:
    store.put_profile(PROFILE)
    store.put_profile(replace(PROFILE, received_at=LATER))
    assert store.profiles() == [PROFILE]


@pytest.mark.parametrize(
    "other",
    [
        replace(PROFILE, payload_json='{"counts":[1.5,-0.5]}'),
        replace(PROFILE, signature=None),
        replace(PROFILE, signature=b"other"),
    ],
)
def test_second_differing_profile_of_a_data_epoch_is_refused(store: Store, other: Profile) -> None:
    store.put_profile(PROFILE)
    with pytest.raises(ProtocolError, match="client a: label_counts of data epoch 1 refused"):
        store.put_profile(other)
    assert store.profiles() == [PROFILE]


@pytest.mark.parametrize("wrong", ["", "{", "nothing", '{"a":1}{'])
def test_profile_that_is_not_json_is_refused(store: Store, wrong: str) -> None:
    with pytest.raises(ProtocolError, match="payload_json is not JSON"):
        store.put_profile(replace(PROFILE, payload_json=wrong))
    with pytest.raises(ProtocolError, match="parameters_json is not JSON"):
        store.put_profile(replace(PROFILE, parameters_json=wrong))
    assert store.profiles() == []


def test_profiles_are_filtered_by_signal_run_and_client(store: Store) -> None:
    begun_run(store)  # with the roster a, b, c
    triplet = replace(PROFILE, signal="triplet", signature=None)
    newer = replace(PROFILE, data_epoch=2)
    finer = replace(PROFILE, parameters_json='{"epsilon":2.0}')
    outside = replace(PROFILE, client_id="z")
    for profile in (outside, newer, finer, triplet, PROFILE):
        store.put_profile(profile)
    assert store.profiles() == [PROFILE, finer, newer, triplet, outside]
    assert store.profiles(signal="triplet") == [triplet]
    assert store.profiles(run_id=RUN.run_id, signal="label_counts") == [PROFILE, finer, newer]
    assert store.profiles(client_ids=["z", "unknown"]) == [outside]
    assert store.profiles(client_ids=[]) == []
    assert store.profiles(run_id="none") == []
