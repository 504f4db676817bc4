"""A host under test in this process, and the coordinator it connects to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.client_host import digits_model, host_config, reference
from support.fake_coordinator import FakeCoordinator
from support.pki import TestFederation

from potluck.client.agent import Agent, attend_until
from potluck.client.base.state_directory import StateDirectory
from potluck.rpc.v1 import transfer_pb2


@dataclass
class Scene:
    """A fake coordinator, and a host that connects to it on request."""

    folder: Path
    federation: TestFederation
    fake: FakeCoordinator = field(default_factory=FakeCoordinator)
    port: int = 0

    @asynccontextmanager
    async def host(self, **changes: Any) -> AsyncIterator[Agent]:
        config = host_config(self.folder, self.federation.hosts["host-0"], self.port, **changes)
        state = StateDirectory(config.state_directory)
        agent = Agent(config, state, device="cpu", generator=random.Random(0))
        stop = asyncio.Event()
        running = asyncio.create_task(attend_until(agent, stop))
        before = self.fake.arrivals  # an earlier host may still be connected
        arrived = asyncio.create_task(self.fake.until(lambda: self.fake.arrivals > before))
        try:
            await asyncio.wait((running, arrived), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running  # raises the reason why the host could not connect
            yield agent
        finally:
            arrived.cancel()
            stop.set()
            try:
                await running
            finally:
                state.close()

    def model(self, seed: int = 0) -> transfer_pb2.ModelReference:
        content = digits_model(self.folder, seed)
        return reference(self.fake.offer(content), len(content))
