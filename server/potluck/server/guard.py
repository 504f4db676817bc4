"""What every call to the coordinator passes: is the caller of the right role, and, on the way
out, the one place where exceptions become gRPC statuses."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog

from potluck.common.errors import IdentityError, PotluckError, to_status
from potluck.common.frames import FrameDecoder, encode_frame
from potluck.common.identity import Identity, Role, peer_identity
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


def identity_of(context: Context) -> Identity:
    """Who is calling, by its verified certificate."""
    return peer_identity(context.auth_context())


class Guard(grpc.aio.ServerInterceptor):
    """Lets only the right role call a service, keeps every peer within its limits, and turns
    exceptions into statuses."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._admission = Admission(limits)

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
                peer = _check_role(context, role)
                with self._admission.call(peer):
                    if not method.endswith("/SubmitUpdate"):
                        return await behaviour(request, context)
                    async with self._admission.transfer(peer):
                        return await behaviour(self._paced(request), context)
            except PotluckError as error:
                await _abort(context, error, method)
            except Exception as error:
                _reraise_abort(error)
                log.exception("call failed", method=method)
                await _abort(context, _unexpected(error), method)

        return guarded

    def _guard_stream(
        self,
        behaviour: Callable[[Any, Context], AsyncIterator[Any]],
        role: Role | None,
        method: str,
    ) -> Callable[[Any, Context], AsyncIterator[Any]]:
        async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                peer = _check_role(context, role)
                with self._admission.call(peer):
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
                await _abort(context, error, method)
            except Exception as error:
                _reraise_abort(error)
                log.exception("call failed", method=method)
                await _abort(context, _unexpected(error), method)

        return guarded

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


def _check_role(context: Context, role: Role | None) -> str:
    """The peer's name, once it is sure that it may call. Raises IdentityError."""
    identity = identity_of(context)
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
