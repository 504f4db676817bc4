"""The digest of all that clients of a masked round compute alike; its secure sum is bound to it.

A coordinator that has one client train and the others stand still learns that client's update from
the sum. So the sum's header names this digest, and each client compares it with that of its own
instruction (SECAGG §R0).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from potluck.common.disclosure import canonical_json
from potluck.common.errors import ProtocolError
from potluck.common.settings.configuration import validate
from potluck.common.settings.local_training import LocalTraining
from potluck.rpc.v1 import coordinator_pb2 as rpc

_LABEL: Final = b"potluck masked training 1\0"


def client_seed(run_seed: int, round_number: int, client: str) -> int:
    """Seed of a client's training in a round: 63 bits of SHA-256(seed / round / client)."""
    text = f"{run_seed}/{round_number}/{client}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def training_sha256(work: rpc.Train) -> bytes:
    """Digest of all in an instruction that decides what a client computes and how it is weighed.

    The model is not in it: the header names it. Settings are parsed first, so that two texts that
    mean the same give one digest. Raises ProtocolError where they can't be parsed or leave
    something to the client, ConfigurationError for values that are not allowed.
    """
    given = _object(work.training_json, "training settings")
    settings = validate(LocalTraining, given, source="training")
    training = json.loads(settings.as_json())
    if missing := training.keys() - given.keys():
        raise ProtocolError(f"training settings for a secure sum leave {min(missing)} open")
    auxiliary = work.auxiliary
    decides = {
        "task": _plugin(work.task),
        "objectives": [_plugin(each) for each in (work.objective, *work.further_objectives)],
        "training": training,
        "run_seed": work.run_seed,
        "weighting": work.weighting or rpc.WEIGHTING_EXACT,
        "normalized": work.normalized,
        "correction": _plugin(auxiliary.correction),
        "auxiliaries": list(auxiliary.names),
        "shared": auxiliary.shared.blake3,
    }
    return hashlib.sha256(_LABEL + canonical_json(decides).encode()).digest()


def check_alike(instruction: rpc.Instruction) -> None:
    """Raise ProtocolError where an instruction to train for a masked round is for one client alone.

    Its seed is the run's, the round's and the client's; nothing else differs between clients.
    """
    work, client = instruction.train, instruction.client_id
    alone = {
        "a limit on samples of each class": bool(work.quotas),
        "tensors to leave out of its update": bool(work.dropped),
        "a file of auxiliaries for this client only": bool(work.auxiliary.personal.blake3),
        "simulated seconds by the number of samples": work.pace != 0,
        "numbers reported beside the sum": bool(work.reports),
        "a seed that does not follow from the run's": work.seed
        != client_seed(work.run_seed, instruction.round, client),
    }
    for what, found in alone.items():
        if found:
            raise ProtocolError(
                f"client '{client}' was told to train for a secure sum with {what}; all clients of "
                "a masked round train alike",
                client=client,
            )


def _plugin(message: rpc.Plugin) -> dict[str, Any]:
    return {
        "name": message.name,
        "options": _object(message.options_json, "options"),
        "model": _object(message.model_json, "a model"),
    }


def _object(text: str, what: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ProtocolError(f"{what} that are not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ProtocolError(f"{what} that are no JSON object")
    return found
