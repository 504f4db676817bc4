"""Limits that a process's control groups set."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.common.process import capacity
from potluck.common.process.capacity import GroupLimits, control_group_limits

V2 = "sys/fs/cgroup"
V1_NONE = 9223372036854771712


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "proc/self/cgroup", "0::/system/host.service\n")
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_missing_or_max_control_group_files_give_no_limit(tmp_path: Path, root: Path) -> None:
    assert control_group_limits(tmp_path / "nothing") == GroupLimits()
    write(root, f"{V2}/system/host.service/cpu.max", "max 100000\n")
    write(root, f"{V2}/system/host.service/memory.max", "max\n")
    assert control_group_limits(root) == GroupLimits()


def test_tightest_limit_up_to_the_root_control_group_applies(root: Path) -> None:
    write(root, f"{V2}/system/host.service/cpu.max", "600000 100000\n")
    write(root, f"{V2}/system/cpu.max", "250000 100000\n")
    write(root, f"{V2}/system/host.service/memory.max", "8000\n")
    write(root, f"{V2}/system/host.service/memory.current", "1000\n")
    write(root, f"{V2}/system/memory.max", "9000\n")
    write(root, f"{V2}/system/memory.current", "5000\n")
    write(root, f"{V2}/system/memory.stat", "anon 3000\ninactive_file 1500\n")
    assert control_group_limits(root) == GroupLimits(processors=2.5, memory=5500)


@pytest.mark.parametrize("inside", ["", "/docker/abc"], ids=["a container", "its machine"])
def test_control_groups_version_1_are_read_from_one_folder_per_controller(
    tmp_path: Path, inside: str
) -> None:
    lines = ["4:memory:/docker/abc", "3:cpu,cpuacct:/docker/abc", "1:name=systemd:/x", "0::/x"]
    write(tmp_path, "proc/self/cgroup", "\n".join(lines))
    cpu, memory = f"{V2}/cpu,cpuacct{inside}", f"{V2}/memory{inside}"
    write(tmp_path, f"{cpu}/cpu.cfs_quota_us", "150000\n")
    write(tmp_path, f"{cpu}/cpu.cfs_period_us", "100000\n")
    write(tmp_path, f"{memory}/memory.limit_in_bytes", "4096\n")
    write(tmp_path, f"{memory}/memory.usage_in_bytes", "5000\n")
    write(tmp_path, f"{memory}/memory.stat", "total_inactive_file 1000\n")
    assert control_group_limits(tmp_path) == GroupLimits(processors=1.5, memory=96)
    write(tmp_path, f"{cpu}/cpu.cfs_quota_us", "-1\n")
    write(tmp_path, f"{memory}/memory.limit_in_bytes", f"{V1_NONE}\n")
    assert control_group_limits(tmp_path) == GroupLimits()


@given(st.text(max_size=40), st.sampled_from(["cpu.max", "memory.max", "memory.stat"]))
def test_any_text_in_control_group_files_is_read_without_an_error(
    tmp_path_factory: pytest.TempPathFactory, text: str, name: str
) -> None:
    root = tmp_path_factory.mktemp("groups")
    write(root, "proc/self/cgroup", f"0::/\n{text}")
    write(root, f"{V2}/memory.max", "10")
    (root / V2 / name).write_text(text, "utf-8", errors="surrogatepass")
    found = control_group_limits(root)
    assert found.memory is None or found.memory >= 0


@pytest.mark.parametrize(
    ("limits", "processors", "memory"),
    [
        (GroupLimits(), 8, 1000),
        (GroupLimits(processors=2.9, memory=300), 2, 300),
        (GroupLimits(processors=0.3, memory=0), 1, 0),
        (GroupLimits(processors=64.0, memory=5000), 8, 1000),
    ],
)
def test_available_capacity_is_the_minimum_of_machine_and_control_group(
    monkeypatch: pytest.MonkeyPatch, limits: GroupLimits, processors: int, memory: int
) -> None:
    monkeypatch.setattr(capacity, "control_group_limits", lambda: limits)
    monkeypatch.setattr(capacity, "_allowed", lambda: 8)
    monkeypatch.setattr(capacity, "_free", lambda: 1000)
    assert capacity.available_processors() == processors
    assert capacity.available_memory() == memory
