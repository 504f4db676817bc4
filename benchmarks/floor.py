"""Lower bound of a round's time: plain grpcio with mTLS that streams the same bytes.

There are one server process and N client processes. Each client downloads a model of M bytes and
uploads one, from memory, in 1 MiB messages. Nothing is written to files, hashed, checked or kept. A
round of Potluck can't be faster than this.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

CHUNK = 1 << 20
OPTIONS = [
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", 4 << 20),
    ("grpc.so_reuseport", 0),
]


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Wall-clock seconds of each round, and processor seconds of all processes per round."""

    seconds: list[float]
    processor_seconds: float


def pieces(model: bytes) -> Iterator[bytes]:
    """Yield the whole model in pieces: one repeated piece would stay in the processor's cache."""
    return (model[begin : begin + CHUNK] for begin in range(0, len(model), CHUNK))


def read(folder: Path, name: str) -> bytes:
    return (folder / name).read_bytes()


async def serve(folder: Path, clients: int, size: int, rounds: int) -> None:
    model = os.urandom(size)
    gate: list[asyncio.Event] = [asyncio.Event() for _ in range(rounds)]
    arrived = [0] * rounds
    finished: list[asyncio.Event] = [asyncio.Event() for _ in range(rounds)]
    ready = 0
    all_ready = asyncio.Event()

    async def down(request: bytes, context: Any) -> AsyncIterator[bytes]:
        nonlocal ready
        number = int(request)
        if number == 0:
            ready += 1
            if ready == clients:
                all_ready.set()
        await gate[number].wait()
        for piece in pieces(model):
            yield piece

    async def up(requests: AsyncIterator[bytes], context: Any) -> bytes:
        number = int(await anext(aiter(requests)))
        received = 0
        async for chunk in requests:
            received += len(chunk)
        if received != size:
            raise RuntimeError(f"{received} of {size} bytes arrived")
        arrived[number] += 1
        if arrived[number] == clients:
            finished[number].set()
        return b"ok"

    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(
                "floor",
                {
                    "down": grpc.unary_stream_rpc_method_handler(down),
                    "up": grpc.stream_unary_rpc_method_handler(up),
                },
            )
        ]
    )
    credentials = grpc.ssl_server_credentials(
        [(read(folder, "coordinator.key"), read(folder, "coordinator.pem"))],
        root_certificates=read(folder, "authority.pem"),
        require_client_auth=True,
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    print(port, flush=True)
    await all_ready.wait()
    seconds, computed = [], time.process_time()
    for number in range(rounds):
        begun = time.perf_counter()
        gate[number].set()
        await finished[number].wait()
        seconds.append(time.perf_counter() - begun)
    print(json.dumps([time.process_time() - computed, seconds]), flush=True)
    await server.stop(1)


async def take_part(folder: Path, name: str, port: int, size: int, rounds: int) -> None:
    credentials = grpc.ssl_channel_credentials(
        root_certificates=read(folder, "authority.pem"),
        private_key=read(folder, f"{name}.key"),
        certificate_chain=read(folder, f"{name}.pem"),
    )
    model = os.urandom(size)

    async def send(number: int) -> AsyncIterator[bytes]:
        yield str(number).encode()
        for piece in pieces(model):
            yield piece

    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, OPTIONS) as channel:
        down: Any = channel.unary_stream("/floor/down")
        up: Any = channel.stream_unary("/floor/up")
        await channel.channel_ready()
        computed = time.process_time()
        for number in range(rounds):
            received = 0
            async for chunk in down(str(number).encode()):
                received += len(chunk)
            if received != size:
                raise RuntimeError(f"{received} of {size} bytes arrived")
            await up(send(number))
        print(time.process_time() - computed, flush=True)


def measure(folder: Path, hosts: list[str], size: int, rounds: int) -> Floor:
    """Measure the lower bound. folder: certificates made by `potluck pki`."""
    command = [sys.executable, __file__, str(folder), str(size), str(rounds)]
    processes = [_started([*command, "--serve", str(len(hosts))])]
    try:
        port = _line(processes[0])
        clients = [_started([*command, "--port", port, "--name", name]) for name in hosts]
        processes += clients
        computed, seconds = json.loads(_line(processes[0]))
        computed += sum(float(_line(client)) for client in clients)
        return Floor(seconds=seconds, processor_seconds=computed / rounds)
    finally:
        for process in reversed(processes):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
            if process.stdout is not None:
                process.stdout.close()


def _started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("size", type=int)
    parser.add_argument("rounds", type=int)
    parser.add_argument("--serve", type=int)
    parser.add_argument("--port", type=int)
    parser.add_argument("--name")
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.folder, options.serve, options.size, options.rounds))
    else:
        asyncio.run(
            take_part(options.folder, options.name, options.port, options.size, options.rounds)
        )


if __name__ == "__main__":
    main()
