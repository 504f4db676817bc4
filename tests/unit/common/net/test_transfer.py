"""A received file gets its name only if its digest is the announced one."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.common.errors import (
    DigestMismatchError,
    PotluckError,
    ProtocolError,
    TooLargeError,
    TruncatedError,
)
from potluck.common.interruptible import shielded
from potluck.common.net.frames import FrameDecoder, encode_chunk
from potluck.common.net.transfer import FileReceiver, held_bytes, part_path, verified
from potluck.common.tensors.digest import digest_of
from potluck.rpc.v1 import coordinator_pb2, transfer_pb2

CONTENT = bytes(range(256)) * 3
BLAKE3 = digest_of(CONTENT)
MAXIMUM = 4096


def receiver(path: Path, *, offset: int = 0, size: int = len(CONTENT)) -> FileReceiver:
    return FileReceiver(path, blake3=BLAKE3, size=size, offset=offset, maximum=MAXIMUM)


def test_interrupted_transfer_resumes_at_the_held_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    first = receiver(path)
    first.write(CONTENT[:500])
    with pytest.raises(TruncatedError, match="500 of 768 bytes arrived"):
        first.finish(BLAKE3)
    first.close()
    assert held_bytes(path) == 500
    second = receiver(path, offset=300)
    second.write(memoryview(CONTENT)[300:])
    assert second.finish(BLAKE3).read_bytes() == CONTENT
    assert not part_path(path).exists()


@pytest.mark.parametrize(
    ("size", "offset", "error"),
    [
        (1 << 60, 0, TooLargeError),
        (MAXIMUM + 1, 0, TooLargeError),
        (len(CONTENT), 1, ProtocolError),
        (len(CONTENT), len(CONTENT) + 1, ProtocolError),
        (len(CONTENT), 1 << 60, ProtocolError),
    ],
)
def test_transfer_with_an_invalid_announced_size_or_offset_is_refused(
    tmp_path: Path, size: int, offset: int, error: type[PotluckError]
) -> None:
    with pytest.raises(error):
        receiver(tmp_path / "file", size=size, offset=offset)
    assert list(tmp_path.iterdir()) == []


def test_received_file_with_a_wrong_digest_is_deleted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    wrong = receiver(path)
    wrong.write(CONTENT[::-1])
    with pytest.raises(DigestMismatchError):
        wrong.finish(BLAKE3)
    wrong.close()
    assert list(tmp_path.iterdir()) == []


def test_observer_of_a_verification_receives_every_byte(tmp_path: Path) -> None:
    path, content = tmp_path / "file", bytes(range(256)) * 10_000
    seen = bytearray()
    for offset in (0, 1_000_000):
        into = FileReceiver(
            path, blake3=digest_of(content), size=len(content), offset=offset, maximum=len(content)
        )
        into.write(content[offset : offset + 1_500_000])
        if offset:
            into.write(content[offset + 1_500_000 :])
            assert into.finish(digest_of(content), see=seen.extend).read_bytes() == content
        into.close()
    assert seen == content


async def test_a_cancelled_verification_ends_before_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    into = receiver(path)
    into.write(CONTENT)
    begun, go_on = threading.Event(), threading.Event()

    def see(piece: memoryview) -> None:
        begun.set()
        assert go_on.wait(60)

    verifying = asyncio.create_task(shielded(asyncio.to_thread(into.finish, BLAKE3, see=see)))
    await asyncio.to_thread(begun.wait, 60)
    verifying.cancel()
    await asyncio.sleep(0)
    assert not verifying.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await verifying
    into.close()
    assert path.read_bytes() == CONTENT


async def test_cancelled_verification_of_a_wrong_file_deletes_it(tmp_path: Path) -> None:
    into = receiver(tmp_path / "file")
    into.write(CONTENT[::-1])
    verifying = asyncio.create_task(verified(into, BLAKE3))
    await asyncio.sleep(0)
    verifying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await verifying
    into.close()
    assert held_bytes(tmp_path / "file") == 0


PIECES = st.one_of(
    st.tuples(st.integers(0, len(CONTENT)), st.integers(0, 400)).map(
        lambda cut: CONTENT[cut[0] : cut[0] + cut[1]]
    ),
    st.binary(max_size=40),
)
FRAMES = st.one_of(
    PIECES.map(encode_chunk),
    st.just(
        coordinator_pb2.SubmitUpdateRequest(
            frame=transfer_pb2.UpdateFrame(trailer=transfer_pb2.FileTrailer(blake3=BLAKE3))
        ).SerializeToString()
    ),
    st.binary(max_size=60),
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Draw a frame in which a few bytes are changed, lost or added."""
    text = bytearray(draw(FRAMES))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text)))
        text[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    return bytes(text)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 800), st.lists(st.one_of(FRAMES, damaged()), max_size=12)),
        max_size=4,
    )
)
def test_any_streams_leave_the_correct_file_or_a_bounded_part(
    streams: list[tuple[int, list[bytes]]],
) -> None:
    decode = FrameDecoder(coordinator_pb2.SubmitUpdateRequest)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        for offset, messages in streams:
            with contextlib.suppress(PotluckError):
                feed(path, min(offset, held_bytes(path)), [decode(text) for text in messages])
            assert held_bytes(path) <= len(CONTENT)
            assert not path.exists() or path.read_bytes() == CONTENT
            assert {each.name for each in Path(folder).iterdir()} <= {"file", "file.part"}


def feed(path: Path, offset: int, messages: list[object]) -> None:
    """Process an upload's messages after its header, as the coordinator does."""
    into = receiver(path, offset=offset)
    try:
        for message in messages:
            if isinstance(message, memoryview):
                into.write(message)
            elif isinstance(message, coordinator_pb2.SubmitUpdateRequest):
                into.finish(message.frame.trailer.blake3)
                return
            else:
                assert message is None
                return
    finally:
        into.close()


@settings(max_examples=300, deadline=None)
@given(damaged())
def test_decoded_message_is_never_longer_than_the_bytes_received(text: bytes) -> None:
    message = FrameDecoder(coordinator_pb2.SubmitUpdateRequest)(text)
    if isinstance(message, memoryview):
        assert len(message) < len(text)
        reference = coordinator_pb2.SubmitUpdateRequest.FromString(text)
        assert reference.frame.chunk == bytes(message)
    elif message is not None:
        # Text fields may be encoded again, and unknown fields are kept, but never in more bytes
        # than received.
        assert message.ByteSize() <= len(text)
