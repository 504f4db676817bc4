from __future__ import annotations

from pathlib import Path

from potluck.common.real_time import YEAR_SECONDS
from potluck.relay.expected_updates import GRACE_SECONDS, ExpectedUpdates
from potluck.relay.held_updates import HeldUpdate, HeldUpdates
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2

NOW = 1e9


def held(update_id: str, *, size: int = 3, expires: float = NOW + 1) -> HeldUpdate:
    header = transfer_pb2.UpdateHeader(
        update_id=update_id, client_id="client-0", run_id="run", blake3="a" * 64, size=size
    )
    return HeldUpdate(header=header, expires=expires)


def kept(folder: Path, *updates: HeldUpdate, content: bytes = b"abc") -> None:
    updates_here = HeldUpdates(folder, now=NOW)
    for each in updates:
        updates_here.path(each.header.update_id).write_bytes(content)
        updates_here.keep(each)


def test_complete_held_update_is_found_after_a_restart(tmp_path: Path) -> None:
    kept(tmp_path, held("run/1/1/../../etc"))
    again = HeldUpdates(tmp_path, now=NOW)
    assert again.all() == [held("run/1/1/../../etc")]
    assert again.find("run/1/1/../../etc", "a" * 64) == held("run/1/1/../../etc")
    assert again.find("run/1/1/../../etc", "b" * 64) is None
    again.drop("run/1/1/../../etc")
    assert not list(tmp_path.iterdir())


def test_held_update_whose_file_can_not_be_deleted_is_dropped(tmp_path: Path) -> None:
    kept(tmp_path, held("stuck"))
    updates = HeldUpdates(tmp_path, now=NOW)
    path = updates.path("stuck")
    path.unlink()
    path.mkdir()  # so that `unlink` fails
    updates.drop("stuck")
    assert not updates.holds("stuck")


def test_damaged_or_expired_held_updates_are_deleted(tmp_path: Path) -> None:
    kept(tmp_path, held("short", size=4), held("late", expires=NOW), held("without a file"))
    HeldUpdates(tmp_path, now=NOW - 1).path("without a file").unlink()
    (tmp_path / "garbage.json").write_text('{"header": "zz"}')
    (tmp_path / "list.json").write_text("[]")
    assert len(HeldUpdates(tmp_path, now=NOW)) == 0
    assert not list(tmp_path.iterdir())


def test_partial_files_are_kept_for_a_day(tmp_path: Path) -> None:
    part = tmp_path / "x.safetensors.part"
    part.write_bytes(b"ab")
    HeldUpdates(tmp_path, now=part.stat().st_mtime + 3600)
    assert part.exists()
    HeldUpdates(tmp_path, now=part.stat().st_mtime + 90_000)
    assert not part.exists()


def training(update_id: str, client: str = "client-0") -> rpc.Instruction:
    instruction = rpc.Instruction(id=update_id, client_id=client, run_id="run", train=rpc.Train())
    instruction.time_left.FromSeconds(60)
    return instruction


def test_only_the_newest_training_of_a_client_is_expected() -> None:
    dropped: list[str] = []
    expected = ExpectedUpdates(lambda: NOW, dropped.append, lambda _: None)
    expected.see(training("run/1/1/client-0"), "host-0")
    expected.see(training("run/1/1/client-1", "client-1"), "host-1")
    found = expected.find("run/1/1/client-0", "client-0", "run")
    assert found is not None
    assert found.expires == NOW + 60 + GRACE_SECONDS
    assert expected.find("run/1/1/client-0", "client-1", "run") is None
    expected.see(training("run/1/1/client-0"), "host-0")  # the same instruction, sent again
    assert dropped == []
    expected.see(training("run/2/1/client-0"), "host-0")
    assert dropped == ["run/1/1/client-0"]
    assert expected.find("run/1/1/client-0", "client-0", "run") is None


def test_training_with_an_endless_deadline_is_expected_for_a_year() -> None:
    expected = ExpectedUpdates(lambda: NOW, lambda _: None, lambda _: None)
    instruction = training("run/1/1/client-0")
    instruction.time_left.seconds = 10**14
    expected.see(instruction, "host-0")
    found = expected.find("run/1/1/client-0", "client-0", "run")
    assert found is not None
    assert found.expires == NOW + YEAR_SECONDS + GRACE_SECONDS


def test_abandoned_training_is_no_longer_expected() -> None:
    dropped: list[str] = []
    expected = ExpectedUpdates(lambda: NOW, dropped.append, lambda _: None)
    expected.see(training("run/1/1/client-0"), "host-0")
    abandon = rpc.Abandon(instruction_ids=["run/1/1/client-0", "other"])
    expected.see(rpc.Instruction(id="abandon/x", abandon=abandon), "host-0")
    assert dropped == ["other", "run/1/1/client-0"]
    assert expected.find("run/1/1/client-0", "client-0", "run") is None


def settlement(update_id: str, client: str) -> rpc.Instruction:
    settle = rpc.Settle(update_id=update_id)
    return rpc.Instruction(id="s", client_id=client, run_id="run", settle=settle)


def test_update_whose_round_is_over_is_no_longer_expected() -> None:
    settled: list[str] = []
    expected = ExpectedUpdates(lambda: NOW, lambda _: None, settled.append)
    expected.see(training("run/1/1/client-0"), "host-0")
    expected.see(settlement("run/0/1/client-0", "client-0"), "host-0")  # an earlier, late update
    assert expected.find("run/1/1/client-0", "client-0", "run") is not None
    expected.see(settlement("run/1/1/client-0", "client-0"), "host-0")
    assert expected.find("run/1/1/client-0", "client-0", "run") is None
    assert settled == ["run/0/1/client-0", "run/1/1/client-0"]


def summed(update_id: str, client: str) -> rpc.Instruction:
    instruction = training(update_id, client)
    instruction.train.encoding = transfer_pb2.ENCODING_SUM
    return instruction


def test_relay_sum_waits_for_clients_still_training() -> None:
    settled: list[str] = []
    expected = ExpectedUpdates(lambda: NOW, lambda _: None, settled.append)
    expected.see(training("run/1/1/client-0"), "host-0")
    assert not expected.awaited("run"), "it goes by itself"
    for client, host in (("a", "host-0"), ("b", "host-0"), ("c", "host-1"), ("d", "host-1")):
        expected.see(summed(f"run/1/1/{client}", client), host)
    expected.changed.clear()
    expected.arrived(["run/1/1/a"])
    assert expected.changed.is_set()
    assert expected.awaited("run")
    assert not expected.awaited("another")
    expected.left("host-1")
    assert expected.awaited("run")
    expected.see(settlement("run/1/1/b", "b"), "host-0")
    assert settled == ["run/1/1/b"]
    assert not expected.awaited("run")
    expected.see(summed("run/1/1/c", "c"), "host-1")  # its host reconnected and gets it again
    assert expected.awaited("run")
    abandon = rpc.Abandon(instruction_ids=["run/1/1/c"])
    expected.see(rpc.Instruction(id="x", abandon=abandon), "host-1")
    assert not expected.awaited("run")
