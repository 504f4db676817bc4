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


def test_saved_update_is_found_after_a_restart(tmp_path: Path) -> None:
    keep(KeptUpdates(tmp_path, now=NOW), make("run/1/client-0"))
    again = KeptUpdates(tmp_path, now=NOW)
    assert again.find("run/1/client-0") == make("run/1/client-0")
    assert again.path("run/1/client-0").read_bytes() == bytes(4)


@pytest.mark.parametrize("half", ["*.json", "*.safetensors"])
def test_incomplete_saved_update_is_deleted(tmp_path: Path, half: str) -> None:
    keep(KeptUpdates(tmp_path, now=NOW), make())
    next(tmp_path.glob(half)).unlink()
    assert KeptUpdates(tmp_path, now=NOW).find("a") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [b"", b"{", b'{"update_id": "a"}', b"\xff\xfe"])
def test_saved_update_with_a_damaged_record_is_deleted(tmp_path: Path, damage: bytes) -> None:
    keep(KeptUpdates(tmp_path, now=NOW), make())
    next(tmp_path.glob("*.json")).write_bytes(damage)
    assert KeptUpdates(tmp_path, now=NOW).find("a") is None
    assert list(tmp_path.iterdir()) == []


def test_saved_update_of_wrong_length_is_deleted(tmp_path: Path) -> None:
    updates = KeptUpdates(tmp_path, now=NOW)
    keep(updates, make())
    updates.path("a").write_bytes(b"abc")
    assert KeptUpdates(tmp_path, now=NOW).find("a") is None


def test_saved_update_is_deleted_long_after_its_deadline(tmp_path: Path) -> None:
    keep(KeptUpdates(tmp_path, now=NOW), make())
    later = NOW + KEEP_AFTER_DEADLINE_SECONDS
    assert KeptUpdates(tmp_path, now=later - 1).find("a") is not None
    assert KeptUpdates(tmp_path, now=later).find("a") is None


def test_settled_round_deletes_saved_updates_of_that_client_and_run(tmp_path: Path) -> None:
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


def test_saved_update_with_any_id_is_a_file_in_the_folder(tmp_path: Path) -> None:
    updates = KeptUpdates(tmp_path, now=NOW)
    for name in ("../../escape", "a" * 5000, "", "\0", "ü/é"):
        assert updates.path(name).parent == tmp_path
        keep(updates, make(name))
        assert updates.find(name) is not None


def test_only_the_requested_saved_update_of_a_client_in_a_run_is_kept(tmp_path: Path) -> None:
    updates = KeptUpdates(tmp_path, now=NOW)
    others = {"client": {"client_id": "client-1"}, "run": {"run_id": "other"}}
    for name in ("a", "b", *others):
        keep(updates, make(name, round=5 if name == "b" else 1, **others.get(name, {})))
    updates.drop_others("run", "client-0", update_id="a")
    assert [name for name in ("a", "b", *others) if updates.find(name)] == ["a", *others]


def test_expired_saved_update_is_dropped(tmp_path: Path) -> None:
    updates = KeptUpdates(tmp_path, now=NOW)
    keep(updates, make("old"))
    keep(updates, make("new", expires=NOW + 1.0))
    updates.drop_expired(now=NOW + KEEP_AFTER_DEADLINE_SECONDS)
    assert (updates.find("old"), updates.find("new")) == (None, make("new", expires=NOW + 1.0))
