"""The newest membership that a party has seen."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.federation import until
from support.memberships import MEMBER, OTHER, record, signed, ten_years, write_root

from potluck.common.errors import ConfigurationError, IdentityError
from potluck.common.net import membership_in_force
from potluck.common.net.membership import public_text
from potluck.common.net.membership_in_force import KEPT, MembershipInForce


def opened(folder: Path, file: Path | None = None, *, state: str = "state") -> MembershipInForce:
    return MembershipInForce(
        write_root(folder), federation="f", file=file, state_directory=folder / state
    )


@settings(max_examples=12, deadline=None)
@given(epochs=st.lists(st.integers(1, 6), max_size=8), restarts=st.sets(st.integers(0, 8)))
def test_membership_epoch_never_decreases(epochs: list[int], restarts: set[int]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found, newest = opened(folder), 0
        for step, epoch in enumerate(epochs):
            if step in restarts:
                found = opened(folder)
            assert found.take(signed(record(), epoch=epoch), "here") == (epoch > newest)
            newest = max(newest, epoch)
            assert found.epoch == newest
            assert found.members is not None
            assert found.members.epoch == newest


def test_older_membership_file_is_refused_after_a_newer_one_was_seen(tmp_path: Path) -> None:
    file = tmp_path / "members.json"
    file.write_bytes(signed(record(), epoch=3))
    assert opened(tmp_path, file).epoch == 3
    assert opened(tmp_path).take(signed(record(), epoch=5), "from the coordinator")
    assert opened(tmp_path, file).epoch == 5
    file.write_bytes(signed(record(), epoch=6))
    assert opened(tmp_path, file).epoch == 6
    file.unlink()
    with pytest.raises(ConfigurationError, match=r"members\.json can't be read"):
        opened(tmp_path, file)


def test_second_membership_of_the_same_epoch_is_refused(tmp_path: Path) -> None:
    found = opened(tmp_path)
    found.take(signed(record()), "here")
    with pytest.raises(IdentityError, match="has signed two member lists of epoch 3"):
        found.take(signed(record(public_key=public_text(OTHER))), "here")
    assert not found.take(signed(record()), "here")
    assert found.members is not None
    assert found.members.records["a"].public_key == public_text(MEMBER)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (signed(record(), epoch=9, root=MEMBER), "not signed by the federation root"),
        (signed(record(), epoch=9, federation="g"), "of federation 'g'"),
        (ten_years(), "at most 366 days"),
        (b"{}", "Field required"),
    ],
)
def test_invalid_membership_is_rejected_and_the_current_one_is_kept(
    tmp_path: Path, text: bytes, why: str
) -> None:
    found = opened(tmp_path)
    heard: list[int] = []
    found.listen(lambda members: heard.append(members.epoch))
    found.take(signed(record()), "here")
    with pytest.raises((ConfigurationError, IdentityError), match=why):
        found.take(text, "here")
    assert (found.epoch, heard) == (3, [3])
    assert opened(tmp_path).epoch == 3


def test_damaged_stored_membership_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / KEPT).write_text("{")
    with pytest.raises(ConfigurationError, match=r"state/members\.json"):
        opened(tmp_path)


async def test_changed_membership_file_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_in_force, "LOOK_SECONDS", 0.001)
    file = tmp_path / "members.json"
    file.write_bytes(signed(record()))
    found = opened(tmp_path, file)
    watching = asyncio.create_task(found.watch())
    try:
        file.write_bytes(b"half a fi")
        file.write_bytes(signed(record(), epoch=4))
        await until(lambda: found.epoch == 4)
    finally:
        watching.cancel()
