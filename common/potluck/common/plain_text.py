"""Conversion of untrusted text to one printable line, which is safe to store, log and show.

Characters that control a terminal (escape sequences, carriage returns, changes of text direction)
become visible escapes such as `\\x1b` or `\\u202e`. All text from other machines is converted here
first, so that stores, logs and reports contain only plain text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

MOST_CHARACTERS = 2_000
"""Maximum length of a text in characters; longer texts are cut off."""

_LOGIN = re.compile(r"(://[^\s:/@]*:)\S*@")
_PASSWORD = re.compile(r"(password=)[^&\s'\"]+", re.IGNORECASE)


def plain(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return `text` as one line of at most `most` characters, with unprintable characters
    escaped."""
    if _is_plain(text, most):
        return text
    line = " ".join(text[: most + 1].split())
    line = "".join(each if each.isprintable() else _escaped(each) for each in line)
    return line if len(line) <= most >= len(text) else line[: most - 1] + "…"


def make_plain(message: Message) -> None:
    """Convert every text in a message to plain text, in place.

    Documents (run files, JSON) stay unchanged; the code that reads them checks their content. Times
    are limited to the years 1970 to 9999 (its last day excepted), which Python can represent in
    every time zone.
    """
    if isinstance(message, Timestamp):
        _limit_time(message)
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            if field.message_type.GetOptions().map_entry:
                _make_map_plain(value)
            elif field.is_repeated:
                for each in value:
                    make_plain(each)
            else:
                make_plain(value)
        elif field.type != field.TYPE_STRING or field.name.endswith(_DOCUMENTS):
            continue
        elif field.is_repeated:
            if not _are_plain(value):
                value[:] = list(map(plain, value))
        elif not _is_plain(value):
            setattr(message, field.name, plain(value))


def without_passwords(text: str) -> str:
    """Return `text` with passwords replaced by `***`, in URLs and after `password=`."""
    if "://" in text:
        text = _LOGIN.sub(r"\1***@", text)
    return _PASSWORD.sub(r"\1***", text) if "assword=" in text.lower() else text


_DOCUMENTS = ("_json", "run_file")
_LAST_SECOND = 253_402_214_399
"""The last second of 9999-12-30 UTC, in seconds since 1970."""


def _is_plain(text: str, most: int = MOST_CHARACTERS) -> bool:
    return len(text) <= most and text.isprintable()


def _are_plain(texts: Sequence[str]) -> bool:
    """Return True if all texts are plain.

    They are checked as one joined text, because lists can be long: an instruction names all clients
    of a group.
    """
    return "".join(texts).isprintable() and max(map(len, texts)) <= MOST_CHARACTERS


def _limit_time(time: Timestamp) -> None:
    time.seconds = min(max(time.seconds, 0), _LAST_SECOND)
    time.nanos = min(max(time.nanos, 0), 999_999_999)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _make_map_plain(entries: Any) -> None:
    """Convert the texts of a map to plain text, in place, also those in values that are
    messages."""
    for key, value in list(entries.items()):
        plain_key = plain(key) if isinstance(key, str) else key
        if isinstance(value, Message):
            make_plain(value)
            if plain_key != key:
                entries[plain_key].CopyFrom(value)  # protobuf refuses to assign messages
                del entries[key]
        elif plain_key != key or (isinstance(value, str) and not _is_plain(value)):
            del entries[key]
            entries[plain_key] = plain(value) if isinstance(value, str) else value
