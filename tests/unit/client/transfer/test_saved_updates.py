from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from potluck.client.transfer.saved_updates import (
    KEEP_AFTER_DEADLINE_SECONDS,
    KeptUpdate,
    KeptUpdates,
)

NOW = 1_800_000_000.0


def make(name: str = "a", **changes: Any) -> KeptUpdate:
    values = {
        "update_id": name,
        "client_id": "client-0",
        "run_id": "run",
        "round": 1,
        "blake3": "0" * 64,
        "size": 4,
        "encoding": 1,
        "delta": False,
        "compressed": False,
        "report": {"samples": 10, "steps": 2, "seconds": 0.5, "loss": 1.5},
        "expires": NOW,
    }
    return KeptUpdate.model_validate(values | changes)


def keep(updates: KeptUpdates, update: KeptUpdate) -> None:
    updates.path(update.update_id).write_bytes(bytes(update.size))
    updates.keep(update)


def test_an_update_outlives_the_process(tmp_path: Path) -> None:
    keep(KeptUpdates(tmp_path, now=NOW), make("run/1/client-0"))
    again = KeptUpdates(tmp_path, now=NOW)
    assert again.find("run/1/client-0") == make("run/1/client-0")
    assert again.path("run/1/client-0").read_bytes() == bytes(4)


@pytest.mark.parametrize("half", ["*.json", "*.safetensors"])
def test_half_an_update_is_swept_away(tmp_path: Path, half: str) -> None:
    keep(KeptUpdates(tmp_path, now=NOW), make())
    next(tmp_path.glob(half)).unlink()
    assert KeptUpdates(tmp_path, now=NOW).find("a") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [b"", b"{", b'{"update_id": "a"}', b"\xff\xfe"])
def test_a_broken_record_is_swept_away(tmp_path: Path, damage: bytes) -> None:
    keep(KeptUpdates(tmp_path, now=NOW), make())
    next(tmp_path.glob("*.json")).write_bytes(damage)
    assert KeptUpdates(tmp_path, now=NOW).find("a") is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_length_is_swept_away(tmp_path: Path) -> None:
    updates = KeptUpdates(tmp_path, now=NOW)
    keep(updates, make())
    updates.path("a").write_bytes(b"abc")
    assert KeptUpdates(tmp_path, now=NOW).find("a") is None


def test_what_expired_long_ago_is_swept_away(tmp_path: Path) -> None:
    keep(KeptUpdates(tmp_path, now=NOW), make())
    later = NOW + KEEP_AFTER_DEADLINE_SECONDS
    assert KeptUpdates(tmp_path, now=later - 1).find("a") is not None
    assert KeptUpdates(tmp_path, now=later).find("a") is None


def test_a_settled_round_takes_that_clients_updates(tmp_path: Path) -> None:
    updates = KeptUpdates(tmp_path, now=NOW)
    kept = [
        make("other run", run_id="other"),
        make("other client", client_id="client-1"),
        make("later", round=3),
    ]
    for update in (make("first"), make("second", round=2), *kept):
        keep(updates, update)
    updates.drop_rounds(run_id="run", client_id="client-0", through=2)
    assert [updates.find(name) for name in ("first", "second")] == [None, None]
    assert [updates.find(update.update_id) for update in kept] == kept
    assert len(list(tmp_path.iterdir())) == 2 * len(kept)


def test_any_id_is_a_file_in_the_folder(tmp_path: Path) -> None:
    updates = KeptUpdates(tmp_path, now=NOW)
    for name in ("../../escape", "a" * 5000, "", "\0", "ü/é"):
        assert updates.path(name).parent == tmp_path
        keep(updates, make(name))
        assert updates.find(name) is not None


def test_of_a_client_in_a_run_only_the_one_that_is_asked_for_is_kept(tmp_path: Path) -> None:
    updates = KeptUpdates(tmp_path, now=NOW)
    others = {"client": {"client_id": "client-1"}, "run": {"run_id": "other"}}
    for name in ("a", "b", *others):
        keep(updates, make(name, round=5 if name == "b" else 1, **others.get(name, {})))
    updates.drop_others("run", "client-0", update_id="a")
    assert [name for name in ("a", "b", *others) if updates.find(name)] == ["a", *others]


def test_what_nobody_came_back_for_goes(tmp_path: Path) -> None:
    updates = KeptUpdates(tmp_path, now=NOW)
    keep(updates, make("old"))
    keep(updates, make("new", expires=NOW + 1.0))
    updates.drop_expired(now=NOW + KEEP_AFTER_DEADLINE_SECONDS)
    assert (updates.find("old"), updates.find("new")) == (None, make("new", expires=NOW + 1.0))
