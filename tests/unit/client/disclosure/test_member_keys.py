"""Clients sign with the key that the membership in force names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.memberships import MEMBER, OTHER, record, signed, write_root

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.disclosure.member_keys import NEXT, key_in_force, key_of, signing_key
from potluck.client.disclosure.privacy_budget import PrivacyBudget
from potluck.client.disclosure.releases import Asker, Discloser
from potluck.common.disclosure import Mode, Request
from potluck.common.errors import ConfigurationError
from potluck.common.net.key_files import KEY_MODE, private_pem, write_file
from potluck.common.net.membership import profile_statement, public_text
from potluck.common.net.membership_in_force import MembershipInForce
from potluck.rpc.v1 import coordinator_pb2 as rpc


@pytest.mark.parametrize("folder", [True, False], ids=["folder", "file"])
def test_host_with_old_and_new_key_signs_with_the_key_in_force(
    tmp_path: Path, folder: bool
) -> None:
    place = tmp_path / "members" if folder else tmp_path / "a.key"
    own = place / "a.key" if folder else place
    write_file(own, private_pem(MEMBER), KEY_MODE)
    write_file(own.parent / NEXT / own.name, private_pem(OTHER), KEY_MODE)
    in_force = MembershipInForce(
        write_root(tmp_path), federation="f", file=None, state_directory=tmp_path
    )
    assert public_text(signing_key(place, "a", in_force)) == public_text(MEMBER)
    in_force.take(signed(record(), epoch=3), "here")
    assert public_text(signing_key(place, "a", in_force)) == public_text(MEMBER)
    in_force.take(signed(record(public_key=public_text(OTHER)), epoch=4), "here")
    assert public_text(signing_key(place, "a", in_force)) == public_text(OTHER)
    (own.parent / NEXT / own.name).replace(own)  # the next key becomes the current one
    assert public_text(signing_key(place, "a", in_force)) == public_text(OTHER)


def test_key_that_differs_from_the_member_record_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "a.key", private_pem(OTHER), KEY_MODE)
    assert public_text(key_of(tmp_path, "a")) == public_text(OTHER)
    with pytest.raises(ConfigurationError, match=r"neither .*a\.key nor .*next/a\.key"):
        key_in_force(tmp_path, "a", record())


async def test_stored_profile_is_signed_again_with_the_key_in_force(
    tmp_path: Path,
) -> None:
    for folder in ("disclosures", "sums"):
        (tmp_path / folder).mkdir()
    write_file(tmp_path / "a.key", private_pem(MEMBER), KEY_MODE)
    write_file(tmp_path / NEXT / "a.key", private_pem(OTHER), KEY_MODE)
    in_force = MembershipInForce(
        write_root(tmp_path), federation="f", file=None, state_directory=tmp_path
    )
    policy = DisclosurePolicy(epsilon_budget=1.0)
    discloser = Discloser(
        policy=policy,
        budget=PrivacyBudget(tmp_path, policy),
        asker=Asker(federation="f", coordinator="c"),
        member_key=tmp_path,
        in_force=in_force,
    )

    async def measure(_: Any) -> dict[str, Any]:
        return {"label_counts": [1, 2]}

    asked = rpc.Instruction(
        client_id="a",
        run_id="r",
        disclose=rpc.Disclose(
            signal="label_counts",
            parameters_json=Request(mode=Mode.NOISY, epsilon=0.5).canonical(),
            task=rpc.Plugin(name="digits"),
        ),
    )
    before = await discloser.answer(asked, measure)
    in_force.take(signed(record(public_key=public_text(OTHER))), "here")
    after = await discloser.answer(asked, measure)
    assert after.payload_json == before.payload_json
    for profile, key in ((before, MEMBER), (after, OTHER)):
        words = profile_statement(
            federation="f",
            client="a",
            data_epoch=profile.data_epoch,
            signal=profile.signal,
            parameters_json=profile.parameters_json,
            payload_json=profile.payload_json,
        )
        key.public_key().verify(profile.signature, words)
