"""The exceptions of Potluck, and how they cross the wire.

    PotluckError
    ├── ConfigurationError        a file, flag or option is wrong
    │   └── PluginError           a plug-in is missing, ambiguous or misused
    ├── IdentityError             the sender is unknown or not allowed to do this
    │   ├── CertificateExpiredError
    │   └── AttendsElsewhereError another process has its certificate
    ├── ProtocolError             a message breaks the protocol
    │   └── ProtocolVersionError  the other side uses another version
    ├── TransferError             a file did not arrive as announced
    │   ├── DigestMismatchError
    │   ├── TruncatedError
    │   └── TooLargeError
    ├── UpdateError               an update can't be used
    │   ├── LayoutError           other tensors than the model's
    │   ├── NotFiniteError        contains NaN or infinity
    │   └── OutOfBoundsError      contains numbers that are too large to compute with
    ├── RoundClosedError          the update is no longer needed
    ├── NotFoundError             no such run, client or file
    ├── RunError                  a run can't start or continue
    ├── TrainingError             a client could not train
    │   ├── DataError             its samples can't be trained on
    │   ├── DeviceMemoryError     its device has too little memory
    │   ├── RepeatedFailureError  all trainings of its host fail in the same way
    │   ├── StateLostError        the state it kept for this is gone
    │   └── NothingHeldOutError   it has no held-out samples to evaluate on
    ├── DisclosureRefusedError    a client's policy forbids what it is asked to disclose
    ├── StorageError              a disk or a database failed
    └── UnreachableError          the other side can't be reached
        ├── OverloadedError       it has reached its limit of work for this process
        ├── OpenFilesError        its limit on open files is reached
        ├── RelayStorageError     the disk of the relay in between failed
        └── ObjectStoreError      the object store or its content is missing

Each class owns its gRPC status code, its reason, and whether it is permanent. Only the services and
the agents translate: `to_status` on the way out, `from_rpc_error` on the way in. Peers decide by
the reason, never by the text.
"""

from __future__ import annotations

import errno
import itertools
import os
import resource
import traceback
from typing import ClassVar

# gRPC reads both variables once, when it is imported. The first turns off its log: Potluck reports
# failed handshakes better.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# gRPC for Python has no setting for the minimum TLS version. This list of ciphers is for TLS 1.2
# only, and its one cipher needs a pre-shared key, so no handshake below 1.3 succeeds.
os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-PSK-AES256-CBC-SHA"

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from potluck.common.plain_text import plain, without_passwords

DOMAIN = "potluck.rpc"


class PotluckError(Exception):
    """An error with a one-line message for users and a reason code for programs.

    permanent: True if the error will recur until a person fixes its cause and restarts the process
    that raised it. A client that fails with such an error is excluded from its run, and the attempt
    does not count.

    metadata: every value that the message mentions. Never put weights, counts or keys into it. Text
    from other machines is allowed: the constructor escapes control characters and removes
    passwords.
    """

    reason: ClassVar[str] = "INTERNAL"
    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    permanent: ClassVar[bool] = False

    def __init__(self, message: str, **metadata: object) -> None:
        self.message = plain(without_passwords(message))
        super().__init__(self.message)
        self.metadata = {
            plain(key): plain(without_passwords(str(value))) for key, value in metadata.items()
        }

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython and notebooks show: the caller's own frames and the
        message.

        The first frame inside Potluck and those after it are omitted, because they don't help in a
        notebook; `traceback.print_exc` shows them.
        """
        frames = [
            frame
            for frame in traceback.walk_tb(self.__traceback__)
            if not frame[0].f_globals.get("__name__", "").startswith(("IPython.", "asyncio."))
        ]
        own = itertools.takewhile(
            lambda frame: not frame[0].f_globals.get("__name__", "").startswith("potluck."), frames
        )
        lines = traceback.StackSummary.extract(own).format()
        return [*"".join(lines).splitlines(), f"{type(self).__name__}: {self.message}"]


class ConfigurationError(PotluckError):
    """A file, flag or option is wrong."""

    reason = "CONFIGURATION_INVALID"
    code = grpc.StatusCode.INVALID_ARGUMENT
    permanent = True


class PluginError(ConfigurationError):
    """A plug-in is not installed, is offered by two packages, or got options that it does not
    know."""

    reason = "PLUGIN_INVALID"


class IdentityError(PotluckError):
    """The sender is unknown, or its certificate does not allow the request."""

    reason = "IDENTITY_REFUSED"
    code = grpc.StatusCode.PERMISSION_DENIED


class CertificateExpiredError(IdentityError):
    """The sender's certificate has expired; renew it."""

    reason = "CERTIFICATE_EXPIRED"


class AttendsElsewhereError(IdentityError):
    """Another process is connected with the sender's certificate."""

    reason = "HOST_ATTENDS_ELSEWHERE"


class ProtocolError(PotluckError):
    """A message breaks the protocol."""

    reason = "PROTOCOL_VIOLATED"
    code = grpc.StatusCode.INVALID_ARGUMENT


class ProtocolVersionError(ProtocolError):
    """The other side uses another version of the protocol."""

    reason = "PROTOCOL_VERSION_UNSUPPORTED"
    code = grpc.StatusCode.FAILED_PRECONDITION
    permanent = True


class TransferError(PotluckError):
    """A file did not arrive as announced; sending it again may help."""

    reason = "TRANSFER_FAILED"
    code = grpc.StatusCode.ABORTED


class DigestMismatchError(TransferError):
    """The BLAKE3 digest of a file's bytes differs from the announced one."""

    reason = "DIGEST_MISMATCH"


class TruncatedError(TransferError):
    """A stream ended before the file was complete."""

    reason = "TRANSFER_TRUNCATED"


class TooLargeError(TransferError):
    """A file or message is larger than allowed."""

    reason = "TOO_LARGE"
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class UpdateError(PotluckError):
    """An update can't be used; sending it again does not help."""

    reason = "UPDATE_REFUSED"
    code = grpc.StatusCode.INVALID_ARGUMENT


class LayoutError(UpdateError):
    """A file is not a tensor file, or has other tensors, shapes or types than expected."""

    reason = "UPDATE_LAYOUT_MISMATCH"
    permanent = True


class NotFiniteError(UpdateError):
    """An update contains NaN or infinity."""

    reason = "UPDATE_NOT_FINITE"


class OutOfBoundsError(UpdateError):
    """An update contains numbers that are too large to compute with."""

    reason = "UPDATE_OUT_OF_BOUNDS"
    permanent = True


class RoundClosedError(PotluckError):
    """The update is no longer needed: its round is over, or another attempt at the round has
    started."""

    reason = "ROUND_CLOSED"
    code = grpc.StatusCode.FAILED_PRECONDITION


class NotFoundError(PotluckError):
    """The run, client or file does not exist."""

    reason = "NOT_FOUND"
    code = grpc.StatusCode.NOT_FOUND


class RunError(PotluckError):
    """A run can't start or continue."""

    reason = "RUN_REFUSED"
    code = grpc.StatusCode.FAILED_PRECONDITION


class TrainingError(PotluckError):
    """A client could not train or evaluate."""

    reason = "TRAINING_FAILED"
    code = grpc.StatusCode.ABORTED


class DataError(TrainingError):
    """A client's samples can't be used for training."""

    reason = "DATA_INVALID"
    permanent = True


class TrainerError(TrainingError):
    """A task's own trainer failed, hangs, or returned something that is not allowed."""

    reason = "TRAINER_FAILED"


class StateLostError(TrainingError):
    """A client needs the state that it stored after an earlier training, but the state is
    missing."""

    reason = "CLIENT_STATE_LOST"


class NothingHeldOutError(TrainingError):
    """A client has no held-out samples on which to evaluate."""

    reason = "NOTHING_HELD_OUT"


class DeviceMemoryError(TrainingError):
    """A client's device has too little memory for what it was asked to compute."""

    reason = "DEVICE_MEMORY_EXHAUSTED"


class RepeatedFailureError(TrainingError):
    """The newest trainings of a host have all failed in the same way."""

    reason = "TRAINING_FAILS_REPEATEDLY"
    permanent = True


class DisclosureRefusedError(PotluckError):
    """A client's own policy, or its privacy budget, forbids what it is asked to disclose."""

    reason = "DISCLOSURE_REFUSED"
    code = grpc.StatusCode.PERMISSION_DENIED
    permanent = True


class StorageError(PotluckError):
    """A disk or a database failed."""

    reason = "STORAGE_FAILED"
    code = grpc.StatusCode.INTERNAL


def disk_error(error: OSError, folder: str | os.PathLike[str]) -> StorageError:
    """Return the error for a disk that failed. folder: named in the error if `error` has no
    absolute path."""
    if (limit := _open_files_limit(error)) is not None:
        return StorageError(f"this process can't open a file in {folder}: {limit}", path=folder)
    named = str(error.filename or "")
    where = named if named.startswith("/") else folder
    cause = error.strerror or type(error).__name__
    return StorageError(
        f"can't use {where}: {cause}; check the disk of this path", path=where, cause=cause
    )


class UnreachableError(PotluckError):
    """The peer can't be reached."""

    reason = "UNREACHABLE"
    code = grpc.StatusCode.UNAVAILABLE


class OverloadedError(UnreachableError):
    """The peer has reached its limit of work for this process; try again later."""

    reason = "OVERLOADED"
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class OpenFilesError(UnreachableError):
    """The peer has the maximum number of files open that its system allows; trying again later
    helps."""

    reason = "OPEN_FILES_EXHAUSTED"


def open_files_error(error: BaseException, program: str) -> OpenFilesError | None:
    """Return the error of a program that has reached a limit on open files.

    Returns None if neither `error` nor one of its causes is about such a limit.
    """
    cause: BaseException | None = error
    seen: list[BaseException] = []
    while cause is not None and cause not in seen:  # end a cycle: an error may be its own cause
        seen.append(cause)
        if isinstance(cause, OSError) and (limit := _open_files_limit(cause)) is not None:
            return OpenFilesError(f"the {program} can't open another file: {limit}")
        cause = cause.__cause__
    return None


def _open_files_limit(error: OSError) -> str | None:
    """Return the reached limit on open files and a remedy, as text; None for other errors."""
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"its limit of open files (RLIMIT_NOFILE) is {limit}; raise it with LimitNOFILE= in "
            "its systemd unit, --ulimit nofile= of its container, or `ulimit -n` before its start"
        )
    if error.errno == errno.ENFILE:
        return "its machine's limit of open files is reached; raise it with `sysctl fs.file-max`"
    return None


class RelayStorageError(UnreachableError):
    """The disk of the relay between a host and its coordinator failed; it may work again."""

    reason = "RELAY_STORAGE_FAILED"


class ObjectStoreError(UnreachableError):
    """The object store does not answer, refuses a request, or does not have an expected object."""

    reason = "OBJECT_STORE_FAILED"


def _tree(cls: type[PotluckError]) -> list[type[PotluckError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in _tree(child))]


_BY_REASON = {cls.reason: cls for cls in _tree(PotluckError)}

REASONS = tuple(sorted(_BY_REASON))
"""The reasons of all error classes."""


def is_permanent(reason: str) -> bool:
    """Return whether a failure with this reason is permanent. The reason may be one that a peer has
    invented."""
    return _BY_REASON.get(reason, PotluckError).permanent


def to_status(error: PotluckError) -> status_pb2.Status:
    """Return the gRPC status for an error, with one `google.rpc.ErrorInfo`."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    detail = any_pb2.Any()
    detail.Pack(info)
    code = getattr(code_pb2, error.code.name)
    return status_pb2.Status(code=code, message=error.message, details=[detail])


def from_rpc_error(error: grpc.RpcError) -> PotluckError:
    """Return the exception that a failed call reports.

    A failure without Potluck's details becomes `UnreachableError`.
    """
    # rpc_status reads `code`, `details` and `trailing_metadata`, which AioRpcError has as well.
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # typed for grpc.Call only
    if status is not None:
        for detail in status.details:
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info) and info.domain == DOMAIN:
                passing = error.code() is grpc.StatusCode.UNAVAILABLE
                cls = _BY_REASON.get(info.reason, UnreachableError if passing else PotluckError)
                return cls(status.message, **dict(info.metadata))
    if isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
        text = f"{error.details() or 'no details'} ({error.code().name})"
    else:
        text = str(error)
    return UnreachableError(text)
