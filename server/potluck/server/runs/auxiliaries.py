"""Auxiliaries: files that a run's strategy sends to clients in addition to the model."""

from __future__ import annotations

import json

from potluck.common.interruptible import in_thread
from potluck.rpc.v1 import coordinator_pb2
from potluck.server.hosts.instructions import model_reference
from potluck.server.runs.models import Models
from potluck.server.store.model_files import ModelFiles, ModelVersion
from potluck.server.strategy import Strategy


class AuxiliaryFiles:
    """Writes the files of auxiliaries and returns references to them. Used on the event loop."""

    def __init__(self, strategy: Strategy, models: Models, files: ModelFiles) -> None:
        self._strategy = strategy
        self._models = models
        self._files = files
        self._shared: tuple[int, ModelVersion] | None = None
        self._personal: dict[str, ModelVersion] = {}

    @property
    def digests(self) -> set[str]:
        """Digests of the files that hosts may still fetch."""
        files = list(self._personal.values())
        if self._shared is not None:
            files.append(self._shared[1])
        return {digest for file in files for digest in file.digests}

    async def message(self, client: str, round_number: int) -> coordinator_pb2.Auxiliary | None:
        """Return the part of a client's instruction that names its auxiliary files; None if the
        strategy sends none."""
        strategy, models = self._strategy, self._models
        correction = strategy.correction
        if correction is None:
            return None
        shared = await self._shared_file(round_number)
        message = coordinator_pb2.Auxiliary(
            correction=coordinator_pb2.Plugin(
                name=correction.name, options_json=json.dumps(dict(correction.options))
            ),
            names=sorted(strategy.auxiliary),
            shared=model_reference(shared),
        )
        personal = await in_thread(strategy.personal, models.states.strategy, client)
        if personal:
            file = await in_thread(models.work.write_auxiliaries, personal)
            self._personal[client] = file
            message.personal.CopyFrom(model_reference(file))
        return message

    async def _shared_file(self, round_number: int) -> ModelVersion:
        """Return the file that all clients receive. It is written once per round; after a restart,
        the same file is written again."""
        models = self._models
        if self._shared is None or self._shared[0] != round_number:
            with self._files.large_arrays():
                auxiliaries = await in_thread(self._strategy.broadcast, models.states.strategy)
            file = await in_thread(models.work.write_auxiliaries, auxiliaries)
            self._files.let_go(self.digests - file.digests)
            self._shared, self._personal = (round_number, file), {}
        return self._shared[1]
