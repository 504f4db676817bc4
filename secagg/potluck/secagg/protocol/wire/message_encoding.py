"""Encodes messages as bytes, and decodes them: protobuf, exactly one serialisation per message.

A sender serialises a message once; these bytes are signed, hashed and stored. A receiver refuses
bytes that it would have serialised differently: unknown fields, fields out of order, explicit
defaults. So every message has exactly one form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import UnionType
from typing import Any, Final, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage

from potluck.rpc.v1 import secure_aggregation_pb2 as wire
from potluck.secagg.protocol.rules import BrokenRuleError, Rule
from potluck.secagg.protocol.wire import messages

_WIRE: Final[dict[type[Any], type[ProtobufMessage]]] = {
    messages.Envelope: wire.SecureEnvelope,
    messages.SumVector: wire.SecureLane,
    messages.Noise: wire.SecureNoise,
    messages.Header: wire.SecureHeader,
    messages.CertifiedSet: wire.SecureCertifiedSet,
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
    messages.Dispute: wire.SecureDispute,
    messages.Evidence: wire.SecureEvidence,
    messages.GuiltyVerdict: wire.SecureVerdict,
}

_WIRE_NAMES: Final = {"vectors": "lanes"}
"""Names in the schema of the fields that have another name in `messages`."""

_LENGTHS: Final = {
    "session_id": (messages.SESSION_ID_BYTES,),
    "signature": (0, messages.SIGNATURE_BYTES),
    "model_digest": (0, messages.DIGEST_BYTES),
    "training_sha256": (0, messages.DIGEST_BYTES),
    "upload_digest": (messages.DIGEST_BYTES,),
    "revealed": (messages.SESSION_ID_BYTES,),
    "commitment": (messages.DIGEST_BYTES,),
    "mask_key": (32,),
    "channel_key": (32,),
    "channel_proof": (messages.SIGNATURE_BYTES,),
    "point": (32,),
    "challenge": (32,),
    "response": (32,),
    "share": (33,),
    "ciphertext": (82,),
    **{
        f"{what}_sha256": (messages.DIGEST_BYTES,)
        for what in ("header", "membership", "roster", "sharers", "survivors")
    },
}
"""Allowed lengths, in bytes, of fields with these names in any message."""


class _Field(NamedTuple):
    """Describes how a field is written.

    wire_name: its name in the schema. nested: True if the field contains messages.
    """

    name: str
    wire_name: str
    repeated: bool
    nested: bool


class _Reading(NamedTuple):
    """Describes how a field is read.

    wire_name: its name in the schema. optional: True if the field may be absent. convert: converts
    the value, or raises ValueError; None if the value needs no conversion.
    """

    name: str
    wire_name: str
    repeated: bool
    optional: bool
    convert: Callable[[Any], Any] | None


MAXIMUM_TEXT: Final = 4096
"""Maximum number of characters in a text field."""


def _described(kind: type[Any]) -> tuple[tuple[_Field, ...], tuple[_Reading, ...]]:
    hints = get_type_hints(kind)
    written, read = [], []
    for each in fields(kind):
        hint = hints[each.name]
        repeated, optional = get_origin(hint) is tuple, isinstance(hint, UnionType)
        if repeated or optional:
            hint = get_args(hint)[0]
        names = each.name, _WIRE_NAMES.get(each.name, each.name)
        written.append(_Field(*names, repeated, is_dataclass(hint)))
        read.append(_Reading(*names, repeated, optional, _converter(each.name, hint)))
    return tuple(written), tuple(read)


def _converter(name: str, kind: type[Any]) -> Callable[[Any], Any] | None:
    """Return a function that converts a field's protobuf value; it raises ValueError for a bad
    one."""
    if is_dataclass(kind):
        return lambda found: _from_wire(kind, found)
    if kind is str:
        return partial(_bounded, name)
    if kind is bytes and name in _LENGTHS:
        return partial(_of_length, name, _LENGTHS[name])
    return kind if issubclass(kind, Enum) else None  # an enum raises ValueError for unknown values


def _bounded(name: str, found: str) -> str:
    if len(found) > MAXIMUM_TEXT:
        raise ValueError(
            f"field {name} has {len(found)} characters, more than the maximum of {MAXIMUM_TEXT}"
        )
    return found


def _of_length(name: str, sizes: Sequence[int], found: bytes) -> bytes:
    if len(found) not in sizes:
        raise ValueError(f"field {name} has {len(found)} bytes, not {' or '.join(map(str, sizes))}")
    return found


_DESCRIBED: Final = {kind: _described(kind) for kind in _WIRE}

T = TypeVar("T")


def encode(value: object) -> bytes:
    """Return the serialised form of a value of any class of `messages`."""
    serialised: bytes = _to_wire(value).SerializeToString(deterministic=True)
    return serialised


def decode(kind: type[T], data: bytes) -> T:
    """Return the decoded value, of the given class. Raises BrokenRuleError (malformed), nothing
    else."""
    parsed = _WIRE[kind]()
    try:
        parsed.ParseFromString(data)
        value: T = _from_wire(kind, parsed)
    except (DecodeError, ValueError, RecursionError) as error:
        raise _malformed(
            kind, str(error) if type(error) is ValueError else "can't be parsed"
        ) from None
    parsed.DiscardUnknownFields()
    if parsed.SerializeToString(deterministic=True) != data:
        raise _malformed(kind, "not serialised canonically")
    return value


def check_names(names: Sequence[str], what: str) -> None:
    """Raise BrokenRuleError (duplicate, or malformed) unless sorted and without repeats."""
    if len(set(names)) != len(names):
        raise BrokenRuleError(Rule.DUPLICATE, f"{what} name a client twice")
    if list(names) != sorted(names):
        raise BrokenRuleError(Rule.MALFORMED, f"{what} are not sorted")


def _malformed(kind: type[Any], why: str) -> BrokenRuleError:
    return BrokenRuleError(Rule.MALFORMED, f"not a valid message of type {kind.__name__}: {why}")


def _to_wire(value: Any) -> Any:
    kind = type(value)
    values: dict[str, Any] = {}
    for name, wire_name, repeated, nested in _DESCRIBED[kind][0]:
        item = getattr(value, name)
        if not nested or item is None:
            values[wire_name] = item
        else:
            values[wire_name] = [_to_wire(each) for each in item] if repeated else _to_wire(item)
    return _WIRE[kind](**values)


def _from_wire(kind: type[Any], parsed: Any) -> Any:
    values: dict[str, Any] = {}
    for name, wire_name, repeated, optional, convert in _DESCRIBED[kind][1]:
        if optional and not parsed.HasField(wire_name):
            values[name] = None
            continue
        found = getattr(parsed, wire_name)
        if repeated:
            values[name] = tuple(found if convert is None else [convert(each) for each in found])
        else:
            values[name] = found if convert is None else convert(found)
    return kind(**values)
