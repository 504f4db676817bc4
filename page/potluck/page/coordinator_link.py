"""The web UI's single connection to the coordinator, and the state of that connection."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, Generic, Literal, Self, TypeVar

from potluck.common.errors import (
    ConfigurationError,
    IdentityError,
    PotluckError,
    UnreachableError,
)
from potluck.common.net.identity import Role
from potluck.common.net.tls import TlsMaterial
from potluck.deploy.operator.operator_client import OperatorClient, connect
from potluck.deploy.operator.operator_config import OperatorConfig
from potluck.page.page_shapes import ConnectionShown

# The connection -----------------------------------------------------------------------------------

Result = TypeVar("Result")

log = logging.getLogger("potluck.page")


class CertificateTroubleError(IdentityError):
    """The operator's certificate, or the coordinator's, can't be used now."""


class PageFaultError(PotluckError):
    """The web UI's server failed. This is a bug: no request or answer should make it fail."""

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Return the fault for an unexpected error; log the error's traceback to the terminal."""
        log.error("the web UI's server failed", exc_info=error)
        return cls(
            f"the web UI's server failed ({type(error).__name__}: {error}); see the terminal in "
            "which `potluck page` runs"
        )


class CoordinatorLink:
    """Calls the coordinator with the operator's certificate; reloads a renewed certificate.

    It is an asynchronous context manager, and is used on one event loop.
    """

    def __init__(self, config: OperatorConfig) -> None:
        self._config = config
        self._open = AsyncExitStack()
        self._client: OperatorClient | None = None
        self._material: TlsMaterial | None = None
        self._error: PotluckError | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    @property
    def address(self) -> str:
        """The coordinator's address, HOST:PORT."""
        return self._config.coordinator

    def shown(self) -> ConnectionShown:
        """Return the state of the connection, with the reason if the last call failed."""
        error = self._error
        return ConnectionShown(
            address=self.address,
            reached=error is None,
            trouble="" if error is None else trouble_of(error),
            text="" if error is None else error.message,
        )

    async def call(self, ask: Callable[[OperatorClient], Awaitable[Result]]) -> Result:
        """Return the coordinator's answer to `ask`.

        Raises PotluckError if the call fails; CertificateTroubleError if a certificate is the
        cause.
        """
        try:
            answer = await ask(await self.client())
        except PotluckError as error:
            raise self.blamed(error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self.blamed(
                UnreachableError("the connection to the coordinator was renewed; try again")
            ) from None
        self.reached()
        return answer

    async def client(self) -> OperatorClient:
        """Return the client, connected with the current certificate. Raises PotluckError."""
        if self._client is None:
            try:
                material = self._config.tls.load(Role.OPERATOR)
                self._client = await self._open.enter_async_context(connect(self._config))
            except (ConfigurationError, IdentityError) as error:
                raise _certificate_trouble(error) from None
            self._material = material
        return self._client

    def reached(self) -> None:
        """Record that the coordinator has answered."""
        self._error = None

    def blamed(self, error: PotluckError) -> PotluckError:
        """Return the error to show for a failed call: the certificate's error if that is the cause.

        If the coordinator sent the error, the connection works: an earlier error is cleared.
        """
        if not isinstance(error, (UnreachableError, IdentityError)):
            self.reached()
            return error
        try:
            material = self._config.tls.load(Role.OPERATOR)
        except (ConfigurationError, IdentityError) as worse:
            self._client = None
            error = _certificate_trouble(worse)
        else:
            if material != self._material:  # renewed certificate or authority: next call reconnects
                self._client = None
            if isinstance(error, IdentityError):
                error = _certificate_trouble(error)
        self._error = error
        return error


def _certificate_trouble(error: PotluckError) -> CertificateTroubleError:
    if isinstance(error, CertificateTroubleError):
        return error
    return CertificateTroubleError(error.message)


def trouble_of(error: PotluckError) -> Literal["lost", "certificate", "fault", "other"]:
    """Return the kind of trouble with a connection; `fault` is a failure of the web UI's server."""
    if isinstance(error, PageFaultError):
        return "fault"
    if isinstance(error, IdentityError):
        return "certificate"
    return "lost" if isinstance(error, UnreachableError) else "other"


# Answers for many pages ---------------------------------------------------------------------------

Answer = TypeVar("Answer")


class SharedAnswers(Generic[Answer]):
    """A cache of answers by key, each valid for some seconds. Used on one event loop."""

    def __init__(self, seconds: float) -> None:
        """seconds: maximum age of an answer."""
        self._seconds = seconds
        self._asked: dict[str, tuple[float, asyncio.Task[Answer]]] = {}

    async def of(self, key: str, ask: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """Return a recent or pending answer for `key`; call `ask` if there is none.

        Raises the errors of `ask`. Errors are not cached: the next call asks again.
        """
        now = time.monotonic()
        self._asked = {
            name: (at, asking)
            for name, (at, asking) in self._asked.items()
            if not asking.done() or (now - at < self._seconds and _has_answer(asking))
        }
        if key not in self._asked:
            self._asked[key] = now, asyncio.create_task(ask())
        return await asyncio.shield(self._asked[key][1])  # shielded, since other pages may wait too


def _has_answer(asking: asyncio.Task[Answer]) -> bool:
    return not asking.cancelled() and asking.exception() is None
