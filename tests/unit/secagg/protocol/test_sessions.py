"""Whole sessions of other kinds, and the imports of the package."""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.secure_sums import BODY, COUNTS, HEAD, Federation

import potluck.secagg.protocol
from potluck.secagg.protocol import ClientPolicy, Noise, Purpose, Rule, StreamCipher
from potluck.secagg.protocol.policy.ledger import Ledger
from potluck.secagg.protocol.primitives.thresholds import circulant_thresholds
from potluck.secagg.protocol.vectors.histograms import decode_counts, encode_counts
from potluck.secagg.protocol.vectors.noise import noise_share
from potluck.secagg.protocol.wire.messages import Stage

FOLDER = Path(potluck.secagg.protocol.__file__).parent


def test_protocol_package_imports_only_listed_modules() -> None:
    outside = set()
    for module in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("potluck."):
                outside.add(node.module)
    assert {name for name in outside if name and ".secagg" not in name} == {
        "potluck.common",  # plain_text
        "potluck.common.disclosure",  # minimum numbers of hosts
        "potluck.common.errors",
        "potluck.common.net.membership",
        "potluck.common.net.protocol",
        "potluck.common.updates.fixed_point",
        "potluck.rpc.v1",
    }


def test_protocol_package_uses_no_clock_network_or_own_randomness() -> None:
    banned = {"time", "random", "secrets", "os", "socket", "asyncio", "threading", "grpc"}
    imported = set()
    for module in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
        assert "datetime.now" not in module.read_text()
        assert "default_rng" not in module.read_text()
    assert imported & banned == set()


def test_session_with_chacha20_gives_the_exact_sum() -> None:
    federation = Federation(clients=6)
    run = federation.run(federation.header(cipher=StreamCipher.CHACHA20)).finish()
    assert run.is_exact()


def test_session_over_a_neighbour_ring_gives_the_exact_sum() -> None:
    # Without colluding hosts, a ring is safe even for few clients, which suffice for this test.
    policy = ClientPolicy(
        least_hosts=5, colluding_hosts=0, circulant=True, disclosures=frozenset({"cells"})
    )
    federation = Federation(clients=24, policy=policy)
    thresholds = circulant_thresholds(24, 0, 0)
    assert thresholds is not None
    assert 0 < thresholds.degree < 23
    header = federation.header(
        colluding_hosts=0,
        degree=thresholds.degree,
        threshold=thresholds.threshold,
        quorum=thresholds.quorum,
    )
    run = federation.run(header).until(Stage.UPLOAD)
    [envelope] = run.pending["a"]
    assert run.tell("a", envelope).session.masking is not None
    assert run.finish().is_exact()
    weak = federation.run(replace(header, threshold=thresholds.degree // 2)).until(Stage.SHARE)
    step = weak.tell("a", weak.next("a"))
    assert step.refusal is not None
    assert step.refusal.rule is Rule.THRESHOLD


@pytest.mark.parametrize("dropped", ["", "f"])
def test_sum_slices_are_unmasked_in_any_order_and_thread(dropped: str) -> None:
    federation = Federation(clients=6, purpose=Purpose.UPDATE)
    body = replace(BODY, length=300_001)
    run = federation.run(federation.header(vectors=(body, HEAD))).until(Stage.UPLOAD)
    run.answer([name for name in federation.names if name not in dropped])
    run.finish()
    unmasking = run.session.unmasking
    assert unmasking is not None
    words = run.masked_sum(unmasking)["body"]
    begins = range(0, words.size, 65_537)
    with ThreadPoolExecutor(3) as pool:
        for begin in reversed(begins):
            pool.submit(unmasking.remove, "body", words[begin : begin + 65_537], begin)
    assert np.array_equal(words, run.true_sum(unmasking.survivors)["body"])


def test_noisy_sum_equals_the_sum_plus_the_noise_shares() -> None:
    federation = Federation(clients=6)
    noise = Noise(epsilon=0.5, sensitivity=2, contributors=3)
    counts = {name: [index * 10 + k for k in range(5)] for index, name in enumerate("abcdef")}
    shares = {
        name: noise_share(noise, 5, np.random.default_rng(ord(name)).bytes) for name in counts
    }
    run = federation.run(
        federation.header(noise=noise),
        ledgers={name: Ledger(epsilon_budget=1.0) for name in counts},
        inputs=lambda name, vector: encode_counts(counts[name], vector, shares[name]),
    ).finish()
    total = decode_counts(run.total()[COUNTS.name])
    assert total.tolist() == [
        sum(counts[name][k] + shares[name][k] for name in counts) for k in range(5)
    ]
    assert all(float(ledger.spent) == 0.5 for ledger in run.ledgers.values())


def test_session_of_20_clients_on_five_hosts_completes_without_one_host() -> None:
    # One of five hosts may collude, with its four clients.
    hosts = {f"{chr(97 + index)}": f"h{index % 5}" for index in range(20)}
    federation = Federation(clients=20, hosts_of=hosts)
    assert federation.header().threshold == (20 + 4) // 2 + 1
    run = federation.run().until(Stage.UPLOAD)
    lost = [name for name, host in hosts.items() if host == "h4"]
    run.answer([name for name in federation.names if name not in lost])
    assert run.finish().is_exact()
