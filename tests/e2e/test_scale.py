"""The benchmark's federation with many clients. Only completion is asserted here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCALE = Path(__file__).parents[2] / "benchmarks" / "scale.py"


def federate(clients: int, hosts: int, count: int, rounds: int) -> dict[str, float]:
    options = {"clients": clients, "hosts": hosts, "clients-per-round": count, "rounds": rounds}
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    out = subprocess.run(
        [sys.executable, str(SCALE), "--json", *flags], check=True, stdout=subprocess.PIPE
    ).stdout
    result: dict[str, float] = json.loads(out)
    return result


@pytest.mark.slow
def test_thousand_clients_on_ten_hosts_finish_three_rounds() -> None:
    result = federate(clients=1000, hosts=10, count=100, rounds=3)
    assert result["clients"] == 1000
    print(f"first round {result['first_round_seconds']:.2f} s, then {result['seconds_median']:.2f}")


def test_host_with_more_clients_than_it_trains_at_once_finishes_a_round() -> None:
    assert federate(clients=60, hosts=1, count=40, rounds=1)["clients"] == 60
