"""The examples with language models, each installed and run as its README says, without a hub."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from support.examples import carried_out, installed

from potluck.deploy.local.demo_files import reserved_port

pytestmark = pytest.mark.slow

ROUNDS, COUNT = 3, 4
WHOLE_MODEL = 90_000_000
"""Size in bytes of the tensors of all-MiniLM-L6-v2, rounded down."""


def measured(said: str, label: str, unit: str) -> list[float]:
    """Return the values of a metric that `potluck run --watch` printed, by round."""
    return [float(each) for each in re.findall(rf"  {label} ([0-9.]+){unit}  ", said)]


@dataclass
class Relay:
    """Forwards connections, and counts the bytes of both directions."""

    port: int
    count: int = 0

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward until one side closes; close at once if the coordinator does not listen yet."""
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._copy(reader, back), self._copy(there, writer))

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while some := await source.read(1 << 16):
                self.count += len(some)
                target.write(some)
                await target.drain()
        target.close()


@contextlib.asynccontextmanager
async def relay_to(port: int) -> AsyncIterator[tuple[Relay, int]]:
    """Run a relay to the coordinator; yield it and the port on which it listens."""
    relay = Relay(port)
    server = await asyncio.start_server(relay.pass_on, "127.0.0.1", 0)
    async with server:
        yield relay, server.sockets[0].getsockname()[1]


async def test_language_model_example_trains_adapters_of_different_ranks(tmp_path: Path) -> None:
    example = installed("language-model", tmp_path)
    with reserved_port() as port:
        said = await carried_out(example, port)
    assert f"is finished; {ROUNDS} of {ROUNDS} rounds committed" in said
    assert "warning" not in said
    losses = measured(said, "loss", " nats/byte")
    assert len(losses) == ROUNDS
    assert losses[-1] < losses[0]
    with (
        safe_open(example.folder / "model.safetensors", "np") as model,
        safe_open(example.folder / "data" / "base" / "model.safetensors", "np") as base,
    ):
        metadata, names = model.metadata(), set(model.keys())
        [layer] = [name for name in names if name.endswith("1.mlp.up_proj.base_layer.weight")]
        merged = model.get_tensor(layer)
        plain = layer.removeprefix("base_model.model.").replace(".base_layer", "")
        moved = np.abs(merged - base.get_tensor(plain)).max()
    assert json.loads(metadata["potluck.strategy"])["name"] == "lora-stacking"
    assert moved > 0
    assert not any("embed_tokens" in name or "lm_head" in name for name in names)


async def test_sentence_embeddings_example_uploads_two_percent_of_the_model(tmp_path: Path) -> None:
    example = installed("sentence-embeddings", tmp_path)
    with reserved_port() as port:
        async with relay_to(port) as (relay, heard):
            example.use_port(heard, "host-*.toml")
            said = await carried_out(example, port)
    assert f"is finished; {ROUNDS} of {ROUNDS} rounds committed" in said
    assert "warning" not in said
    found = measured(said, "causes found", " %")
    assert len(found) == ROUNDS
    assert found[-1] > 1.5 * found[0]
    with safe_open(example.folder / "model.safetensors", "np") as model:
        adapters = sum(model.get_tensor(name).nbytes for name in model.keys())  # noqa: SIM118
    assert 2 * COUNT * ROUNDS * adapters > relay.count > COUNT * ROUNDS * adapters
    assert relay.count < 0.02 * COUNT * ROUNDS * WHOLE_MODEL, "of whole models on their way up"
