"""The client process: it stays connected to the coordinator while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from potluck.client.base.host_metrics import HostMetrics
from potluck.client.base.state_directory import StateDirectory
from potluck.client.base.worker import Worker
from potluck.client.config import ClientConfig
from potluck.client.control.attending import Attending
from potluck.client.control.inbox import Instructions
from potluck.client.disclosure.member_keys import follow, key_of
from potluck.client.disclosure.outgoing_log import OutgoingLog
from potluck.client.disclosure.privacy_budget import PrivacyBudget
from potluck.client.disclosure.releases import Asker, Discloser
from potluck.client.handlers.handler_context import HandlerContext
from potluck.client.handlers.host_sums import HostSums
from potluck.client.handlers.instruction_log import InstructionLog
from potluck.client.handlers.measured_workers import MeasuredWorkers
from potluck.client.handlers.repeated_failures import RepeatedFailures
from potluck.client.handlers.selection_guard import open_guard
from potluck.client.handlers.sum_participant import check_masks, open_participant
from potluck.client.handlers.training_groups import TrainingGroups
from potluck.client.private_training import GUARD, PrivacyGuard, made_once
from potluck.client.training.processes.device_process import DeviceProcess, WorkerProcesses
from potluck.client.training.processes.training_worker import DeviceTerms
from potluck.client.training.processes.worker_count import workers_on_cpu
from potluck.client.transfer.download import Downloads
from potluck.client.transfer.link import Link
from potluck.client.transfer.model_cache import ModelCache
from potluck.client.transfer.object_stores import ObjectStores
from potluck.client.transfer.saved_states import KeptStates, OwnFiles
from potluck.client.transfer.saved_updates import KeptUpdates
from potluck.common.errors import (
    ConfigurationError,
    IdentityError,
    PotluckError,
)
from potluck.common.learning.step_by_step import LEAKS
from potluck.common.names import ClientId
from potluck.common.net.build_version import software_version
from potluck.common.net.identity import Role
from potluck.common.net.membership_in_force import MembershipInForce
from potluck.common.net.protocol import (
    MAXIMUM_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    VERSIONS,
)
from potluck.common.net.tls import DATA_OPTIONS, channel
from potluck.common.settings import plugins
from potluck.common.tracing import open_tracer
from potluck.rpc.v1 import coordinator_pb2 as rpc

if TYPE_CHECKING:  # imports torch, which takes seconds: only the worker's thread may do so
    from potluck.client.training.device import TrainingDevice

log = structlog.get_logger()

_FRAME_BYTES = 1024


class Agent:
    """Connects to the coordinator, carries out its instructions, and reconnects.

    Call `run` once, on an event loop.
    """

    def __init__(
        self,
        config: ClientConfig,
        state: StateDirectory,
        *,
        device: str,
        generator: random.Random,
        metrics: HostMetrics | None = None,
        processes: WorkerProcesses | None = None,
    ) -> None:
        """`device`: "cpu", "cuda:N", or several GPUs, separated by commas. `generator`: source of
        the jitter of the pauses between connection attempts. `processes`: the worker processes that
        train clients; None if this process trains them.

        Raises ConfigurationError or IdentityError for certificates or clients that can't be used.
        """
        self._config = config
        self._clients = config.client_ids()
        self._state = state
        self._device = device
        self._generator = generator
        self._metrics = metrics or HostMetrics()
        self._processes = processes
        _check_claims(config, self._clients)
        check_masks(config.disclosure)
        self._in_force = self._membership()
        self._attending = Attending(
            config,
            self._make_hello(),
            generator=generator,
            metrics=self._metrics,
            membership=self._in_force,
        )

    async def run(self) -> None:
        """Stay connected until cancelled. Raises the errors that reconnecting can't fix."""
        config = self._config
        link = Link(
            lambda: channel(config.coordinator, config.tls, options=DATA_OPTIONS),
            generator=self._generator,
            maximum_seconds=config.reconnect_maximum_seconds,
            concurrent=config.concurrent_transfers,
            metrics=self._metrics,
            stores=ObjectStores(
                config.object_stores, authority=config.object_store_authority, metrics=self._metrics
            ),
        )
        cache = ModelCache(self._state.models, keep=config.cached_models)
        devices = [self._terms(device) for device in self._device.split(",")]
        tracer = open_tracer(
            config.tracing, "potluck-host", config.tls.load(Role.HOST).identity.name
        )
        worker = Worker(
            *(device.make for device in devices),
            cancel_timeout_seconds=config.cancel_timeout_seconds,
        )
        trainers, measured = self._trainers(worker, devices)
        budget = PrivacyBudget(self._state.path, config.disclosure, self._metrics)
        discloser = self._make_discloser(budget)
        guard = made_once(
            lambda: plugins.integration(GUARD)(
                self._state.path,
                config.disclosure,
                federation=discloser.asker.federation,
                coordinator=discloser.asker.coordinator,
                budget=budget,
            )
        )
        budget.share_with(guard)
        instruction_log = InstructionLog()
        updates = KeptUpdates(self._state.updates, now=time.time())
        context = HandlerContext(
            clients=frozenset(self._clients),
            policy=config.disclosure,
            log=instruction_log,
            link=link,
            downloads=Downloads(
                link, cache, self._state.fetched, maximum_bytes=config.maximum_model_bytes
            ),
            updates=updates,
            host_sums=HostSums(instruction_log, updates, link),
            states=KeptStates(self._state.kept),
            own_files=OwnFiles(self._state.trainers),
            worker=worker,
            trainers=trainers,
            groups=TrainingGroups(trainers, instruction_log),
            discloser=discloser,
            outgoing=OutgoingLog(
                self._state.outgoing,
                federation=discloser.asker.federation,
                coordinator=discloser.asker.coordinator,
            ),
            sums=open_participant(config.disclosure, config.member_key, self._in_force, budget),
            metrics=self._metrics,
            failures=RepeatedFailures(),
            guard=guard,
            selections=open_guard(
                self._state.path, config.member_key, self._in_force, self._clients
            ),
            measured=measured,
            tracer=tracer,
        )
        instructions = Instructions(context, say=self._attending.say)
        self._metrics.serves(len(self._clients), budget=config.disclosure.epsilon_budget)
        budget.show(*budget.clients())
        self._metrics.watch(
            state=config.state_directory, tls=config.tls, stages=instructions.stages
        )
        following = asyncio.create_task(follow(self._in_force, self._clients))
        showing = asyncio.create_task(self._show_spent(context.guard))
        try:
            await self._attending.for_ever(instructions, link)
        finally:
            following.cancel()
            showing.cancel()
            await instructions.close()
            worker.close()
            trainers.close()
            await link.close()
            if tracer is not None:
                await asyncio.to_thread(tracer.close)

    async def _show_spent(self, guard: Callable[[], PrivacyGuard]) -> None:
        """Show the ε that clients have spent before this process started."""
        if not any(self._state.privacy.iterdir()):
            return  # no ledger to read: don't import the accounting, which takes seconds
        limit = self._config.disclosure.training_limit
        try:
            ledgers = await asyncio.to_thread(guard)
            for client in ledgers.clients():
                spent = await asyncio.to_thread(ledgers.spent, client)
                self._metrics.spent_on_trainings(client, spent, limit=limit)
        except PotluckError as error:
            log.warning("privacy ledger not read", why=error.message)

    def _make_discloser(self, budget: PrivacyBudget) -> Discloser:
        config = self._config
        identity = config.tls.load(Role.HOST).identity
        if config.member_key is not None:
            for client in self._clients:
                # a missing key must fail the start, not a later signature
                key_of(config.member_key, client)
        if config.disclosure.undermined:
            log.warning(
                'noise under adjacency = "add-remove" hides little if the number of samples is '
                'reported; set weighting = "equal" in [disclosure], or adjacency = "replace"'
            )
        if config.disclosure.simulation_seed is not None:
            log.warning(
                "simulation_seed in [disclosure] determines the noise, so that the noise "
                "protects no client; remove simulation_seed unless this is an experiment"
            )
        if config.disclosure.allows_stepwise:
            log.warning(
                '`sums` in [disclosure] allows "unsafe-stepwise": the coordinator can learn the '
                "exact label counts of these clients"
            )
            for leak in LEAKS:
                log.warning(f"unsafe-stepwise: {leak}")
        return Discloser(
            policy=config.disclosure,
            budget=budget,
            asker=Asker(federation=identity.federation, coordinator=config.coordinator),
            member_key=config.member_key,
            in_force=self._in_force,
            metrics=self._metrics,
        )

    def _membership(self) -> MembershipInForce | None:
        config = self._config
        if config.federation_root is None:
            return None
        return MembershipInForce(
            config.federation_root,
            federation=config.tls.load(Role.HOST).identity.federation,
            file=config.members,
            state_directory=self._state.path,
        )

    def _terms(self, device: str) -> DeviceTerms:
        config = self._config
        return DeviceTerms(
            device=device,
            threads=config.threads,
            deterministic=config.deterministic,
            data_directory=config.data_directory,
            model_modules=config.model_modules,
            availability=config.availability,
            choices=self._choices,
            sharing=self._workers_on_each(),
            log_format=config.log_format,
            log_level=config.log_level,
        )

    def _trainers(
        self, worker: Worker[TrainingDevice], devices: Sequence[DeviceTerms]
    ) -> tuple[Worker[Any], MeasuredWorkers | None]:
        """Return the worker that trains clients, and an object that may add processes to it.

        Clients train in processes, the same number on each device, or in the threads of `worker`;
        these threads compute everything else. On GPUs the number of processes may be measured
        later. The object is None if it will not be measured.
        """
        processes = self._processes
        if processes is None:
            return worker, None
        makes = [partial(DeviceProcess, processes, device) for device in devices]
        measured = processes.most_on_gpu > 1 and self._device != "cpu"
        trainers: Worker[Any] = Worker(
            *makes * (1 if measured else self._workers_on_each()),
            cancel_timeout_seconds=self._config.cancel_timeout_seconds,
        )
        if not measured:
            return trainers, None
        return trainers, MeasuredWorkers(
            trainers,
            makes,
            devices=self._described_devices(),
            most=processes.most_on_gpu,
            choices=self._choices,
        )

    def _workers_on_each(self) -> int:
        """Return the maximum number of worker processes per device, also after the measurement."""
        processes = self._processes
        if processes is None:
            return 1
        if processes.most_on_gpu == 1:
            return max(1, processes.count // len(self._device.split(",")))
        if self._device == "cpu":  # there is no GPU that torch can use
            return workers_on_cpu(self._config)
        return processes.most_on_gpu

    @property
    def _choices(self) -> Path:
        return self._config.choices_directory or self._state.choices

    def _described_devices(self) -> str:
        if self._device == "cpu":
            return self._device  # torch need not be imported yet
        from potluck.client.training.device import described_devices

        return described_devices(self._device)

    def _make_hello(self) -> rpc.Hello:
        hello = rpc.Hello(
            protocol_version=PROTOCOL_VERSION,
            software_version=software_version(),
            client_ids=self._clients,
            device=self._described_devices(),
            tasks=plugins.installed(plugins.TASKS),
            data_epoch=self._config.disclosure.data_epoch,
            versions=VERSIONS,
            process_id=secrets.token_hex(8),
            tags=self._config.tags,
        )
        if hello.ByteSize() > MAXIMUM_MESSAGE_BYTES - _FRAME_BYTES:
            raise ConfigurationError(
                f"the list of {len(self._clients)} clients is too long for one message; "
                "distribute the clients over more hosts",
                clients=len(self._clients),
            )
        return hello


def _check_claims(config: ClientConfig, clients: list[ClientId]) -> None:
    """Raise IdentityError unless the certificate allows all of these clients."""
    identity = config.tls.load(Role.HOST).identity
    for client in clients:
        if not identity.may_speak_for(client):
            raise IdentityError(
                f"the certificate {config.tls.certificate} does not allow host '{identity.name}' "
                f"to send messages for client '{client}'; issue another certificate with "
                "`potluck pki issue`, or remove the client from `clients`",
                client=client,
                host=identity.name,
            )


async def attend_until(agent: Agent, stop: asyncio.Event) -> None:
    """Run an agent until `stop` is set. Raises what `Agent.run` raises."""
    running = asyncio.create_task(agent.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not running.done():
            running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
