"""Digest of everything that all clients of a masked round must have in common; it is bound to their
secure sum.

If a coordinator could make only one client really train, it would learn that client's update from
the sum. So the sum's header contains this digest, and each client compares it with the digest of
its own instruction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, MutableSequence
from types import MappingProxyType
from typing import Any, Final

from google.protobuf.message import Message

from potluck.common.disclosure import canonical_json
from potluck.common.errors import ProtocolError
from potluck.common.settings.configuration import validate
from potluck.common.settings.local_training import LocalTraining
from potluck.common.updates.kept_states import PERSONAL
from potluck.rpc.v1 import coordinator_pb2 as rpc

_LABEL: Final = b"potluck masked training 2\0"
_JSON: Final = "_json"
"""Suffix of the names of fields that contain a JSON object."""
_SETTINGS: Final = "training_json"

_FILE: Final = "the file is checked against its digest, which is bound"
UNBOUND: Final[Mapping[str, str]] = MappingProxyType(
    {
        "potluck.rpc.v1.Train.model": "the header of the sum names the model's digest",
        "potluck.rpc.v1.Train.seed": "it follows from run_seed, round and client (`check_alike`)",
        "potluck.rpc.v1.Train.companions": "clients of a masked round are trained one by one",
        "potluck.rpc.v1.KeptState.included_update_id": "it chooses the client's own model, which "
        "no update depends on; other kept states are refused (`check_alike`)",
        "potluck.rpc.v1.ModelReference.size": _FILE,
        "potluck.rpc.v1.ModelReference.renditions": _FILE,
    }
)
"""Fields of a training instruction that may differ between clients of a round, each with the
reason.

The digest covers every other field, including fields that are added to the schema later.
"""
CHANGING: Final = frozenset(
    {
        "potluck.rpc.v1.Train.part",
        "potluck.rpc.v1.Train.selection",
        "potluck.rpc.v1.Auxiliary.shared",
    }
)
"""Fields that may change from round to round of a run, although its settings stay the same."""


def client_seed(run_seed: int, round_number: int, client: str) -> int:
    """Return the seed of a client's training in a round: 63 bits of SHA-256(seed / round /
    client)."""
    text = f"{run_seed}/{round_number}/{client}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def training_sha256(work: rpc.Train) -> bytes:
    """Return the digest of every field of a training instruction, except those in `UNBOUND`.

    JSON objects are parsed first, so that two texts with the same meaning give the same digest.
    Raises ProtocolError if an object can't be parsed or does not contain all training settings, and
    ConfigurationError for values that are not allowed.
    """
    return _digest(work, UNBOUND)


def settings_sha256(work: rpc.Train) -> bytes:
    """Return the digest of those fields of a training instruction that are the same in all rounds
    of a run.

    Raises the errors of `training_sha256`.
    """
    return _digest(work, UNBOUND.keys() | CHANGING)


def check_alike(instruction: rpc.Instruction) -> None:
    """Raise ProtocolError if an instruction for a masked round has a request for this client only.

    The training seed must be the one that `client_seed` returns.
    """
    work, client = instruction.train, instruction.client_id
    alone = {
        "a limit on samples of each class": bool(work.quotas),
        "tensors to leave out of its update": bool(work.dropped),
        "a file of auxiliaries for this client only": bool(work.auxiliary.personal.blake3),
        "simulated seconds by the number of samples": work.pace != 0,
        "numbers reported beside the sum": bool(work.reports),
        "a question about its trained model": work.HasField("before_upload"),
        "states from its earlier trainings": bool(set(work.kept.purposes) - {PERSONAL}),
        "a seed that is not derived from the run's seed": work.seed
        != client_seed(work.run_seed, instruction.round, client),
    }
    for what, found in alone.items():
        if found:
            raise ProtocolError(
                f"client '{client}' received a training instruction with {what}, which a secure "
                "sum does not allow; all clients of a masked round must train alike",
                client=client,
            )


def _digest(work: rpc.Train, left_out: Collection[str]) -> bytes:
    bound = {"weighting": rpc.WEIGHTING_EXACT} | _bound(work, left_out)
    return hashlib.sha256(_LABEL + canonical_json(bound).encode()).digest()


def _bound(message: Message, left_out: Collection[str]) -> dict[str, Any]:
    """Return the set fields of a message by name. Fields with an empty value are omitted."""
    found = {}
    for field, value in message.ListFields():
        if field.full_name in left_out:
            continue
        many = isinstance(value, MutableSequence)  # true for all repeated fields
        values = [_value(field.name, each, left_out) for each in (value if many else [value])]
        found[field.name] = values if many else values[0]
    return {name: value for name, value in found.items() if value not in ({}, [], "")}


def _value(name: str, value: Any, left_out: Collection[str]) -> Any:
    if isinstance(value, Message):
        return _bound(value, left_out)
    if isinstance(value, bytes):
        return value.hex()
    if not name.endswith(_JSON):
        return value
    given = _object(value, name)
    return _complete(given) if name == _SETTINGS else given


def _complete(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parsed training settings. Raise ProtocolError if a setting is missing, which the
    client would then choose."""
    settings = validate(LocalTraining, given, source="training")
    training: dict[str, Any] = json.loads(settings.as_json())
    if missing := training.keys() - given.keys():
        raise ProtocolError(
            f"training settings for a secure sum must set all keys; `{min(missing)}` is missing"
        )
    return training


def _object(text: str, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ProtocolError(f"{what} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ProtocolError(f"{what} is not a JSON object")
    return found
