"""Clients that repeatedly send updates without usable numbers are quarantined."""

from __future__ import annotations

from potluck.server.hosts.offences import MOST_OFFENCES, Offences


async def test_client_is_quarantined_at_its_third_offence() -> None:
    excluded: dict[str, str] = {}

    async def quarantine(client: str, reason: str) -> None:
        excluded[client] = reason

    offences = Offences(quarantine)
    for _ in range(MOST_OFFENCES - 1):
        assert await offences.add(["a", "b"]) == {}
    assert await offences.add(["b"]) == excluded
    assert excluded == {
        "b": "3 of the client's updates contained NaN, infinity or numbers that are too large",
    }
    assert await offences.add(["b"]) == {}  # b is readmitted, and its count begins at zero
    assert list(await offences.add(["a"])) == ["a"]
