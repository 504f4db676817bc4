"""Hosts and coordinators of different releases."""

from __future__ import annotations

import pytest

from potluck.common.errors import ProtocolVersionError
from potluck.common.net.protocol import VERSIONS, check_agreement

OURS = {"protocol": 1, "framing": 2, "encoding": 1}


def test_host_with_the_same_versions_is_accepted() -> None:
    check_agreement(dict(VERSIONS), VERSIONS, host_name="h")


@pytest.mark.parametrize(
    ("host", "found", "remedy"),
    [
        (
            {**OURS, "framing": 1},
            "framing: version 1 on the host, 2 on the coordinator",
            "upgrade Potluck on host 'h2'",
        ),
        (
            {**OURS, "framing": 3},
            "framing: version 3 on the host, 2 on the coordinator",
            "upgrade Potluck on the coordinator",
        ),
        (
            {"protocol": 1},
            (
                "framing: version none on the host, 2 on the coordinator; "
                "encoding: version none on the host, 1 on the coordinator"
            ),
            "upgrade Potluck on host 'h2'",
        ),
        (
            {**OURS, "relays": 1},
            "relays: version 1 on the host, none on the coordinator",
            "upgrade Potluck on the coordinator",
        ),
        (
            {**OURS, "protocol": 2, "framing": 1},
            (
                "protocol: version 2 on the host, 1 on the coordinator; "
                "framing: version 1 on the host, 2 on the coordinator"
            ),
            "install the same release on the host and the coordinator",
        ),
        (
            {**OURS, "\x1b]0;owned\x07": 1},
            "another part: version 1 on the host, none on the coordinator",
            "upgrade Potluck on the coordinator",
        ),
    ],
    ids=["older", "newer", "before versions", "a new part", "both", "no name"],
)
def test_version_mismatch_is_refused_naming_the_side_to_upgrade(
    host: dict[str, int], found: str, remedy: str
) -> None:
    with pytest.raises(ProtocolVersionError) as caught:
        check_agreement(host, OURS, host_name="h2")
    assert caught.value.message == (
        f"host 'h2' and the coordinator run different releases of Potluck ({found}); {remedy}"
    )


def test_version_mismatch_with_many_unknown_parts_is_a_short_message() -> None:
    told = {**OURS, **{f"part-{k}": 1 for k in range(10_000)}}
    with pytest.raises(ProtocolVersionError) as caught:
        check_agreement(told, OURS, host_name="h2")
    assert len(caught.value.message) < 400
