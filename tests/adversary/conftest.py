"""A federation whose hosts connect to a lying coordinator."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from adversary.proxy import LyingCoordinator, Script, lying_coordinator
from support.sum_federation import Members, SumFederation, sum_federation

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy

CLIENTS = 6


@dataclass
class Scene:
    """A federation, and the lying proxy between its hosts and its coordinator."""

    federation: SumFederation
    liar: LyingCoordinator


@pytest.fixture(scope="session")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return Members.make(tmp_path_factory.mktemp("members"), CLIENTS)


@contextlib.asynccontextmanager
async def attacked(
    members: Members, folder: Path, /, *, data: Path | None = None, **hosts: Any
) -> AsyncIterator[Scene]:
    """Run a federation whose hosts connect to a lying coordinator.

    data: folder of the operator's files at the coordinator. hosts: changes of its hosts'
    configuration.
    """
    async with (
        sum_federation(members, folder, data_directory=data) as federation,
        lying_coordinator(
            members.tls.coordinator, members.tls.hosts, federation.port, Script()
        ) as liar,
    ):
        await federation.start(port=liar.port, **hosts)
        yield Scene(federation, liar)
        await federation.stack.aclose()


@pytest_asyncio.fixture
async def scene(members: Members, tmp_path: Path) -> AsyncIterator[Scene]:
    async with attacked(members, tmp_path, disclosure=DisclosurePolicy()) as scene:
        yield scene
