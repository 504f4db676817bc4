"""Cells on clusters, tested without one: resources, data files and reports."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.common.errors import (
    ConfigurationError,
    DigestMismatchError,
    ProtocolError,
    RunError,
    StorageError,
)
from potluck.experiments.cluster.cell_needs import CellNeed, need_of, places_for, shortage
from potluck.experiments.cluster.cell_report import CellReport, check_software, result_of, software
from potluck.experiments.cluster.node_folder import NodeFolder
from potluck.experiments.cluster.sent_data import DataFile, DataFiles
from potluck.experiments.commands.grid_work import with_address
from potluck.experiments.grid.definition import ExperimentFile
from potluck.experiments.grid.grid_cells import Cell, cells_of
from potluck.experiments.grid.results import CellResult, Timings
from potluck.experiments.grid.running import CellLostError

GIB = 2.0**30


def node(cpus: float, gpus: float = 0, memory: float = 64 * GIB) -> dict[str, float]:
    return {"CPU": cpus, "memory": memory} | ({"GPU": gpus} if gpus else {})


# Needs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("need", "nodes", "places"),
    [
        (need_of(1, gpus=0, apart=False), [node(1), node(1), node(1)], 3),
        # The cell needs 1.2 processors on the same machine.
        (need_of(2, gpus=0, apart=False), [node(1), node(1)], 0),
        (need_of(2, gpus=0, apart=False), [node(8), node(4)], 6 + 3),
        (need_of(2, gpus=0, apart=True), [node(1), node(1), node(1)], 2),
        (need_of(10, gpus=0.1, apart=False), [node(64, 1)], 1),
        (need_of(10, gpus=0.1, apart=False), [node(64, 2), node(64)], 2),
        (need_of(2, gpus=1, apart=True), [node(4, 1), node(4, 1)], 1),
        # Each process needs 500 MiB.
        (need_of(1, gpus=0, apart=False), [node(64, memory=2 * GIB)], 2),
    ],
)
def test_number_of_places_follows_the_resources_of_the_machines(
    need: CellNeed, nodes: list[dict[str, float]], places: int
) -> None:
    assert places_for(need, nodes) == places
    assert (shortage(need, nodes) is None) == (places > 0)


@pytest.mark.parametrize(
    ("need", "nodes", "text"),
    [
        (need_of(1, gpus=1, apart=False), [node(4)], "needs 1 GPU, but the cluster has 0"),
        (need_of(2, gpus=1, apart=True), [node(4, 1)], "needs 2 GPUs, but the cluster has 1"),
        (need_of(4, gpus=0, apart=False), [node(2)], "needs 2.4 CPUs, but the cluster has 2"),
        (
            need_of(3, gpus=0, apart=False),
            [node(1), node(1)],
            "needs 1.8 CPUs and 2.0 GiB of memory on one machine, but no machine has that much",
        ),
        (need_of(1, gpus=0, apart=False), [], "needs 0.6 CPU, but the cluster has 0"),
    ],
)
def test_missing_cluster_resources_are_named(
    need: CellNeed, nodes: list[dict[str, float]], text: str
) -> None:
    assert shortage(need, nodes) == text


@given(
    hosts=st.integers(1, 20),
    gpus=st.sampled_from([0, 0.25, 0.1, 1]),
    apart=st.booleans(),
    nodes=st.lists(
        st.builds(node, st.integers(0, 64), st.integers(0, 8), st.just(256 * GIB)), max_size=5
    ),
)
def test_additional_machine_never_reduces_the_number_of_places(
    hosts: int, gpus: float, apart: bool, nodes: list[dict[str, float]]
) -> None:
    need = need_of(hosts, gpus=gpus, apart=apart)
    before = places_for(need, nodes)
    assert places_for(need, [*nodes, node(8, 1)]) >= before
    assert before == 0 or shortage(need, nodes) is None


# Data --------------------------------------------------------------------------------------------


def cell(task: dict[str, Any], **settings: Any) -> Cell:
    run = {"rounds": 1, "clients_per_round": 1, "task": task} | settings
    plan = ExperimentFile.model_validate({"name": "grid", "seeds": [0], "run": run})
    return cells_of(plan, hosts=1, source=Path("grid.toml"))[0]


def test_only_data_files_used_by_a_cell_are_sent(tmp_path: Path) -> None:
    for name in ("mnist.npz", "cifar10.npz", "start.safetensors", "shards/a.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    files = DataFiles(tmp_path)
    digits, mnist = {"name": "digits", "clients": 2}, {"name": "mnist", "clients": 2}
    assert files.of(cell(digits)) == []
    [found] = files.of(cell(mnist))
    assert (found.path, found.size) == ("mnist.npz", 9)
    assert files.location(found) == tmp_path / "mnist.npz"
    both = files.of(cell(mnist, initial_model="start.safetensors"))
    assert [each.path for each in both] == ["mnist.npz", "start.safetensors"]
    shards = files.of(cell(digits, initial_model="shards"))
    assert [each.path for each in shards] == ["shards/a.safetensors"]
    assert files.of(cell(digits, initial_model="../outside.safetensors")) == []
    (tmp_path / "nights.csv").write_text("client,start,end\nclient-0,0,3600\n")
    clock = {"enabled": True, "trace": "nights.csv", "deadline_seconds": 60.0}
    traced = cell(digits, virtual_clock=clock)
    assert [each.path for each in files.of(traced)] == ["nights.csv"]
    assert DataFiles(None).of(cell(mnist)) == []


CONTENT = b"some data" * 1000


@pytest.fixture
def data_file(tmp_path: Path) -> DataFile:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mnist.npz").write_bytes(CONTENT)
    [found] = DataFiles(tmp_path / "data").of(cell({"name": "mnist", "clients": 2}))
    return found


def test_data_file_is_fetched_once_and_again_if_damaged(
    tmp_path: Path, data_file: DataFile
) -> None:
    fetched = []

    def pieces(file: DataFile) -> Iterable[memoryview]:
        fetched.append(file.path)
        yield memoryview(CONTENT[:100])
        yield memoryview(CONTENT[100:])

    node = NodeFolder(tmp_path / "node")
    for number in range(2):
        folder = node.data_folder(tmp_path / f"data-{number}", [data_file], pieces)
        assert (folder / "mnist.npz").read_bytes() == CONTENT
    assert fetched == ["mnist.npz"]
    kept = tmp_path / "node" / "files" / data_file.blake3
    kept.chmod(0o600)
    kept.write_bytes(b"x" + CONTENT[1:])
    node.data_folder(tmp_path / "data-2", [data_file], pieces)
    assert (tmp_path / "data-2" / "mnist.npz").read_bytes() == CONTENT
    assert len(fetched) == 2


def test_data_file_with_a_wrong_digest_is_refused(tmp_path: Path, data_file: DataFile) -> None:
    node = NodeFolder(tmp_path / "node")
    with pytest.raises(DigestMismatchError, match=r"mnist\.npz has digest"):
        node.data_folder(tmp_path / "made", [data_file], lambda _: [memoryview(b"other")])
    assert [path.name for path in (tmp_path / "node" / "files").iterdir()] == ["lock"]


def test_data_file_outside_the_data_directory_is_refused(
    tmp_path: Path, data_file: DataFile
) -> None:
    outside = DataFile(path="../outside", blake3=data_file.blake3, size=data_file.size)
    with pytest.raises(StorageError, match="is outside the data directory"):
        NodeFolder(tmp_path / "node").data_folder(
            tmp_path / "made", [outside], lambda _: [memoryview(CONTENT)]
        )


def test_cell_folder_left_by_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    node = NodeFolder(tmp_path / "node")
    left = tmp_path / "node" / "cells" / "of-a-killed-process"
    left.mkdir(parents=True)
    with node.workplace() as first:
        assert not left.exists()
        with node.workplace() as second:
            assert first.exists()
            assert second != first
        assert not second.exists()
    assert not first.exists()


def test_node_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "node").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="belongs to another user"):
        NodeFolder(tmp_path / "node")


# Reports -----------------------------------------------------------------------------------------


def finished(one: Cell, digest: str) -> CellResult:
    return CellResult(
        labels=dict(one.labels),
        digest=digest,
        run_file=one.run_file,
        clients=one.clients,
        hosts=one.hosts,
        rounds=[],
        model_blake3="",
        timings=Timings(rounds=[], total=1.0),
    )


def test_cell_report_gives_a_result_or_raises_its_error() -> None:
    one = cell({"name": "digits", "clients": 2})
    good = finished(one, one.digest)
    text = CellReport(outcome="finished", result=good).model_dump_json()
    assert result_of(text, one)[0] == good
    for outcome, kind in (("failed", RunError), ("lost", CellLostError)):
        text = CellReport.model_validate({"outcome": outcome, "reason": "why"}).model_dump_json()
        result, error, _ = result_of(text, one)
        assert result is None
        assert type(error) is kind
    text = CellReport(outcome="refused", reason="versions").model_dump_json()
    with pytest.raises(ConfigurationError, match="versions"):
        result_of(text, one)
    text = CellReport(outcome="finished", result=finished(one, "0" * 32)).model_dump_json()
    with pytest.raises(ProtocolError, match="returned the result of another cell"):
        result_of(text, one)
    with pytest.raises(ProtocolError, match="is not a valid report on a cell"):
        result_of("{}", one)


def test_machine_with_different_software_versions_is_refused() -> None:
    ours = software()
    assert {"Python", "potluck", "ray", "torch", "numpy"} == set(ours)
    check_software(ours, dict(ours), machine="machine 10.0.0.2")
    with pytest.raises(
        ConfigurationError, match=r"^machine 10.0.0.2 has version 1.0 of torch, but this machine"
    ):
        check_software(ours, ours | {"torch": "1.0"}, machine="machine 10.0.0.2")
    with pytest.raises(ConfigurationError, match=r"has version .none. of Python"):
        check_software(ours, {}, machine="machine 10.0.0.2")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("a.toml --ray", "a.toml --ray auto"),
        ("--ray a.toml", "--ray auto a.toml"),
        ("a.toml --ray --jobs 2", "a.toml --ray auto --jobs 2"),
        ("a.toml --ray 10.0.0.1:6379 --quick", "a.toml --ray 10.0.0.1:6379 --quick"),
        ("a.toml --ray auto", "a.toml --ray auto"),
        ("a.toml --jobs 2", "a.toml --jobs 2"),
        ("", ""),
    ],
)
def test_ray_option_is_accepted_with_and_without_an_address(given: str, read: str) -> None:
    assert with_address(given.split()) == read.split()
