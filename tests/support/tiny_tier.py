"""A tier of the benchmark with one workload of two rounds."""

from __future__ import annotations

from potluck.experiments.benchmark.tier import Tier

TINY = Tier.model_validate(
    {
        "name": "smoke",
        "title": "",
        "seeds": [0],
        "baseline": "uniform",
        "target": 0.1,
        "server_clients": 1_000,
        "tuning": {"seeds": [9], "settings": 1},
        "reading": {},
        "run": {
            "rounds": 2,
            "clients_per_round": 2,
            "task": {"name": "digits", "clients": 4},
            "virtual_clock": {"enabled": True, "draw": "client"},
            "profiles": {"disclosure": "noisy", "epsilon": 0.2},
        },
        "workloads": {"skew": {"start_seconds": 1, "round_seconds": 1}},
        "arms": {"uniform": {}},
    }
)
