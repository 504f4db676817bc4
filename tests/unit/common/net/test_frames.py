"""Hand-encoded frames equal those of protobuf."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from potluck.common.errors import ProtocolError, StorageError
from potluck.common.net.frames import (
    FrameDecoder,
    chunk_of,
    encode_chunk,
    encode_frame,
    file_messages,
    require,
)
from potluck.rpc.v1 import coordinator_pb2, operator_pb2, transfer_pb2

Down = coordinator_pb2.CoordinatorServiceFetchModelResponse
Up = coordinator_pb2.SubmitUpdateRequest


@given(st.binary(min_size=1, max_size=70_000))
def test_hand_encoded_chunks_are_decoded_by_protobuf(chunk: bytes) -> None:
    assert Down.FromString(encode_chunk(chunk)).frame.chunk == chunk
    assert Up.FromString(encode_chunk(chunk)).frame.chunk == chunk
    reply = operator_pb2.OperatorServiceFetchModelResponse.FromString(encode_chunk(chunk))
    assert reply.frame.chunk == chunk


@given(st.binary(min_size=1, max_size=70_000))
def test_chunks_encoded_by_protobuf_are_decoded(chunk: bytes) -> None:
    text = Up(frame=transfer_pb2.UpdateFrame(chunk=chunk)).SerializeToString()
    assert encode_chunk(chunk) == text
    seen = chunk_of(text)
    assert seen is not None
    assert bytes(seen) == chunk


@pytest.mark.parametrize(
    "message",
    [
        Up(),
        Up(frame=transfer_pb2.UpdateFrame(header=transfer_pb2.UpdateHeader(size=7, blake3="a"))),
        Up(frame=transfer_pb2.UpdateFrame(trailer=transfer_pb2.FileTrailer(blake3="b" * 64))),
    ],
)
def test_messages_other_than_chunks_are_decoded_by_protobuf(message: Message) -> None:
    assert FrameDecoder(Up)(encode_frame(message)) == message


@given(st.binary(max_size=200))
def test_any_bytes_decode_to_a_chunk_a_message_or_none(text: bytes) -> None:
    decoded = FrameDecoder(Up)(text)
    chunk = chunk_of(text)
    if chunk is not None:
        assert Up.FromString(text).frame.chunk == chunk
    elif decoded is not None:
        assert isinstance(decoded, Up)


@given(st.binary(min_size=1, max_size=64), st.data())
def test_damaged_chunk_is_never_longer_than_the_bytes_received(
    chunk: bytes, data: st.DataObject
) -> None:
    text = bytearray(encode_chunk(chunk))
    at = data.draw(st.integers(0, len(text) - 1))
    text[at] ^= data.draw(st.integers(1, 255))
    seen = chunk_of(bytes(text))
    assert seen is None or len(seen) <= len(chunk)


def test_file_shortened_while_it_is_sent_raises_storage_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10_000)
    messages = file_messages(path, 1000, chunk_bytes=4096)
    assert len(next(messages)) > 4096
    os.truncate(path, 6000)
    assert len(next(messages)) < 1000
    with pytest.raises(StorageError, match=f"{path}: the file has only 6000 bytes, but"):
        next(messages)


def test_missing_required_message_raises_protocol_error() -> None:
    assert require(Up(), "a header") == Up()
    with pytest.raises(ProtocolError, match="the stream contains a chunk; expected a header"):
        require(memoryview(b"x"), "a header")
    with pytest.raises(ProtocolError, match="bytes that are not a valid message"):
        require(None, "a header")
