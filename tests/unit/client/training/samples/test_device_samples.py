"""Samples are copied to a device once, as long as there is room."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from potluck.client.training.samples import DeviceSamples, bytes_of
from potluck.common.task import Examples

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Counted(Examples):
    copies: list[int] = field(default_factory=list)

    def to(self, device: torch.device) -> Examples:
        self.copies.append(1)
        return Examples(inputs=self.inputs.clone(), labels=self.labels.clone())


def samples(count: int) -> Counted:
    return Counted(inputs=torch.zeros(count, 2), labels=torch.zeros(count).long())


def test_samples_are_copied_to_a_device_once() -> None:
    shelf, mine = DeviceSamples(CPU, capacity=1000), samples(10)
    first = shelf.of("a", mine)
    assert first is not mine
    assert shelf.of("a", mine) is first
    assert len(mine.copies) == 1
    assert bytes_of(mine) == 10 * (2 * 4 + 8)


def test_least_recently_used_samples_are_removed_from_the_device() -> None:
    shelf = DeviceSamples(CPU, capacity=2 * 160)
    a, b, c = samples(10), samples(10), samples(10)
    for key, each in (("a", a), ("b", b), ("a", a), ("c", c), ("a", a), ("b", b)):
        shelf.of(key, each)
    assert [len(each.copies) for each in (a, b, c)] == [1, 2, 1]


def test_samples_larger_than_the_device_capacity_are_not_copied() -> None:
    shelf, large = DeviceSamples(CPU, capacity=159), samples(10)
    assert shelf.of("a", large) is large
    assert DeviceSamples(CPU).of("a", large) is large, "on the CPU they are already"
