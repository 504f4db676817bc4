"""A host under test: its configuration, and instructions for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from potluck.client.config import ClientConfig
from potluck.common.net.protocol import MAXIMUM_MESSAGE_BYTES
from potluck.common.net.tls import TlsFiles
from potluck.common.tasks.digits import Digits
from potluck.common.tensors.model_arrays import state_arrays
from potluck.common.tensors.tensor_files import write_tensors
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2

MINUTE_SECONDS = 60


def host_config(folder: Path, tls: TlsFiles, port: int, **changes: Any) -> ClientConfig:
    values = {
        "coordinator": f"127.0.0.1:{port}",
        "clients": ("client-0:5",),
        "state_directory": folder / "state",
        "device": "cpu",
        "reconnect_maximum_seconds": 0.2,
        "disclosure": {"questions": ["loss"], "held_out_counts": True},
        "tls": tls,
    }
    return ClientConfig.model_validate(values | changes)


def write_config(config: ClientConfig, path: Path) -> Path:
    """Write the configuration as a TOML file; return its path."""
    values = config.model_dump(mode="json", exclude_none=True)
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if key not in tables]
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    path.write_text("\n".join(lines))
    return path


def digits_model(folder: Path, seed: int = 0) -> bytes:
    """Return the bytes of a file with a new model of the digits task; they don't fit into one
    message."""
    torch.manual_seed(seed)
    path = folder / f"model-{seed}"
    write_tensors(path, state_arrays(Digits().model()))
    content = path.read_bytes()
    path.unlink()
    assert len(content) < MAXIMUM_MESSAGE_BYTES
    return content


def reference(blake3: str, size: int) -> transfer_pb2.ModelReference:
    """Return a reference to a model with only a float32 file."""
    whole = transfer_pb2.Rendition(blake3=blake3, size=size, encoding=transfer_pb2.ENCODING_FLOAT32)
    return transfer_pb2.ModelReference(blake3=blake3, size=size, renditions=[whole])


def train_instruction(
    name: str,
    model: transfer_pb2.ModelReference,
    *,
    client: str = "client-0",
    round_: int = 1,
    seconds: float = MINUTE_SECONDS,
    task: str = "digits",
    options: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    encoding: transfer_pb2.Encoding.ValueType = transfer_pb2.ENCODING_FLOAT32,
    delta: bool = False,
    seed: int = 7,
) -> rpc.Instruction:
    instruction = rpc.Instruction(
        id=name,
        client_id=client,
        run_id="run",
        round=round_,
        train=rpc.Train(
            model=model,
            task=rpc.Plugin(name=task, options_json=json.dumps(options or {})),
            objective=rpc.Plugin(name="cross-entropy", options_json="{}"),
            training_json=json.dumps(training or {"epochs": 1}),
            seed=seed,
            encoding=encoding,
            delta=delta,
        ),
    )
    instruction.time_left.FromMilliseconds(int(seconds * 1000))
    return instruction


def summed_instruction(
    name: str,
    model: transfer_pb2.ModelReference,
    companions: Sequence[str] = (),
    **values: Any,
) -> rpc.Instruction:
    """Return an instruction to train; the update is summed with those of the companions."""
    instruction = train_instruction(
        name, model, encoding=transfer_pb2.ENCODING_SUM, delta=True, **values
    )
    instruction.train.companions.extend(companions)
    instruction.train.summing.CopyFrom(
        rpc.Summing(quantum_bits=30, weight_unit=1024, weight_cap=1000)
    )
    return instruction


def evaluate_instruction(
    name: str,
    model: transfer_pb2.ModelReference,
    *,
    client: str = "client-0",
    task: str = "digits",
    options: dict[str, Any] | None = None,
) -> rpc.Instruction:
    instruction = rpc.Instruction(
        id=name,
        client_id=client,
        run_id="run",
        round=1,
        evaluate=rpc.Evaluate(
            model=model, task=rpc.Plugin(name=task, options_json=json.dumps(options or {}))
        ),
    )
    instruction.time_left.FromSeconds(MINUTE_SECONDS)
    return instruction
