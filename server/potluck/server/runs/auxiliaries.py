"""Auxiliaries: files that a run's strategy sends to clients beside the model."""

from __future__ import annotations

import json

from potluck.common.interruptible import in_thread
from potluck.rpc.v1 import coordinator_pb2
from potluck.server.hosts.instructions import model_reference
from potluck.server.runs.run import Run
from potluck.server.store.model_files import ModelVersion


class AuxiliaryFiles:
    """Writes the files of auxiliaries and says where they are. Lives on the event loop."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._shared: tuple[int, ModelVersion] | None = None
        self._personal: dict[str, ModelVersion] = {}

    @property
    def digests(self) -> set[str]:
        """The files that hosts may be about to fetch."""
        files = list(self._personal.values())
        if self._shared is not None:
            files.append(self._shared[1])
        return {digest for file in files for digest in file.digests}

    async def message(self, client: str) -> coordinator_pb2.Auxiliary | None:
        """The part of a client's instruction that names them; None where there are none."""
        run, strategy = self._run, self._run.plan.strategy
        correction = strategy.correction
        if correction is None:
            return None
        shared = await self._shared_file()
        message = coordinator_pb2.Auxiliary(
            correction=coordinator_pb2.Plugin(
                name=correction.name, options_json=json.dumps(dict(correction.options))
            ),
            names=sorted(strategy.auxiliary),
            shared=model_reference(shared),
        )
        personal = await in_thread(strategy.personal, run.states.strategy, client)
        if personal:
            file = await in_thread(run.work.write_auxiliaries, personal)
            self._personal[client] = file
            message.personal.CopyFrom(model_reference(file))
        return message

    async def _shared_file(self) -> ModelVersion:
        """Written once a round; a coordinator that was restarted writes the same again."""
        run, strategy = self._run, self._run.plan.strategy
        if self._shared is None or self._shared[0] != run.machine.round:
            with run.services.files.large_arrays():
                auxiliaries = await in_thread(strategy.broadcast, run.states.strategy)
            file = await in_thread(run.work.write_auxiliaries, auxiliaries)
            run.services.files.let_go(self.digests - file.digests)
            self._shared, self._personal = (run.machine.round, file), {}
        return self._shared[1]
