"""The coordinator's client of an S3 bucket.

After a failure, calls fail at once for a while, without a request, so that callers do not wait. If
the store returns bytes that differ from the upload, the object is checked repeatedly until its
bytes are right.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import obstore
import structlog
from obstore.exceptions import BaseError
from obstore.store import S3Store

from potluck.common.errors import ConfigurationError, ObjectStoreError
from potluck.common.monitoring import definitions as metrics
from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import Direction
from potluck.common.tensors.digest import digest_of, hasher
from potluck.integrations.s3.presigning import presigned_url, read_credentials
from potluck.server.clock import now, utc
from potluck.server.config import FilesSettings

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Credential

log = structlog.get_logger()

_PART_BYTES: Final = 5 << 20
"""Part size of uploads, the minimum of S3; larger files are uploaded in several parts."""
_PARTS_AT_ONCE: Final = 2
LARGEST_PUT_BYTES: Final = 5 << 30
"""Maximum size of an object that S3 accepts in one piece."""

_CONNECT_SECONDS: Final = 5
_REQUEST_SECONDS: Final = 30
_TRANSFER_SECONDS: Final = 300
"""Time limit of a request that transfers bytes of a file. In this time, a line with 0.5 Mbit/s
sends all parts that are uploaded at once."""
_PROBE_SECONDS: Final = 10
_RENEWED_SECONDS: Final = 60
"""Seconds after which credentials are read again."""
_LEAST_PAUSE_SECONDS: Final = 0.25
_MOST_PAUSE_SECONDS: Final = 10.0
_CHECKED_AT_ONCE: Final = 4 << 20
_PROBE_KEY: Final = "check"
_PROBE_BYTES: Final = 64 << 10


@dataclass(frozen=True)
class _Checked:
    """A key, with the digest and size of the file that its object must contain."""

    key: str
    blake3: str
    size: int


@dataclass(frozen=True)
class ListedObject:
    """An object in a listing. key: its key without the store's prefix."""

    key: str
    modified: datetime


class ObjectStore:
    """The objects under the prefix of `[files] store`. Runs on the event loop.

    Its methods raise ObjectStoreError, which names the cause.
    """

    def __init__(self, settings: FilesSettings, instruments: Instruments) -> None:
        """Raises ConfigurationError if the credentials are missing."""
        self._settings = settings
        self._instruments = instruments
        self._region = settings.region or os.environ.get("AWS_REGION") or "us-east-1"
        endpoint = settings.endpoint or os.environ.get("AWS_ENDPOINT_URL", "").rstrip("/")
        self._base = (
            f"{endpoint}/{settings.bucket}"
            if endpoint
            else f"https://{settings.bucket}.s3.{self._region}.amazonaws.com"
        )
        read_credentials(settings.credentials)
        self._store = self._client(_REQUEST_SECONDS)
        self._transfers = self._client(_TRANSFER_SECONDS)
        self._failures = 0
        self._again = 0.0
        self.trouble = ""
        """Cause of the last request's failure; empty if it succeeded."""
        self._wrong: _Checked | None = None

    def _client(self, seconds: int) -> S3Store:
        """Return a client whose requests fail after `seconds`."""
        return S3Store(
            self._settings.bucket,
            prefix=self._settings.prefix or None,
            endpoint=self._base,
            virtual_hosted_style_request=True,  # the endpoint's host name contains the bucket
            region=self._region,
            credential_provider=self._provide,
            client_options=self._client_options(seconds),
            retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=_REQUEST_SECONDS)},
        )

    def _client_options(self, seconds: int) -> ClientConfig:
        options: ClientConfig = {
            "allow_http": self._base.startswith("http://"),
            "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
            "timeout": timedelta(seconds=seconds),
        }
        if self._settings.authority is not None:
            try:
                options["root_certificate"] = self._settings.authority.read_bytes()
            except OSError as error:
                path = self._settings.authority
                raise ConfigurationError(
                    f"can't read the authority file {path}: {error.strerror}", path=path
                ) from error
        return options

    def _provide(self) -> S3Credential:
        found = read_credentials(self._settings.credentials)
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.session_token or None,
            "expires_at": utc() + timedelta(seconds=_RENEWED_SECONDS),
        }

    @property
    def address(self) -> str:
        """The store's address, as shown in logs and errors."""
        return f"{self._base}/{self._settings.prefix}".rstrip("/")

    # Objects ----------------------------------------------------------------------------------

    async def size_of(self, key: str) -> int | None:
        """Return the size of an object in bytes; None if it does not exist."""
        with self._asking():
            try:
                return (await obstore.head_async(self._store, key))["size"]
            except FileNotFoundError:
                return None

    async def put(self, key: str, path: Path, *, size: int) -> None:
        """Upload a file of this size."""
        with self._asking():
            await obstore.put_async(
                self._transfers,
                key,
                path,
                chunk_size=_PART_BYTES,
                max_concurrency=_PARTS_AT_ONCE,
            )
        self._instruments.count(metrics.STORE_BYTES, size, direction=Direction.DOWN)

    async def read(self, key: str, begin: int, length: int) -> memoryview:
        """Return `length` bytes of an object from `begin` on; fewer if the object ends."""
        with self._asking():
            found = await obstore.get_range_async(self._transfers, key, start=begin, length=length)
        view = memoryview(found)[:length]
        self._instruments.count(metrics.STORE_BYTES, len(view), direction=Direction.UP)
        return view

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; missing ones are ignored."""
        if keys:
            with self._asking():
                await obstore.delete_async(self._store, list(keys))

    async def listed(self) -> list[ListedObject]:
        """List all objects."""
        found: list[ListedObject] = []
        with self._asking():
            async for batch in obstore.list(self._store):
                found += [ListedObject(each["path"], each["last_modified"]) for each in batch]
        return found

    # URLs -------------------------------------------------------------------------------------

    def url_to_fetch(self, key: str) -> str:
        """Return a URL that permits reading an object for `url_seconds`."""
        return self._signed("GET", key, {})

    def url_to_put(self, key: str, *, size: int, sha256: str) -> str:
        """Return a URL that permits uploading one exact content for `url_seconds`.

        sha256: 64 hexadecimal digits.
        """
        checksum = b64encode(bytes.fromhex(sha256)).decode()
        bound = {"content-length": str(size), "x-amz-checksum-sha256": checksum}
        return self._signed("PUT", key, bound)

    def _signed(self, method: str, key: str, headers: dict[str, str]) -> str:
        try:
            credentials = read_credentials(self._settings.credentials)
        except ConfigurationError as error:
            raise ObjectStoreError(error.message) from error
        return presigned_url(
            method,
            f"{self._base}/{self._settings.prefix}{key}",
            credentials=credentials,
            region=self._region,
            at=utc(),
            seconds=self._settings.url_seconds,
            headers=headers,
        )

    # Whether it works -------------------------------------------------------------------------

    async def probe(self) -> str:
        """Send a request to the store; return why it can't be used, or an empty text."""
        self._again = 0.0
        with contextlib.suppress(ObjectStoreError):
            try:
                async with asyncio.timeout(_PROBE_SECONDS):
                    with self._asking():
                        await obstore.list_with_delimiter_async(self._store)
                    await self.check_again()
            except TimeoutError:
                cause = f"did not answer within {_PROBE_SECONDS} s"
                self._record_failure(f"the object store {self.address} {cause}", cause)
                return f"{self.trouble}; check the store, its address and the network"
        return self.trouble or self._wrong_text()

    async def check(self, key: str, *, blake3: str, size: int) -> None:
        """Read an uploaded object and compare it with its file.

        Raises ObjectStoreError if they differ.
        """
        checked, digest = _Checked(key, blake3, size), hasher()
        held = await self.size_of(key)
        if held == size:
            for begin in range(0, size, _CHECKED_AT_ONCE):
                digest.update(await self.read(key, begin, min(_CHECKED_AT_ONCE, size - begin)))
        if held == size and digest.hexdigest() == blake3:
            if self._wrong is not None:
                log.info("object store recovered: its bytes match their digest", store=self.address)
            self._wrong = None
            self._instruments.set(metrics.STORE_UP, 1)
            return
        if self._wrong is None:
            log.warning(
                "object store returned different bytes than were stored",
                store=self.address,
                object=key,
                remedy="check the store, and the proxies and caches in front of it",
            )
        self._wrong = checked
        self._instruments.count(metrics.STORE_FAILURES)
        self._instruments.set(metrics.STORE_UP, 0)
        raise ObjectStoreError(self._wrong_text())

    async def check_again(self) -> None:
        """Check again the object whose bytes were wrong, if any. Raises ObjectStoreError."""
        if (wrong := self._wrong) is None:
            return
        if wrong.key != _PROBE_KEY and await self.size_of(wrong.key) is not None:
            await self.check(wrong.key, blake3=wrong.blake3, size=wrong.size)
        else:
            await self.check_probe()

    async def check_probe(self) -> None:
        """Upload a test object, check it and delete it. Raises ObjectStoreError."""
        content = secrets.token_bytes(_PROBE_BYTES)
        with self._asking():
            await obstore.put_async(self._store, _PROBE_KEY, content)
        await self.check(_PROBE_KEY, blake3=digest_of(content), size=len(content))
        await self.delete([_PROBE_KEY])

    def _wrong_text(self) -> str:
        if self._wrong is None:
            return ""
        return (
            f"the object store {self.address} returned different bytes than were stored, for "
            f"object {self._wrong.key}; check the store, and the proxies and caches in front of it"
        )

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        if now() < self._again:
            raise ObjectStoreError(f"{self.trouble}; the coordinator tries again soon")
        try:
            yield
        except (BaseError, OSError) as error:
            self._failed(error)
            raise ObjectStoreError(self.trouble) from None
        if self.trouble:
            log.info("object store answers again", store=self.address)
        self._failures, self._again, self.trouble = 0, 0.0, ""
        self._instruments.set(metrics.STORE_UP, 0 if self._wrong else 1)

    def _failed(self, error: Exception) -> None:
        # Cut the text: the rest is the server's message, which may contain the access key.
        cause = str(error).partition("\n")[0].partition(": <")[0][:300] or type(error).__name__
        self._record_failure(f"the object store {self.address} failed: {cause}", cause)

    def _record_failure(self, trouble: str, cause: str) -> None:
        pause = min(_MOST_PAUSE_SECONDS, _LEAST_PAUSE_SECONDS * 2.0**self._failures)
        self._failures = min(self._failures + 1, 16)
        self._again = now() + pause
        if not self.trouble:
            log.warning("object store failed", store=self.address, cause=cause)
        self.trouble = trouble
        self._instruments.count(metrics.STORE_FAILURES)
        self._instruments.set(metrics.STORE_UP, 0)
