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
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

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
    "model_sha256": (0, messages.DIGEST_BYTES),
    "log_head": (messages.DIGEST_BYTES,),
    "commitment": (messages.DIGEST_BYTES,),
    "mask_key": (32,),
    "channel_key": (32,),
    "share": (33,),
    "ciphertext": (82,),
    **{
        f"{what}_sha256": (messages.DIGEST_BYTES,)
        for what in ("header", "roster", "sharers", "survivors", "upload")
    },
}
"""Lengths that fields of bytes may have, wherever they occur."""


def _described(kind: type[Any]) -> tuple[tuple[str, Any, bool], ...]:
    """Fields of a class: name, type (of an element, for tuples), and whether it is repeated."""
    hints = get_type_hints(kind)
    described = []
    for each in fields(kind):
        hint = hints[each.name]
        repeated = get_origin(hint) is tuple
        if repeated or isinstance(hint, UnionType):
            hint = get_args(hint)[0]
        described.append((each.name, hint, repeated))
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
    if isinstance(value, Enum):
        return value.value
    if not is_dataclass(value):
        return value
    kind = type(value)
    result = _WIRE[kind]()
    for name, hint, repeated in _DESCRIBED[kind]:
        item = getattr(value, name)
        if repeated:
            getattr(result, name).extend([_to_wire(each) for each in item])
        elif is_dataclass(hint):
            if item is not None:
                getattr(result, name).CopyFrom(_to_wire(item))
        else:
            setattr(result, name, _to_wire(item))
    return result


def _from_wire(kind: type[Any], parsed: Any) -> Any:
    values: dict[str, Any] = {}
    for name, hint, repeated in _DESCRIBED[kind]:
        if repeated:
            items = getattr(parsed, name)
            values[name] = tuple(_value(name, hint, each) for each in items)
        elif is_dataclass(hint) and not parsed.HasField(name):
            values[name] = None
        else:
            values[name] = _value(name, hint, getattr(parsed, name))
    return kind(**values)


def _value(name: str, hint: Any, found: Any) -> Any:
    if is_dataclass(hint):
        return _from_wire(hint, found)  # type: ignore[arg-type]  # the class, not an instance
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(found)  # ValueError for what is no member, 0 among them
    if hint is bytes and name in _LENGTHS and len(found) not in _LENGTHS[name]:
        raise ValueError(f"{name} has {len(found)} bytes")
    if hint is str and len(found) > MAXIMUM_TEXT:
        raise ValueError(f"{name} has {len(found)} characters")
    return found
