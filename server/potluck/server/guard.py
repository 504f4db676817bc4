"""What every call to the coordinator passes: is the caller of the right role and its certificate
not revoked, and, on the way out, the one place where exceptions become gRPC statuses."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog

from potluck.common.errors import IdentityError, PotluckError, to_status
from potluck.common.frames import FrameDecoder, encode_frame
from potluck.common.identity import Credential, Identity, Role, peer_credential
from potluck.common.names import is_name
from potluck.rpc.v1 import coordinator_pb2
from potluck.server.limits import (
    Admission,
    Limits,
    not_left_unread,
    not_too_slow,
    with_first_message,
)

log = structlog.get_logger()

Context = Any  # generated servicers say _ServicerContext, which only type checkers can name

_ROLES = {
    "potluck.rpc.v1.CoordinatorService": Role.HOST,
    "potluck.rpc.v1.OperatorService": Role.OPERATOR,
}


def credential_of(context: Context) -> Credential:
    """What the caller's verified certificate says."""
    return peer_credential(context.auth_context())


def identity_of(context: Context) -> Identity:
    """Who is calling, by its verified certificate."""
    return credential_of(context).identity


def check_client(client: str, identity: Identity) -> None:
    """Raise IdentityError unless a host may speak for a client."""
    if not is_name(client) or not identity.may_speak_for(client):
        raise IdentityError(
            f"host '{identity.name}' may not speak for client {client[:80]!r}; its certificate "
            "does not name it: issue one that does with `potluck pki issue … --clients`",
            host=identity.name,
            client=client[:80],
        )


class Guard(grpc.aio.ServerInterceptor):
    """Lets only the right role call a service, keeps every peer within its limits, and turns
    exceptions into statuses."""

    def __init__(
        self,
        limits: Limits,
        check_credential: Callable[[Credential], None] = lambda _: None,
        observe_refusal: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`check_credential` raises IdentityError for a certificate that was revoked.
        `observe_refusal` is told the reason of every call that is refused."""
        self._limits = limits
        self._admission = Admission(limits)
        self._check_credential = check_credential
        self._observe_refusal = observe_refusal
        self._calls: defaultdict[int, set[asyncio.Task[Any]]] = defaultdict(set)  # by serial number

    def cut_off(self, serials: frozenset[int]) -> None:
        """End every call under way of these certificates, which were revoked."""
        for serial in serials & self._calls.keys():
            for task in self._calls[serial]:
                task.cancel()

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the method's handler."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler  # gRPC answers UNIMPLEMENTED
        method = handler_call_details.method
        handler = _with_fast_frames(handler, method)
        behaviour = _behaviour(handler)
        role = _ROLES.get(method.rpartition("/")[0].lstrip("/"))
        if handler.response_streaming:
            return _rebuild(handler, self._guard_stream(behaviour, role, method))
        return _rebuild(handler, self._guard_single(behaviour, role, method))

    def _guard_single(
        self, behaviour: Callable[[Any, Context], Awaitable[Any]], role: Role | None, method: str
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        async def guarded(request: Any, context: Context) -> Any:
            try:
                with self._admitted(context, role) as peer:
                    if not method.endswith("/SubmitUpdate"):
                        return await behaviour(request, context)
                    async with self._admission.transfer(peer):
                        return await behaviour(self._paced(request), context)
            except PotluckError as error:
                await self._abort(context, error, method)
            except Exception as error:
                _reraise_abort(error)
                log.exception("call failed", method=method)
                await self._abort(context, _unexpected(error), method)

        return guarded

    def _guard_stream(
        self,
        behaviour: Callable[[Any, Context], AsyncIterator[Any]],
        role: Role | None,
        method: str,
    ) -> Callable[[Any, Context], AsyncIterator[Any]]:
        async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                with self._admitted(context, role) as peer:
                    if method.endswith("/FetchModel"):
                        async with self._admission.transfer(peer):
                            responses = not_left_unread(behaviour(request, context), self._limits)
                            async for response in responses:
                                yield response
                        return
                    if method.endswith("/Attend"):
                        request = with_first_message(request, self._limits)
                    async for response in behaviour(request, context):
                        yield response
            except PotluckError as error:
                await self._abort(context, error, method)
            except Exception as error:
                _reraise_abort(error)
                log.exception("call failed", method=method)
                await self._abort(context, _unexpected(error), method)

        return guarded

    @contextlib.contextmanager
    def _admitted(self, context: Context, role: Role | None) -> Iterator[str]:
        """A call under way; the peer's name.

        Raises IdentityError for one that may not call, also when its certificate is revoked
        meanwhile, and OverloadedError.
        """
        credential = credential_of(context)
        self._check_credential(credential)
        peer = _check_role(credential.identity, role)
        task = asyncio.current_task()
        calls = self._calls[credential.serial]
        if task is not None:
            calls.add(task)
        try:
            with self._admission.call(peer):
                yield peer
        except asyncio.CancelledError:
            self._check_credential(credential)
            raise
        finally:
            if task is not None:
                calls.discard(task)
            if not calls:
                self._calls.pop(credential.serial, None)

    async def _abort(self, context: Context, error: PotluckError, method: str) -> NoReturn:
        self._observe_refusal(error.reason)
        await _abort(context, error, method)

    def _paced(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        first = with_first_message(requests, self._limits)
        return not_too_slow(first, self._limits, _size_of, time.monotonic)


def _with_fast_frames(handler: Any, method: str) -> Any:
    """The handlers that move files take and give chunks as bytes (see `frames.py`)."""
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


def _behaviour(handler: Any) -> Callable[[Any, Context], Any]:
    behaviour: Callable[[Any, Context], Any] = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    return behaviour


def _rebuild(handler: Any, behaviour: Callable[..., Any]) -> grpc.RpcMethodHandler[Any, Any]:
    build = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return build(
        behaviour,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _size_of(request: Any) -> int:
    return len(request) if isinstance(request, memoryview) else 0


def _check_role(identity: Identity, role: Role | None) -> str:
    """The peer's name, once it is sure that it may call. Raises IdentityError."""
    if role is not None and identity.role is not role:
        raise IdentityError(
            f"this service is for a {role}; the certificate presented is that of the "
            f"{identity.role} '{identity.name}'",
            role=identity.role,
            needed=role,
        )
    return f"{identity.role} {identity.name}"


def _reraise_abort(error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error


def _unexpected(error: Exception) -> PotluckError:
    return PotluckError(
        f"the coordinator failed unexpectedly ({type(error).__name__}); its log says more"
    )


async def _abort(context: Context, error: PotluckError, method: str) -> NoReturn:
    log.info("call refused", method=method, reason=error.reason, why=error.message)
    details = to_status(error).SerializeToString()
    await context.abort(error.code, error.message, (("grpc-status-details-bin", details),))
    raise AssertionError("abort always raises")
