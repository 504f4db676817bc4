from __future__ import annotations

import pytest

from potluck.client.transfer.object_stores import FileRoute, ObjectStores
from potluck.common.errors import (
    ConfigurationError,
    DigestMismatchError,
    ObjectStoreError,
    UnreachableError,
)
from potluck.rpc.v1 import transfer_pb2

ORIGIN = "https://store.example.org:9000"
GOOD = transfer_pb2.StoredFile(url=f"{ORIGIN}/bucket/x?y=z", direct=True)
ALONE = transfer_pb2.StoredFile(url=f"{ORIGIN}/bucket/x?y=z")
FAILURE = ObjectStoreError("it does not answer")


def stores() -> ObjectStores:
    made = ObjectStores([ORIGIN])
    made.offered = True
    return made


@pytest.mark.parametrize(
    "url",
    [
        "https://store.example.org/x",
        "https://store.example.org:9001/x",
        "http://store.example.org:9000/x",
        "https://store.example.org:9000@elsewhere/x",
        "https://me@store.example.org:9000/x",
        "https://store.example.org:9000.elsewhere/x",
        "https://store.example.org:9000\\@elsewhere/x",
        "https://elsewhere/?https://store.example.org:9000/",
        "https://169.254.169.254/latest/meta-data",
        "file:///etc/passwd",
        "https://store.example.org:9000/x\r\nHost: elsewhere",
        "https://[store.example.org:9000/x",
        f"{ORIGIN}/{'x' * 9000}",
        "",
    ],
)
def test_object_store_url_of_another_origin_is_refused(url: str) -> None:
    assert not stores().allows(url)
    with pytest.raises(ConfigurationError, match="object_stores"):
        FileRoute(stores()).url(transfer_pb2.StoredFile(url=url))


def test_object_store_that_the_owner_allows_is_used() -> None:
    assert stores().allows(GOOD.url)
    assert FileRoute(stores()).url(ALONE) == ALONE.url


def test_no_object_store_is_allowed_by_default() -> None:
    made = ObjectStores()
    made.offered = True
    assert not made.usable
    assert not made.allows(GOOD.url)


def test_object_store_is_not_used_before_the_coordinator_offers_it() -> None:
    assert not ObjectStores([ORIGIN]).usable


def test_file_at_a_refused_url_is_fetched_directly_if_permitted() -> None:
    route = FileRoute(stores())
    with pytest.raises(ObjectStoreError) as raised:
        route.url(transfer_pb2.StoredFile(url="https://elsewhere/x", direct=True))
    assert route.failed(raised.value)
    assert not route.through_store


def test_file_bypasses_the_store_after_three_failures_and_the_next_after_one() -> None:
    shared = stores()
    first, second = FileRoute(shared), FileRoute(shared)
    first.url(GOOD)
    assert [first.failed(FAILURE) for _ in range(3)] == [False, False, True]
    second.url(GOOD)
    assert second.failed(FAILURE)
    third = FileRoute(shared)
    third.url(GOOD)
    third.worked()
    assert not third.failed(FAILURE)


def test_a_file_that_must_use_the_store_never_bypasses_it() -> None:
    route = FileRoute(stores())
    route.url(ALONE)
    assert not any(route.failed(FAILURE) for _ in range(10))
    assert route.through_store


def test_unreachable_coordinator_is_not_counted_as_a_store_failure() -> None:
    route = FileRoute(stores())
    route.url(GOOD)
    assert not any(route.failed(UnreachableError("away")) for _ in range(10))
    assert route.through_store


def test_digest_mismatch_marks_the_store_download_as_untrusted() -> None:
    route = FileRoute(stores())
    route.url(GOOD)
    assert not route.distrust
    route.failed(DigestMismatchError("another"))
    assert route.distrust
