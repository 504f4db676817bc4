from __future__ import annotations

import os
from pathlib import Path

import pytest

from potluck.client.transfer.model_cache import ModelCache, evictions
from potluck.common.errors import ProtocolError
from potluck.common.tensors.digest import digest_of


@pytest.mark.parametrize(
    ("by_use", "in_use", "keep", "expected"),
    [
        ("", "", 1, ""),
        ("ab", "", 2, ""),
        ("abc", "", 2, "a"),
        ("abcd", "", 1, "abc"),
        ("abcd", "ab", 2, "cd"),
        ("abcd", "abcd", 1, ""),
    ],
)
def test_model_cache_evicts_the_least_recently_used_models(
    by_use: str, in_use: str, keep: int, expected: str
) -> None:
    assert evictions(list(by_use), set(in_use), keep) == list(expected)


def put(folder: Path, content: bytes, *, age: int = 0) -> str:
    blake3 = digest_of(content)
    path = folder / blake3
    path.write_bytes(content)
    os.utime(path, ns=(10**18 - age, 10**18 - age))
    return blake3


def test_restarted_model_cache_verifies_the_models_on_disk(tmp_path: Path) -> None:
    old, good, rotten = (
        put(tmp_path, text, age=age) for age, text in ((3, b"old"), (2, b"good"), (1, b"rotten"))
    )
    (tmp_path / rotten).write_bytes(b"rot")
    (tmp_path / "leftover.new").write_bytes(b"half")
    cache = ModelCache(tmp_path, keep=2)
    assert not cache.holds(old)
    assert cache.verified(good)
    assert not cache.verified(rotten)
    cache.remove(rotten)
    assert sorted(path.name for path in tmp_path.iterdir()) == [good]


def test_pinned_model_is_not_evicted_before_it_is_unpinned(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path, keep=1)
    first, second = put(tmp_path, b"first"), put(tmp_path, b"second")
    cache.add(first)
    with cache.pinned(first):
        cache.add(second)
        assert cache.holds(first)
        assert not cache.holds(second)
    cache.add(put(tmp_path, b"second"))
    assert not cache.holds(first)
    assert not cache.path(first).exists()
    assert cache.path(second).exists()


def test_model_path_from_an_invalid_digest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="BLAKE3 digest"):
        ModelCache(tmp_path, keep=1).path("../../etc/passwd")


def test_model_cache_frees_space_before_a_download(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    older, newer = (put(folder, text, age=age) for age, text in ((2, b"older"), (1, b"newer")))
    cache = ModelCache(folder, keep=2)
    with cache.pinned(older):
        cache.make_room()
        assert cache.holds(older)
        assert not cache.holds(newer)
    spare = cache.spare.take()
    assert spare is not None
    assert spare.read_bytes() == b"newer"
