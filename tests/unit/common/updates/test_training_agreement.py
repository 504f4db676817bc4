"""The digest of the training that all clients of a masked round share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from potluck.common.errors import ConfigurationError, ProtocolError
from potluck.common.settings.local_training import LocalTraining
from potluck.common.updates.training_agreement import (
    CHANGING,
    UNBOUND,
    check_alike,
    client_seed,
    settings_sha256,
    training_sha256,
)
from potluck.rpc.v1 import coordinator_pb2 as rpc

Edit = Callable[[rpc.Train], None]


def training() -> rpc.Train:
    return rpc.Train(
        task=rpc.Plugin(name="digits", options_json='{"clients": 6, "alpha": 0.5}'),
        objective=rpc.Plugin(name="cross-entropy"),
        training_json=LocalTraining(steps=5).model_dump_json(),
        run_seed=7,
        seed=client_seed(7, 2, "client-0"),
    )


def instruction(work: rpc.Train) -> rpc.Instruction:
    return rpc.Instruction(client_id="client-0", round=2, train=work)


def test_client_seeds_depend_on_run_round_and_client() -> None:
    seeds = {client_seed(*of) for of in ((7, 2, "a"), (7, 2, "b"), (7, 3, "a"), (8, 2, "a"))}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    "edit",
    [
        lambda work: setattr(work.task, "options_json", '{"alpha":0.50 ,"clients":6}'),
        lambda work: setattr(work.objective, "options_json", "{}"),
        lambda work: setattr(work, "training_json", work.training_json.replace(":5,", ": 5 ,")),
        lambda work: setattr(work, "training_json", LocalTraining(steps=5).as_json()),
        lambda work: setattr(work, "weighting", rpc.WEIGHTING_EXACT),
        lambda work: setattr(work, "seed", 1),  # not this client's seed
    ],
)
def test_equivalent_trainings_have_the_same_digest(edit: Edit) -> None:
    other = training()
    edit(other)
    assert training_sha256(other) == training_sha256(training())


@pytest.mark.parametrize(
    "edit",
    [
        lambda work: setattr(work.task, "name", "colored-digits"),
        lambda work: setattr(work.task, "options_json", '{"clients": 7, "alpha": 0.5}'),
        lambda work: setattr(work.task, "model_json", '{"name": "perceptron"}'),
        lambda work: setattr(work.objective, "name", "fedprox"),
        lambda work: work.further_objectives.add(name="fedprox"),
        lambda work: setattr(work, "training_json", LocalTraining(steps=6).model_dump_json()),
        lambda work: setattr(work, "run_seed", 8),
        lambda work: setattr(work, "weighting", rpc.WEIGHTING_EQUAL),
        lambda work: setattr(work, "normalized", True),
        lambda work: setattr(work.auxiliary.correction, "name", "scaffold"),
        lambda work: work.auxiliary.names.append("control"),
        lambda work: setattr(work.auxiliary.shared, "blake3", "0" * 64),
    ],
)
def test_change_that_affects_the_update_changes_the_digest(edit: Edit) -> None:
    other = training()
    edit(other)
    assert training_sha256(other) != training_sha256(training())


Path = tuple[FieldDescriptor, ...]


def paths(of: Descriptor, before: Path = ()) -> Iterator[Path]:
    """Yield the paths of all fields of a message and of the messages in it, without recursion into
    the same type."""
    for field in of.fields:
        path = (*before, field)
        inner = field.message_type
        if inner is None:
            yield path
        elif inner not in (of, *(each.message_type for each in before)):
            yield from paths(inner, path)


def changed(path: Path) -> rpc.Train:
    """Return the training with another value in one field."""
    work = training()
    message: Any = work
    for field in path[:-1]:
        found = getattr(message, field.name)
        message = found.add() if field.is_repeated else found
    field = path[-1]
    if field.name == "training_json":
        value: Any = LocalTraining(steps=6).as_json()
    elif field.name.endswith("_json"):
        value = '{"other": 1}'
    else:
        kinds = {
            FieldDescriptor.CPPTYPE_STRING: "other",
            FieldDescriptor.CPPTYPE_BOOL: True,
            FieldDescriptor.CPPTYPE_DOUBLE: 0.25,
            FieldDescriptor.CPPTYPE_ENUM: 2,
        }
        value = kinds.get(field.cpp_type, 9)
    if field.is_repeated:
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)
    return work


@pytest.mark.parametrize(
    "path",
    list(paths(rpc.Train.DESCRIPTOR)),
    ids=lambda path: ".".join(each.name for each in path),
)
def test_every_training_field_is_in_the_digest_unless_listed_with_a_reason(path: Path) -> None:
    names = {field.full_name for field in path}
    free = bool(names & UNBOUND.keys())
    assert (training_sha256(changed(path)) == training_sha256(training())) == free
    free = free or bool(names & CHANGING)
    assert (settings_sha256(changed(path)) == settings_sha256(training())) == free


def test_fields_listed_as_outside_the_digest_exist() -> None:
    names = {each.full_name for path in paths(rpc.Train.DESCRIPTOR) for each in path}
    assert names >= UNBOUND.keys() | CHANGING
    assert all(UNBOUND.values()), "each has a reason"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", ProtocolError),
        ("[]", ProtocolError),
        ("{}", ProtocolError),
        (json.dumps({**LocalTraining().model_dump(), "learning_rate": -1.0}), ConfigurationError),
    ],
)
def test_training_with_invalid_settings_has_no_digest(text: str, error: type[Exception]) -> None:
    work = training()
    work.training_json = text
    with pytest.raises(error):
        training_sha256(work)


def test_training_that_is_equal_for_all_clients_is_accepted() -> None:
    check_alike(instruction(training()))


@pytest.mark.parametrize(
    "edit",
    [
        lambda work: setattr(work, "seed", 1),
        lambda work: setattr(work, "run_seed", 8),
        lambda work: setattr(work, "pace", 0.5),
        lambda work: work.quotas.append(1.0),
        lambda work: work.reports.append("root_mean_square"),
        lambda work: setattr(work.auxiliary.personal, "blake3", "0" * 64),
        lambda work: setattr(work.before_upload, "kind", "loss"),
        lambda work: work.kept.purposes.append("model"),
        lambda work: work.kept.purposes.append("correction"),
    ],
)
def test_training_with_settings_for_a_single_client_is_refused(edit: Edit) -> None:
    work = training()
    edit(work)
    with pytest.raises(ProtocolError, match=r"client 'client-0' .* must train alike"):
        check_alike(instruction(work))
