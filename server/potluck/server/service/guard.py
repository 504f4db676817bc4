"""The guard that every call to a coordinator or relay passes.

It checks the caller's role, whether the caller's certificate is still valid, and whether each
request is a valid message. It is also the only place where exceptions become gRPC statuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError, Message

from potluck.common.errors import (
    CertificateExpiredError,
    IdentityError,
    OpenFilesError,
    PotluckError,
    ProtocolError,
    RelayStorageError,
    StorageError,
    open_files_error,
    to_status,
)
from potluck.common.names import is_name
from potluck.common.net.frames import FrameDecoder, encode_frame
from potluck.common.net.identity import SPEAKING, Credential, Identity, Role, peer_credential
from potluck.common.plain_text import make_plain
from potluck.rpc.v1 import coordinator_pb2
from potluck.server.hosts.limits import (
    Admission,
    Limits,
    not_left_unread,
    not_too_slow,
    with_first_message,
)
from potluck.server.hosts.line_limit import INTERVAL_SECONDS, LineLimit

# Refused calls in the log -------------------------------------------------------------------------

log = structlog.get_logger()

_OWN_FAULTS = (OpenFilesError, RelayStorageError, StorageError)


class RefusalLog:
    """Logs one line for each peer and reason within an interval. Used on the event loop."""

    def __init__(self, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._limit = LineLimit(_more_refused, interval_seconds=interval_seconds)

    def refused(self, peer: str, method: str, error: PotluckError) -> None:
        """Log a refused call, as a warning if this process is the cause."""
        write = log.warning if isinstance(error, _OWN_FAULTS) else log.info
        self._log(
            (peer, error.reason),
            lambda: write(
                "call refused", peer=peer, method=method, reason=error.reason, why=error.message
            ),
        )

    def failed(self, peer: str, method: str, error: Exception) -> None:
        """Log a call that failed because of an error in this process."""
        self._log(
            (peer, type(error).__name__),
            lambda: log.error("call failed", peer=peer, method=method, exc_info=error),
        )

    def _log(self, event: tuple[str, str], write: Callable[[], Any]) -> None:
        if self._limit.allows(event):
            write()


def _more_refused(event: tuple[str, str], count: int) -> None:
    peer, reason = event
    log.info("more calls refused", peer=peer, reason=reason, count=count)


# The guard ----------------------------------------------------------------------------------------

LOOK_SECONDS = 1.0
"""Seconds between checks whether the certificates of open calls have expired."""

SEND_SECONDS = 3.0
"""Seconds in which a peer whose certificate is no longer valid must read the response that is being
sent. Afterwards its call ends without a status."""

Context = Any  # generated code uses _ServicerContext, which exists only for type checkers

HOSTS = "potluck.rpc.v1.CoordinatorService"
"""Name of the service that hosts call."""

ROLES: Mapping[str, frozenset[Role]] = {
    HOSTS: SPEAKING,
    "potluck.rpc.v1.OperatorService": frozenset({Role.OPERATOR}),
}
"""For each service of a coordinator, the roles that may call it."""


def credential_of(context: Context) -> Credential:
    """Return the credential in the caller's verified certificate."""
    return peer_credential(context.auth_context())


def identity_of(context: Context) -> Identity:
    """Return the identity in the caller's verified certificate."""
    return credential_of(context).identity


def check_client(client: str, identity: Identity) -> None:
    """Raise IdentityError unless this host or relay may send messages for the client."""
    if not is_name(client) or not identity.may_speak_for(client):
        raise IdentityError(
            f"{identity.role} '{identity.name}' may not send messages for client "
            f"{client[:80]!r}, because its certificate does not list this client; issue a "
            "certificate that lists the client with `potluck pki issue … --clients`",
            host=identity.name,
            client=client[:80],
        )


class _Call:
    """An open call. It is ended as soon as its peer's certificate is no longer valid.

    gRPC ends a call without a status, and its client waits forever, if the call's task is cancelled
    while gRPC sends a response. Such a call ends after the response.
    """

    def __init__(self, check_credential: Callable[[], None]) -> None:
        """The current task becomes the call's. check_credential: function that raises IdentityError
        if the certificate is no longer valid."""
        self._task = asyncio.current_task()
        self._check_credential = check_credential
        self._sending = False
        self._late: asyncio.TimerHandle | None = None

    def cut_off(self) -> None:
        """End the call now, or after the response that is being sent."""
        if not self._sending:
            self._cancel()
        elif self._late is None:
            self._late = asyncio.get_running_loop().call_later(SEND_SECONDS, self._cancel)

    async def send(self, responses: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
        """Yield the responses to gRPC. Raises IdentityError if the call was cut off meanwhile."""
        async with contextlib.aclosing(responses):
            async for response in responses:
                self._sending = True
                yield response
                self._sending = False
                if self._late is not None:
                    self._check_credential()

    def close(self) -> None:
        """Cancel the call's timer, because the call has ended."""
        if self._late is not None:
            self._late.cancel()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class Guard(grpc.aio.ServerInterceptor):
    """Checks the caller's role, limits every peer, and converts exceptions into gRPC statuses."""

    def __init__(
        self,
        limits: Limits,
        check_credential: Callable[[Credential], None],
        observe_refusal: Callable[[str, str], None],
        roles: Mapping[str, frozenset[Role]] = ROLES,
        program: str = "coordinator",
    ) -> None:
        """check_credential: function that raises IdentityError for a revoked certificate.
        observe_refusal: function called with the reason and the peer of every refusal. roles: for
        each service, the roles that may call it. program: name of this process in errors."""
        self._limits = limits
        self._admission = Admission(limits)
        self._check_revoked = check_credential
        self._observe_refusal = observe_refusal
        self._roles = roles
        self._program = program
        self._log = RefusalLog()
        # certificate's serial number → calls
        self._calls: defaultdict[int, set[_Call]] = defaultdict(set)
        # serial number → end of validity, if calls are open
        self._expiries: dict[int, datetime] = {}

    def cut_off(self, serials: frozenset[int]) -> None:
        """End every open call of the peers with these certificates, which are no longer valid.
        serials: serial numbers of the certificates."""
        for serial in serials & self._calls.keys():
            for call in self._calls[serial]:
                call.cut_off()

    async def watch_expiry(self) -> None:
        """End open calls when their certificates expire. Runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = datetime.now(UTC)
            expired = frozenset(one for one, end in self._expiries.items() if end < now)
            self.cut_off(expired)
            for serial in expired:
                del self._expiries[serial]

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the method's handler in the checks of this guard."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler  # no such method: gRPC answers UNIMPLEMENTED
        method = handler_call_details.method
        handler = _with_fast_frames(handler, method)
        behaviour = _decoding(handler, method)
        roles = self._roles.get(method.rpartition("/")[0].lstrip("/"))
        if handler.response_streaming:
            return _rebuild(handler, self._guard_stream(behaviour, roles, method))
        return _rebuild(handler, self._guard_single(behaviour, roles, method))

    def _guard_single(
        self,
        behaviour: Callable[[Any, Context], Awaitable[Any]],
        roles: frozenset[Role] | None,
        method: str,
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        async def guarded(request: Any, context: Context) -> Any:
            try:
                with self._admitted(context, roles) as (peer, _):
                    if not method.endswith("/SubmitUpdate"):
                        return await behaviour(request, context)
                    async with self._admission.transfer(peer):
                        return await behaviour(self._paced(request), context)
            except Exception as error:
                await self._abort(context, error, method)

        return guarded

    def _guard_stream(
        self,
        behaviour: Callable[[Any, Context], AsyncGenerator[Any, None]],
        roles: frozenset[Role] | None,
        method: str,
    ) -> Callable[[Any, Context], AsyncIterator[Any]]:
        async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                with self._admitted(context, roles) as (peer, call):
                    if method.endswith("/FetchModel"):
                        async with self._admission.transfer(peer):
                            responses = not_left_unread(behaviour(request, context), self._limits)
                            async for response in call.send(responses):
                                yield response
                        return
                    if method.endswith("/Attend"):
                        request = with_first_message(request, self._limits)
                    async for response in call.send(behaviour(request, context)):
                        yield response
            except Exception as error:
                await self._abort(context, error, method)

        return guarded

    @contextlib.contextmanager
    def _admitted(
        self, context: Context, roles: frozenset[Role] | None
    ) -> Iterator[tuple[str, _Call]]:
        """Admit a call while the block runs; yield the peer's name and the call.

        Raises IdentityError if the peer may not call, or if its certificate is revoked or expires
        during the call; OverloadedError if the peer has too many calls.
        """
        credential = credential_of(context)
        self._check_credential(credential)
        peer = _check_role(credential.identity, roles)
        call = _Call(lambda: self._check_credential(credential))
        calls = self._calls[credential.serial]
        calls.add(call)
        self._expiries[credential.serial] = credential.expires
        try:
            with self._admission.call(peer):
                yield peer, call
        except asyncio.CancelledError:
            self._check_credential(credential)
            raise
        finally:
            call.close()
            calls.discard(call)
            if not calls:
                self._calls.pop(credential.serial, None)
                self._expiries.pop(credential.serial, None)

    def _check_credential(self, credential: Credential) -> None:
        """Raise IdentityError if a certificate has expired or was revoked.

        TLS checks only when a connection is opened whether the certificate has expired.
        """
        if credential.expires < datetime.now(UTC):
            raise CertificateExpiredError(
                f"the certificate of {credential} expired on "
                f"{credential.expires:%Y-%m-%d %H:%M} UTC; renew it with `potluck pki renew`",
                expired=credential.expires,
            )
        self._check_revoked(credential)

    async def _abort(self, context: Context, error: Exception, method: str) -> NoReturn:
        """End a call with the status of an error, and log it."""
        if isinstance(error, grpc.aio.AbortError) or type(error).__name__ == "ExecuteBatchError":
            raise error  # the call is aborted already: `logs.py` logs the broken connection
        peer = _name_of(context)
        error = open_files_error(error, self._program) or error
        if isinstance(error, PotluckError):
            self._log.refused(peer, method, error)
        else:
            self._log.failed(peer, method, error)
            error = _unexpected(error, self._program)
        self._observe_refusal(error.reason, peer)
        details = to_status(error).SerializeToString()
        await context.abort(error.code, error.message, (("grpc-status-details-bin", details),))
        raise AssertionError("unreachable: `abort` always raises")

    def _paced(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        first = with_first_message(requests, self._limits)
        return not_too_slow(first, self._limits, len, time.monotonic)


def _with_fast_frames(handler: Any, method: str) -> Any:
    """Return the handler, which for file transfers sends and receives chunks as bytes (see
    `frames.py`)."""
    if method.endswith("/FetchModel"):
        return grpc.unary_stream_rpc_method_handler(
            handler.unary_stream,
            request_deserializer=handler.request_deserializer,
            response_serializer=encode_frame,
        )
    if method.endswith("/SubmitUpdate"):
        return grpc.stream_unary_rpc_method_handler(
            handler.stream_unary,
            request_deserializer=FrameDecoder(coordinator_pb2.SubmitUpdateRequest),
            response_serializer=handler.response_serializer,
        )
    return handler


def _decoding(handler: Any, method: str) -> Callable[[Any, Context], Any]:
    """Return the handler's function, for requests that arrive as bytes.

    Requests are decoded inside the guard: an error in a gRPC deserializer would end the call
    without a reason, and flood the log. Control characters are removed from all texts in the
    requests.
    """
    behaviour: Callable[[Any, Context], Any] = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    deserialize: Callable[[bytes], Any] = handler.request_deserializer

    def decode(text: bytes) -> Any:
        try:
            message = deserialize(text)
            if isinstance(message, Message):
                make_plain(message)
        except (DecodeError, ValueError):
            raise ProtocolError(
                f"{method.rpartition('/')[2]} received {len(text)} bytes that are not a valid "
                "message; install the same release of Potluck on both machines",
                method=method,
                bytes=len(text),
            ) from None
        return message

    async def decoded(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for text in requests:
            yield decode(text)

    if handler.request_streaming:
        return lambda requests, context: behaviour(decoded(requests), context)
    return lambda request, context: behaviour(decode(request), context)


def _rebuild(handler: Any, behaviour: Callable[..., Any]) -> grpc.RpcMethodHandler[Any, Any]:
    build = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return build(
        behaviour,
        request_deserializer=None,  # requests stay bytes, which `_decoding` decodes
        response_serializer=handler.response_serializer,
    )


def _check_role(identity: Identity, roles: frozenset[Role] | None) -> str:
    """Return the peer's name. Raises IdentityError if the peer's role may not call."""
    if roles is not None and identity.role not in roles:
        article = {Role.OPERATOR: "an"}
        needed = " or ".join(f"{article.get(role, 'a')} {role}" for role in sorted(roles))
        raise IdentityError(
            f"this service is for {needed}; the caller's certificate is that of the "
            f"{identity.role} '{identity.name}'",
            role=identity.role,
            needed=" or ".join(sorted(roles)),
        )
    return f"{identity.role} {identity.name}"


def _name_of(context: Context) -> str:
    try:
        identity = identity_of(context)
    except IdentityError:
        return "unknown"
    return f"{identity.role} {identity.name}"


def _unexpected(error: Exception, program: str) -> PotluckError:
    return PotluckError(f"the {program} failed unexpectedly ({type(error).__name__}); see its log")
