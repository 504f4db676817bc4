"""Shares of noise in real masked sums: the amount of noise in a sum, and the charges."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.secure_sums import Federation, Run

from potluck.client.training.unmasked_update import Differences
from potluck.common.errors import StorageError
from potluck.common.run_file.run_settings import MaskingSettings
from potluck.common.tensors.layout import Layout
from potluck.common.updates.sum_files import BODY
from potluck.privacy.host.client_noise import ClientNoise
from potluck.secagg.coordinator.masked_reduction import opened_sum
from potluck.secagg.host.masked_updates import write_noisy
from potluck.secagg.masked_vectors import NoiseInSums, sum_vectors, vector_lengths
from potluck.secagg.protocol import BrokenRuleError, Header, Purpose
from potluck.secagg.protocol.primitives.thresholds import colluding_clients
from potluck.secagg.protocol.wire.messages import Stage

CLIENTS, SIGMA, CLIP = 6, 2.0, 0.5
"""Number of clients (so the quorum is 4, of which 1 may collude), noise multiplier and clip."""


@dataclass
class Noisy(Run):
    """A session whose clients add noise to their updates. updates: by client; zeros for other
    clients."""

    folder: Path = Path()
    share: float = 0.0
    updates: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    noises: dict[str, ClientNoise] = field(default_factory=dict)
    charged: dict[str, list[float]] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def upload(self, name: str) -> bytes:
        masking = self.sessions[name].masking
        assert masking is not None
        noise = self.noises.get(name) or ClientNoise(
            clip=CLIP,
            noise_multiplier=SIGMA,
            charge=self.charged.setdefault(name, []).append,
            counted_share=self.share,
            random=random.Random(f"{self.seed}/{name}").randbytes,
        )
        body, update = self.updates.get(name), None
        if body is not None:
            layout = Layout.of({"w": body})
            update = Differences(
                body=body.copy(), auxiliaries={}, layout=layout, buffers=frozenset()
            )
        file = write_noisy(self.path(name), update, masking, noise)
        return bytes.fromhex(file.blake3)

    def mean(self) -> NDArray[np.float64]:
        """Return the mean of all parameters, as the coordinator computes it."""
        unmasking = self.session.unmasking
        assert unmasking is not None
        with opened_sum([self.path(name) for name in unmasking.survivors], unmasking) as total:
            head = total.head  # every client has the same head, even if its training failed
            assert (head.weight, head.clipped, head.failed) == (len(unmasking.survivors), 0, 0)
            assert np.isnan(total.loss)
            return total.mean()(0, self.header.vector(BODY).length)

    def within(self) -> float:
        """Return the noisy share of updates within the clip."""
        unmasking = self.session.unmasking
        assert unmasking is not None
        counted = CLIP * (self.share / (1 - self.share)) ** 0.5
        with opened_sum([self.path(name) for name in unmasking.survivors], unmasking) as total:
            return total.share_within(counted)


def header(
    federation: Federation, values: int, *, bits: int = 32, share: float = 0.0, **changes: Any
) -> Header:
    plain = federation.header()
    hosts = list(federation.hosts.values())
    certain = plain.quorum - colluding_clients(hosts, plain.colluding_hosts)
    noise = NoiseInSums(
        clip=CLIP,
        multiplier=SIGMA,
        contributors=certain,
        quorum=plain.quorum,
        counted_share=share,
    )
    masking = MaskingSettings.model_validate({"bits": bits})
    vectors = sum_vectors(vector_lengths(values, (), (), counts=share > 0), masking, noise)
    values_of: dict[str, Any] = {"vectors": vectors, "metrics": (), "weight_bound": 1}
    return replace(plain, **values_of | changes)


def session(
    folder: Path, values: int, *, bits: int = 32, seed: int = 1, share: float = 0.0
) -> Noisy:
    federation = Federation(CLIENTS, Purpose.UPDATE)
    made = header(federation, values, bits=bits, share=share)
    return Noisy(federation, made, seed=seed, folder=folder, share=share)


def finished(run: Noisy, uploading: Sequence[str]) -> Noisy:
    """Finish a session in which only these clients upload."""
    assert isinstance(run.until(Stage.UPLOAD), Noisy)
    run.answer(uploading)
    run.finish()
    return run


NAMES = Federation(CLIENTS).names
PATTERNS = [names for size in (4, 5, 6) for names in itertools.combinations(NAMES, size)]


def test_masked_sum_has_at_least_the_claimed_noise_whichever_clients_drop_out(
    tmp_path: Path,
) -> None:
    """Each of the 10^5 parameters is a separate sum, so the variance is measured well for each
    pattern."""
    for number, survivors in enumerate(PATTERNS):
        run = finished(session(tmp_path, 100_000, seed=number), survivors)
        assert run.total_clients() == survivors
        noise = run.mean() * len(survivors)  # the sum, from the mean
        certain = 4 - 1
        share = (SIGMA * CLIP) ** 2 / certain
        assert noise.var() == pytest.approx(len(survivors) * share, rel=0.03)
        # Without the share that one colluding client knows, the claimed noise remains.
        assert noise.var() - share >= 0.97 * (SIGMA * CLIP) ** 2
        assert abs(noise.mean()) < 5 * noise.std() / 100_000**0.5


@pytest.mark.parametrize("bits", [32, 64])
def test_mean_of_a_noisy_masked_sum_is_that_of_clipped_equally_weighted_updates(
    tmp_path: Path, bits: int
) -> None:
    run = session(tmp_path, 50, bits=bits)
    quiet = {name: _Silent(clip=CLIP, noise_multiplier=SIGMA, charge=_ignored) for name in NAMES}
    run.noises.update(quiet)
    generator = np.random.default_rng(3)
    for place, name in enumerate(NAMES[:5]):
        drawn = generator.standard_normal(50)
        run.updates[name] = (drawn * (place + 0.1) * CLIP / np.linalg.norm(drawn)).astype("f4")
    finished(run, NAMES)
    bounded = [each * min(1.0, CLIP / float(np.linalg.norm(each))) for each in run.updates.values()]
    expected = np.sum(bounded, axis=0) / CLIENTS  # the sixth training failed
    assert np.abs(run.mean() - expected).max() < 2e-6


@pytest.mark.parametrize("bits", [32, 64])
def test_reported_count_is_the_share_of_updates_within_the_clip(tmp_path: Path, bits: int) -> None:
    """Four of six are within; the sixth has failed, and counts as half."""
    share = 0.1
    run = session(tmp_path, 50, bits=bits, share=share)
    for place, name in enumerate(NAMES):
        run.noises[name] = _Silent(
            clip=CLIP, noise_multiplier=SIGMA, charge=_ignored, counted_share=share
        )
        if place < 5:
            run.updates[name] = np.full(50, 1.0 if place == 4 else 0.01, np.float32)
    finished(run, NAMES)
    assert run.within() == pytest.approx(4.5 / 6, abs=1e-5)


def test_reported_count_has_its_share_of_the_noise(tmp_path: Path) -> None:
    share, counts = 0.5, []
    for seed in range(60):
        counts.append(finished(session(tmp_path, 1, share=share, seed=seed), NAMES).within())
    # All trainings failed, so each counts as half. The noise multiplier of the count is σ / √share.
    expected = SIGMA / np.sqrt(share) * np.sqrt(CLIENTS / 3) / CLIENTS / 2
    assert np.std(counts) == pytest.approx(expected, rel=0.35)
    assert np.mean(counts) == pytest.approx(0.5, abs=4 * expected / 60**0.5)


class _Silent(ClientNoise):
    """Adds no noise, so that a test can compare the exact sum."""

    def charge(self, grid: Any) -> Any:
        super().charge(grid)
        return lambda count: np.zeros(count, np.int64)


def _ignored(_: float) -> None:
    """Charge nothing."""


def test_non_finite_update_is_sent_as_zeros_with_noise(
    tmp_path: Path,
) -> None:
    runs = [session(tmp_path, 1000), session(tmp_path, 1000)]
    runs[0].updates["a"] = np.full(1000, np.nan, np.float32)
    means = [finished(run, NAMES).mean() for run in runs]
    assert (means[0] == means[1]).all()
    assert [len(each) for each in runs[0].charged.values()] == [1] * CLIENTS


def test_upload_is_not_written_if_the_ledger_fails(tmp_path: Path) -> None:
    def full(_: float) -> None:
        raise StorageError("the disk is full")

    run = session(tmp_path, 10)
    run.noises["b"] = ClientNoise(clip=CLIP, noise_multiplier=SIGMA, charge=full)
    run.until(Stage.UPLOAD)
    with pytest.raises(StorageError):
        run.answer(["b"])
    assert not run.path("b").exists()


def test_two_sums_of_the_same_clients_have_different_noise(tmp_path: Path) -> None:
    """Another session of the same clients has other noise, and is charged again."""
    means = [finished(session(tmp_path, 1000, seed=seed), NAMES).mean() for seed in (1, 2)]
    assert (means[0] != means[1]).mean() > 0.99


@pytest.mark.parametrize(
    "changes", [{"weight_bound": 2}, {"vectors": ()}], ids=["weights", "auxiliary"]
)
def test_sum_without_equal_weights_is_refused_before_the_charge(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    federation = Federation(CLIENTS, Purpose.UPDATE)
    if "vectors" in changes:
        vectors = header(federation, 10).vectors
        beside = replace(vectors[0], name="auxiliary/control")
        changes = {"vectors": (*vectors, beside)}
    run = Noisy(federation, header(federation, 10, **changes), folder=tmp_path)
    run.until(Stage.UPLOAD)
    with pytest.raises(BrokenRuleError, match="equal weights"):
        run.answer(["a"])
    assert run.charged == {"a": []}
