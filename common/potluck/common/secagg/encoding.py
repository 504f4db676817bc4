"""Messages as bytes, and back: protobuf, one serialisation for each message.

Whoever sends serialises once; those bytes are signed, hashed and kept. Whoever receives parses
them only to read them, and refuses bytes that it would have serialised differently: unknown fields,
fields out of order, defaults spelled out. So nothing can be said in two ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Final, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage

from potluck.common.secagg import messages
from potluck.common.secagg.rules import BrokenRuleError, Rule
from potluck.rpc.v1 import secure_aggregation_pb2 as wire

_WIRE: Final[dict[type[Any], type[ProtobufMessage]]] = {
    messages.Envelope: wire.SecureEnvelope,
    messages.Lane: wire.SecureLane,
    messages.Noise: wire.SecureNoise,
    messages.Header: wire.SecureHeader,
    messages.LogEntry: wire.SecureLogEntry,
    messages.Invitation: wire.SecureInvitation,
    messages.Advert: wire.SecureAdvert,
    messages.RosterMessage: wire.SecureRoster,
    messages.SealedShare: wire.SecureSealedShare,
    messages.Shares: wire.SecureShares,
    messages.Delivery: wire.SecureDelivery,
    messages.MaskedInput: wire.SecureMaskedInput,
    messages.Survivors: wire.SecureSurvivors,
    messages.Consent: wire.SecureConsent,
    messages.Endorsement: wire.SecureEndorsement,
    messages.Certificate: wire.SecureCertificate,
    messages.RevealedShare: wire.SecureRevealedShare,
    messages.Reveal: wire.SecureReveal,
    messages.RefusalMessage: wire.SecureRefusal,
    messages.Abort: wire.SecureAbort,
}

_LENGTHS: Final = {
    "session_id": (messages.SESSION_ID_BYTES,),
    "signature": (0, messages.SIGNATURE_BYTES),
    "model_digest": (0, messages.DIGEST_BYTES),
    "upload_digest": (messages.DIGEST_BYTES,),
    "log_head": (messages.DIGEST_BYTES,),
    "commitment": (messages.DIGEST_BYTES,),
    "mask_key": (32,),
    "channel_key": (32,),
    "share": (33,),
    "ciphertext": (82,),
    **{
        f"{what}_sha256": (messages.DIGEST_BYTES,)
        for what in ("header", "roster", "sharers", "survivors")
    },
}
"""Lengths that fields of bytes may have, wherever they occur."""


class _Field(NamedTuple):
    """How a field is read and written. nested: the class of its message; kind: of its enum or its
    text or bytes; sizes: lengths its bytes may have, None for any."""

    name: str
    repeated: bool
    nested: Any
    kind: Any
    sizes: tuple[int, ...] | None


def _described(kind: type[Any]) -> tuple[_Field, ...]:
    hints = get_type_hints(kind)
    described = []
    for each in fields(kind):
        hint = hints[each.name]
        repeated = get_origin(hint) is tuple
        if repeated or isinstance(hint, UnionType):
            hint = get_args(hint)[0]
        nested = hint if is_dataclass(hint) else None
        sizes = _LENGTHS.get(each.name) if hint is bytes else None
        described.append(_Field(each.name, repeated, nested, hint, sizes))
    return tuple(described)


_DESCRIBED: Final = {kind: _described(kind) for kind in _WIRE}

MAXIMUM_TEXT: Final = 4096
"""Characters in a text field."""

T = TypeVar("T")


def encode(value: object) -> bytes:
    """The serialisation of any class of `messages`."""
    serialised: bytes = _to_wire(value).SerializeToString(deterministic=True)
    return serialised


def decode(kind: type[T], data: bytes) -> T:
    """A value of that class. Raises BrokenRuleError (malformed), nothing else."""
    parsed = _WIRE[kind]()
    try:
        parsed.ParseFromString(data)
        value: T = _from_wire(kind, parsed)
    except (DecodeError, ValueError, RecursionError) as error:
        raise _malformed(kind, str(error) if type(error) is ValueError else "not parsed") from None
    if encode(value) != data:
        raise _malformed(kind, "not the one serialisation")
    return value


def check_names(names: Sequence[str], what: str) -> None:
    """Raise BrokenRuleError (duplicate, or malformed) unless sorted, nobody twice."""
    if len(set(names)) != len(names):
        raise BrokenRuleError(Rule.DUPLICATE, f"{what} name somebody twice")
    if list(names) != sorted(names):
        raise BrokenRuleError(Rule.MALFORMED, f"{what} are not sorted")


def _malformed(kind: type[Any], why: str) -> BrokenRuleError:
    return BrokenRuleError(Rule.MALFORMED, f"a message of type {kind.__name__}: {why}")


def _to_wire(value: Any) -> Any:
    kind = type(value)
    values: dict[str, Any] = {}
    for name, repeated, nested, _, _ in _DESCRIBED[kind]:
        item = getattr(value, name)
        if nested is None or item is None:
            values[name] = item
        else:
            values[name] = [_to_wire(each) for each in item] if repeated else _to_wire(item)
    return _WIRE[kind](**values)


def _from_wire(kind: type[Any], parsed: Any) -> Any:
    values: dict[str, Any] = {}
    for described in _DESCRIBED[kind]:
        found = getattr(parsed, described.name)
        if described.repeated:
            values[described.name] = tuple([_value(described, each) for each in found])
        elif described.nested is not None and not parsed.HasField(described.name):
            values[described.name] = None
        else:
            values[described.name] = _value(described, found)
    return kind(**values)


def _value(described: _Field, found: Any) -> Any:
    name, _, nested, kind, sizes = described
    if nested is not None:
        return _from_wire(nested, found)
    if kind is bytes:
        if sizes is not None and len(found) not in sizes:
            raise ValueError(f"{name} has {len(found)} bytes")
        return found
    if kind is str:
        if len(found) > MAXIMUM_TEXT:
            raise ValueError(f"{name} has {len(found)} characters")
        return found
    return kind(found) if issubclass(kind, Enum) else found  # ValueError for no member
