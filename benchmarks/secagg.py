"""Processor time of secure aggregation, compared with the keystreams that it requires.

    python benchmarks/secagg.py --clients 50 --length 1000000 --drop 5

A session over the complete graph runs in this process, without a network. `--drop` clients drop out
after sharing their secrets. Times are CPU milliseconds: of one client for masking its update, and
for all other work (checks, keys, shares, fixed point, signatures); of the coordinator to rebuild
the secrets and to remove the masks from the sum. Masking and unmasking are repeated, and the
fastest time counts. The lower bounds are the times of the stream cipher alone, in the same run: as
many keystreams, written into a buffer that stays in the cache.

Flower's SecAgg+ functions do the same in an environment of their own, which the first run creates;
`--no-flower` skips them.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray
from peers_environments import environment
from repetitions import fastest

from potluck.common.errors import PotluckError
from potluck.common.net.membership import (
    MemberRecord,
    Members,
    MembershipDocument,
    public_text,
)
from potluck.secagg.protocol import (
    ClientPolicy,
    ClientSession,
    CoordinatorSession,
    Envelope,
    Expectation,
    FederationRoot,
    Header,
    MessageType,
    Purpose,
    Situation,
    SumParty,
    SumVector,
    VectorEncoding,
    client,
    complete_thresholds,
    coordinator,
)
from potluck.secagg.protocol.primitives.masks import CHUNK_BYTES, StreamCipher, keystream
from potluck.secagg.protocol.primitives.thresholds import assumed_colluding_hosts
from potluck.secagg.protocol.vectors.updates import (
    BodyDecoder,
    BodyEncoder,
    decode_head,
    encode_head,
)

FLOWER = "1.41.0"
PEER = Path(__file__).parent / "peers" / "flower_secagg.py"
ENVIRONMENTS = Path("~/.cache/potluck-peers")
BLOCK = 2**16
CLIP = 0.25
WEIGHT = 500
MEASURED = "c000"
"""The client whose time is measured; it computes everything itself, while other clients may use a
cache."""

BEFORE_UPLOAD = (MessageType.INVITATION, MessageType.ROSTER)
Vectors = dict[str, NDArray[Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument(
        "--length", type=int, default=100_000, help="number of parameters of the model"
    )
    parser.add_argument(
        "--drop", type=int, default=1, help="number of clients that drop out after sharing"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="number of repetitions of masking and unmasking"
    )
    parser.add_argument("--no-flower", action="store_true", help="do not measure Flower")
    parser.add_argument("--flower-version", default=FLOWER, metavar="VERSION")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    try:
        result = measure(options.clients, options.length, options.drop, options.repeats)
        flower = None if options.no_flower else measure_flower(options)
    except PotluckError as error:
        sys.exit(str(error))
    if flower is not None:
        result["flower"] = flower
        result["ratios"] = ratios(result, flower)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)


@dataclass
class Bench:
    """A federation with one session, and the seconds of each kind of work."""

    clients: int
    length: int
    repeats: int
    sessions: dict[str, ClientSession] = field(default_factory=dict)
    uploads: dict[str, Vectors] = field(default_factory=dict)
    means: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        now = datetime.now(UTC)
        policy = ClientPolicy(least_hosts=min(5, self.clients))
        self.hosts = {f"c{index:03}": f"h{index:03}" for index in range(self.clients)}
        keys = {name: Ed25519PrivateKey.generate() for name in self.hosts}
        records = tuple(
            MemberRecord(
                client=name,
                host=host,
                public_key=public_text(keys[name]),
                not_before=now - timedelta(days=1),
                not_after=now + timedelta(days=1),
            )
            for name, host in self.hosts.items()
        )
        members = Members(MembershipDocument(federation="benchmark", epoch=1, members=records))
        shared = FederationRoot(members)
        self.parties: dict[str, SumParty] = {
            name: SumParty(
                client=name,
                key=key,
                root=FederationRoot(members) if name == MEASURED else shared,
                policy=policy,
            )
            for name, key in keys.items()
        }
        self.root, self.situation = shared, Situation(now=now, random=os.urandom)
        self.header = self._header(int(now.timestamp()))
        self.expected = Expectation(
            purpose=Purpose.UPDATE,
            input_id="update/1",
            lengths={vector.name: vector.length for vector in self.header.vectors},
            model_digest=bytes(32),
            training_sha256=bytes(32),
        )

    def _header(self, issued_at: int) -> Header:
        thresholds = complete_thresholds(self.hosts.values())
        body = SumVector(
            name="body",
            length=self.length,
            modulus_bits=32,
            encoding=VectorEncoding.FIXED_POINT,
            clip=CLIP,
        )
        head = SumVector(
            name="head", length=4, modulus_bits=64, encoding=VectorEncoding.HEAD, clip=1.0
        )
        return Header(
            federation="benchmark",
            session_id=os.urandom(16),
            purpose=Purpose.UPDATE,
            subject="",
            disclosure="update",
            vectors=(body, head),
            weight_bound=1000,
            least_hosts=min(5, self.clients),
            colluding_hosts=assumed_colluding_hosts(self.clients),
            threshold=thresholds.threshold,
            quorum=thresholds.quorum,
            model_digest=bytes(32),
            training_sha256=bytes(32),
            membership_epoch=self.root.members.epoch,
            membership_sha256=self.root.members.digest,
            issued_at=issued_at,
            expires_at=issued_at + 3600,
        )

    def clocked(self, what: str, work: Callable[[], Any]) -> Any:
        """Do some work and add its CPU seconds under a name."""
        begun = time.process_time()
        result = work()
        self.seconds[what] = self.seconds.get(what, 0.0) + time.process_time() - begun
        return result

    def tell(self, name: str, envelope: Envelope) -> tuple[tuple[Envelope, ...], bytes | None]:
        """Deliver a message to a client. Return its replies, and its upload's digest if any."""
        party = self.parties[name]

        def work() -> Any:
            if envelope.type is MessageType.INVITATION:
                return client.begin(party, envelope, self.expected, self.situation)
            return client.handle(self.sessions[name], envelope, self.situation)

        step = self.clocked("other", work) if name == MEASURED else work()
        if step.refusal is not None:
            raise PotluckError(f"{name} refuses: {step.refusal}")
        self.sessions[name] = step.session
        if step.session.masking is None:
            return step.replies, None
        digest = self.upload(name)
        vouched = client.uploaded(self.sessions[name], digest)
        self.sessions[name] = vouched.session
        return vouched.replies, digest

    def upload(self, name: str) -> bytes:
        masking = self.sessions[name].masking
        assert masking is not None
        draws = np.random.Generator(np.random.SFC64(int(name[1:])))
        update = draws.standard_normal(self.length, dtype=np.float32) * np.float32(0.05)
        self.means[name] = update
        words: Vectors = {"body": np.empty(self.length, "<u4")}

        def encode() -> None:
            encoder = BodyEncoder(self.header, self.header.vector("body"), self.clients, WEIGHT)
            for begin in range(0, self.length, BLOCK):
                end = begin + BLOCK
                encoder.encode(update[begin:end], words["body"][begin:end])
            words["head"] = encode_head(
                self.header, self.clients, weight=WEIGHT, metrics=[], clipped=encoder.clipped
            )

        def mask() -> None:
            for vector, values in words.items():
                masking.add_masks(vector, values)

        if name == MEASURED:
            self.clocked("other", encode)
            spare = {vector: values.copy() for vector, values in words.items()}
            self.seconds["mask"] = fastest(mask, self.repeats)
            words |= spare  # masking was repeated for the timing: restore the words and mask once
            mask()
        else:
            encode()
            mask()
        self.uploads[name] = words
        return hashlib.sha256(b"".join(values.tobytes() for values in words.values())).digest()

    def run(self, dropped: set[str]) -> CoordinatorSession:
        """Run the whole session. Raises PotluckError if the sum fails."""
        step = coordinator.invite(self.header, self.hosts, self.root)
        queue, session = list(step.messages), step.session
        while not session.over:
            if not queue:
                step = coordinator.close(session)
                session, queue = step.session, list(step.messages)
                continue
            name, envelope = queue.pop(0)
            if name in dropped and envelope.type not in (
                MessageType.INVITATION,
                MessageType.ROSTER,
            ):
                continue
            replies, digest = self.tell(name, envelope)
            for reply in replies:
                self.seconds["rebuild"] = 0.0  # only the last received message rebuilds the secrets
                step = self.clocked("rebuild", lambda: self.receive(session, name, reply, digest))  # noqa: B023  called at once
                session, queue = step.session, [*queue, *step.messages]
        if session.aborted is not None:
            raise PotluckError(f"the session was aborted: {session.aborted.abort}")
        return session

    def receive(
        self, session: CoordinatorSession, name: str, reply: Envelope, digest: bytes | None
    ) -> Any:
        return coordinator.receive(session, name, reply, self.situation.now, upload_digest=digest)


def measure(clients: int, length: int, drop: int, repeats: int) -> dict[str, Any]:
    """Return the CPU milliseconds of one session, and of the keystreams that it needs."""
    bench = Bench(clients, length, repeats)
    dropped = {f"c{index:03}" for index in range(clients - drop, clients)}
    mask_limit = [keystream_seconds(clients, 4 * length)]
    session = bench.run(dropped)
    mask_limit.append(keystream_seconds(clients, 4 * length))
    unmasking = session.unmasking
    assert unmasking is not None
    masked = {
        vector.name: np.sum(
            [bench.uploads[name][vector.name] for name in unmasking.survivors],
            axis=0,
            dtype=np.dtype(f"<u{vector.modulus_bits // 8}"),
        )
        for vector in bench.header.vectors
    }
    sums: Vectors = {}

    def unmask() -> None:
        for vector, words in sums.items():
            unmasking.remove(vector, words)

    def once() -> float:
        sums.update({vector: words.copy() for vector, words in masked.items()})
        begun = time.process_time()
        unmask()
        return time.process_time() - begun

    streams = len(unmasking.masks["body"])
    rounds = [(once(), keystream_seconds(streams, 4 * length)) for _ in range(repeats)]
    return {
        "clients": clients,
        "length": length,
        "drop": drop,
        "client_mask_ms": 1e3 * bench.seconds["mask"],
        "client_mask_limit_ms": 1e3 * min(mask_limit),
        "client_other_ms": 1e3 * bench.seconds["other"],
        "unmask_ms": 1e3 * (bench.seconds["rebuild"] + min(ours for ours, _ in rounds)),
        "unmask_limit_ms": 1e3 * min(limit for _, limit in rounds),
        "unmask_rebuild_ms": 1e3 * bench.seconds["rebuild"],
        "keystreams": streams,
        "exact": is_exact(bench, unmasking.survivors, sums),
    }


def is_exact(bench: Bench, survivors: tuple[str, ...], sums: Vectors) -> bool:
    """Return True if the sum equals that of the fixed-point inputs, and its mean that of the
    updates."""
    vector = bench.header.vector("body")
    plain = np.zeros(bench.length, np.uint32)
    mean = np.zeros(bench.length)
    words = np.empty(bench.length, "<u4")
    for name in survivors:
        BodyEncoder(bench.header, vector, bench.clients, WEIGHT).encode(bench.means[name], words)
        plain += words
        mean += np.clip(bench.means[name], -CLIP, CLIP).astype(np.float64) / len(survivors)
    head = decode_head(bench.header, bench.clients, sums["head"], len(survivors))
    found = BodyDecoder(bench.header, vector, bench.clients, head.weight).decode(sums["body"])
    return bool(np.array_equal(plain, sums["body"]) and np.abs(found - mean).max() < 1e-6)


def keystream_seconds(streams: int, size: int) -> float:
    """Return the CPU seconds of `streams` AES-256-CTR keystreams of `size` bytes; best of three."""
    zeros, buffer = memoryview(bytes(CHUNK_BYTES)), bytearray(CHUNK_BYTES)

    def work() -> None:
        made = [keystream(os.urandom(32), 0, StreamCipher.AES_256_CTR) for _ in range(streams)]
        for begin in range(0, size, CHUNK_BYTES):
            piece = zeros[: min(CHUNK_BYTES, size - begin)]
            for stream in made:
                stream.update_into(piece, buffer)

    return fastest(work, 3)


def measure_flower(options: argparse.Namespace) -> dict[str, Any]:
    """Measure this benchmark's work with Flower's functions. Raises PotluckError."""
    folder = options.environments.expanduser().absolute()
    place = environment(folder, "flwr", options.flower_version)
    python = asyncio.run(place) / "python"
    command = [
        *(str(python), str(PEER)),
        *("--clients", str(options.clients)),
        *("--length", str(options.length)),
        *("--drop", str(options.drop)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
        raise PotluckError(f"Flower's functions failed: {reason}")
    result: dict[str, Any] = json.loads(done.stdout)
    return {"version": options.flower_version, **result}


def ratios(ours: dict[str, Any], flower: dict[str, Any]) -> dict[str, float]:
    """Return Flower's times divided by Potluck's."""
    keys = ("client_mask_ms", "client_other_ms", "unmask_ms")
    return {key: flower[key] / ours[key] for key in keys}


def show(result: dict[str, Any]) -> None:
    """Print the result as text."""
    print(
        f"{result['clients']} clients, {result['length']:,} parameters, {result['drop']} lost; "
        f"CPU milliseconds\n"
    )
    flower = result.get("flower")
    print(f"{'':<24}{'Potluck':>12}{'limit':>12}{'of limit':>12}{'Flower':>14}{'ratio':>10}")
    for name, key in (
        ("client: mask", "client_mask"),
        ("client: all else", "client_other"),
        ("coordinator: unmask", "unmask"),
    ):
        ours, limit = result[f"{key}_ms"], result.get(f"{key}_limit_ms")
        line = f"{name:<24}{ours:>12.1f}"
        line += f"{limit:>12.1f}{ours / limit:>11.2f}×" if limit else " " * 24
        if flower:
            line += f"{flower[f'{key}_ms']:>14.1f}{result['ratios'][f'{key}_ms']:>9.1f}×"
        print(line)
    print(f"\nthe sum is {'exact' if result['exact'] else 'WRONG'}")


if __name__ == "__main__":
    main()
