"""Masked files, summed and unmasked block by block, compared with sums of updates without masks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.secure_sums import Federation, Run

from potluck.client.training.unmasked_update import Differences
from potluck.common.errors import LayoutError, PluginError, TrainingError
from potluck.common.run_file.run_settings import MaskingSettings
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.tensor_files import TensorFile, open_tensors, write_tensors
from potluck.common.updates.sum_files import BODY
from potluck.common.updates.update_report import UpdateReport
from potluck.secagg.coordinator.masked_reduction import check_masked, opened_sum
from potluck.secagg.host.masked_updates import write_masked
from potluck.secagg.masked_vectors import (
    METRIC_BOUND,
    metric_names,
    sum_vectors,
    vector_lengths,
)
from potluck.secagg.protocol import BrokenRuleError, Purpose
from potluck.secagg.protocol.vectors.word_limits import vector_scale
from potluck.secagg.protocol.wire.messages import Stage
from potluck.server.reduce.apply_round import RoundNumbers
from potluck.server.reduce.move_by_sum import BLOCK_ELEMENTS, move_by_sum
from potluck.server.state import State
from potluck.server.strategies.fedavg import FedAvg
from potluck.server.strategies.fedavgm import FedAvgM
from potluck.server.strategies.fednova import FedNova
from potluck.server.strategies.robust import CoordinateMedian
from potluck.server.strategies.scaffold import CONTROL, Scaffold
from potluck.server.strategy import Strategy, UpdateStatistics

CAP = 1000
BUFFERS = frozenset({"norm.mean"})
MODEL: dict[str, NDArray[Any]] = {
    "first": np.linspace(-1, 1, 2 * BLOCK_ELEMENTS // 3, dtype=np.float32).reshape(2, -1),
    "norm.mean": np.array([0.5, -0.5, 2.0], np.float32),
    "norm.batches": np.array(17),
    "second": np.linspace(1, -1, BLOCK_ELEMENTS, dtype=np.float32),
}
LAYOUT = Layout.of(MODEL)


@dataclass
class Filed(Run):
    """A session whose clients write their updates to files."""

    folder: Path = Path()
    updates: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    controls: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    numbers: dict[str, UpdateReport] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def upload(self, name: str) -> bytes:
        masking = self.sessions[name].masking
        assert masking is not None
        update = Differences(
            body=self.updates[name].copy(),
            auxiliaries={key: each.copy() for key, each in self._beside(name).items()},
            layout=LAYOUT,
            buffers=BUFFERS,
        )
        file = write_masked(self.path(name), update, self.numbers[name], masking)
        return bytes.fromhex(file.blake3)

    def _beside(self, name: str) -> dict[str, NDArray[np.float32]]:
        return {CONTROL: self.controls[name]} if self.controls else {}


def session(folder: Path, *, bits: int = 32, strategy: Strategy | None = None) -> Filed:
    """Return a session of six clients with unequal weights. One weight is above the cap, and one
    change must be clipped."""
    federation = Federation(6, Purpose.UPDATE)
    normalized, auxiliary = isinstance(strategy, FedNova), strategy.auxiliary if strategy else ()
    metrics = metric_names(normalized=normalized)
    masking = MaskingSettings.model_validate({"clip": 0.5, "bits": bits})
    header = federation.header(
        vectors=sum_vectors(vector_lengths(LAYOUT.parameters, metrics, auxiliary), masking),
        metrics=metrics,
        weight_bound=CAP,
        metric_bound=METRIC_BOUND,
    )
    made = Filed(federation, header, folder=folder)
    generator = np.random.Generator(np.random.PCG64(6))
    for place, name in enumerate(federation.names):
        drawn = generator.normal(0, 0.05, LAYOUT.parameters).astype(np.float32)
        drawn[place] = 3.0
        made.updates[name] = drawn
        made.numbers[name] = UpdateReport(
            samples=400 * (place + 1) % 1300 + 1, loss=0.25 * place, normalizer=2.0 + place
        )
        if auxiliary:
            made.controls[name] = np.divide(drawn[::-1], 4, dtype=np.float32)
    return made


def moved(run: Filed, strategy: Strategy, state: State | None = None) -> tuple[Any, State]:
    """Return the next model and the strategy's state, from the survivors' files."""
    unmasking = run.session.unmasking
    assert unmasking is not None
    path = run.folder / "model.safetensors"
    write_tensors(path, MODEL, layout=LAYOUT)
    numbers = RoundNumbers(round=1, clients=6, buffers=BUFFERS)
    names = unmasking.survivors
    with (
        open_tensors(path) as current,
        opened_sum([run.path(n) for n in names], unmasking) as total,
    ):
        assert isinstance(current, TensorFile)
        arrays, after = move_by_sum(
            strategy, state or strategy.init(MODEL), current, total, names, numbers
        )
        return {name: np.array(array) for name, array in arrays.items()}, after


def flat(arrays: Any) -> NDArray[np.float64]:
    return np.concatenate(
        [arrays[t.name].reshape(-1) for t in LAYOUT.tensors if t.floating]
    ).astype(np.float64)


def mean(run: Filed, names: list[str], values: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
    """Return the mean of clipped changes, weighted by numbers of samples up to the cap."""
    weights = [min(run.numbers[name].samples, CAP) for name in names]
    clipped = [np.clip(values[name].astype(np.float64), -0.5, 0.5) for name in names]
    return np.asarray(np.average(clipped, axis=0, weights=weights))


def bound(run: Filed, names: list[str]) -> float:
    """Return the maximum error of the fixed-point numbers."""
    scale = vector_scale(run.header.vector(BODY), 6)
    return len(names) / 2 / scale * CAP / sum(min(run.numbers[n].samples, CAP) for n in names)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("lost", ["", "b"])
def test_unmasked_mean_equals_that_of_the_survivors_within_the_error_bound(
    tmp_path: Path, bits: int, lost: str
) -> None:
    run = session(tmp_path, bits=bits).until(Stage.UPLOAD)
    assert isinstance(run, Filed)
    names = [name for name in run.federation.names if name != lost]
    run.answer(names)
    run.finish()
    arrays, _ = moved(run, FedAvg())
    expected = flat(MODEL) + mean(run, names, run.updates)
    assert np.abs(flat(arrays) - expected).max() <= bound(run, names) + 2**-24
    assert arrays["norm.batches"] == 17, "integers are the model's own"
    if bits == 64:
        assert np.abs(flat(arrays) - expected).max() <= 2**-24


def test_small_deltas_keep_their_precision_beside_large_weights(tmp_path: Path) -> None:
    run = session(tmp_path, bits=64).finish()
    assert isinstance(run, Filed)
    seen: dict[str, Any] = {}

    class Watched(FedAvgM):
        def apply(self, state: State, model: Any, combined: Any, context: Any) -> Any:
            copies = {name: array.copy() for name, array in combined.items()}
            seen.update(copies, included=context.included)
            return super().apply(state, model, combined, context)

    moved(run, Watched())
    assert list(seen.pop("included")) == run.federation.names
    off = np.abs(flat(seen) - mean(run, run.federation.names, run.updates))
    assert (off <= 2**-24 * np.abs(flat(seen)) + 1e-12).all()


def test_fednova_normalises_masked_updates_except_buffers(tmp_path: Path) -> None:
    strategy = FedNova()
    run = session(tmp_path, bits=64, strategy=strategy).finish()
    assert isinstance(run, Filed)
    names = run.federation.names
    a = {name: run.numbers[name].normalizer or 1.0 for name in names}
    weights = [min(run.numbers[name].samples, CAP) for name in names]
    effective = float(np.average(list(a.values()), weights=weights))
    divided = {name: run.updates[name] / a[name] for name in names}
    expected = flat(MODEL) + effective * mean(run, names, divided)
    buffer = slice(MODEL["first"].size, MODEL["first"].size + 3)
    expected[buffer] = flat(MODEL)[buffer] + mean(run, names, run.updates)[buffer]
    arrays, _ = moved(run, strategy)
    assert np.abs(flat(arrays) - expected).max() < 1e-6


def test_masked_control_variates_are_summed_unweighted(tmp_path: Path) -> None:
    strategy = Scaffold(weights="samples")
    run = session(tmp_path, bits=64, strategy=strategy).finish()
    assert isinstance(run, Filed)
    _, state = moved(run, strategy)
    sums = {k.removeprefix("sum/"): v for k, v in state.arrays.items() if k.startswith("sum/")}
    clipped = [np.clip(each.astype(np.float64), -0.5, 0.5) for each in run.controls.values()]
    assert np.abs(flat(sums) - np.sum(clipped, axis=0)).max() < 1e-6


def test_strategy_state_after_a_masked_round_is_in_memory(tmp_path: Path) -> None:
    run = session(tmp_path).finish()
    assert isinstance(run, Filed)

    class Remembers(FedAvg):
        def apply(self, state: State, model: Any, combined: Any, context: Any) -> Any:
            weights, _ = super().apply(state, model, combined, context)
            views = {"model": model["first"], "update": combined["first"][1:]}
            return weights, State(arrays=views)

    _, state = moved(run, Remembers())
    assert state.arrays.keys() == {"model", "update"}
    assert all(array.flags.owndata for array in state.arrays.values())


def test_training_metrics_of_a_masked_round_are_known_only_as_sums(tmp_path: Path) -> None:
    run = session(tmp_path).finish()
    assert isinstance(run, Filed)
    unmasking = run.session.unmasking
    assert unmasking is not None
    paths = [run.path(name) for name in unmasking.survivors]
    with opened_sum(paths, unmasking) as total:
        head = total.head
    weights = [min(each.samples, CAP) for each in run.numbers.values()]
    assert head.weight == sum(weights)
    assert head.clients == head.clipped == 6
    losses = [each.loss or 0.0 for each in run.numbers.values()]
    assert head.metrics["loss"] == pytest.approx(np.average(losses, weights=weights), abs=1e-6)
    with (
        pytest.raises(BrokenRuleError, match="impossible numbers"),
        opened_sum(paths[1:], unmasking),
    ):
        pass


def test_strategy_that_distinguishes_clients_is_refused_in_a_masked_round(tmp_path: Path) -> None:
    run = session(tmp_path).finish()
    assert isinstance(run, Filed)

    class Partial(FedAvg):
        def weigh(self, statistics: UpdateStatistics) -> Any:
            combine = super().weigh(statistics)
            combine.weights[0] += 0.5
            return combine

    with pytest.raises(PluginError, match="different weights for clients"):
        moved(run, Partial())
    with pytest.raises(PluginError, match="median of updates"):
        moved(run, CoordinateMedian())


def test_non_finite_update_is_summed_as_zeros_and_counted(tmp_path: Path) -> None:
    run = session(tmp_path)
    run.updates["c"][BLOCK_ELEMENTS + 5] = np.inf
    run.finish()
    assert isinstance(run, Filed)
    names = [name for name in run.federation.names if name != "c"]
    arrays, _ = moved(run, FedAvg())
    expected = flat(MODEL) + mean(run, names, run.updates)
    assert np.abs(flat(arrays) - expected).max() <= bound(run, names) + 2**-23
    unmasking = run.session.unmasking
    assert unmasking is not None
    with opened_sum([run.path(n) for n in unmasking.survivors], unmasking) as total:
        assert (total.head.failed, total.head.clients) == (1, 6)
        assert total.loss == pytest.approx(
            np.average(
                [run.numbers[n].loss or 0.0 for n in names],
                weights=[min(run.numbers[n].samples, CAP) for n in names],
            ),
            rel=1e-6,
        )


def test_masked_sum_of_only_failed_trainings_is_refused(tmp_path: Path) -> None:
    run = session(tmp_path)
    for update in run.updates.values():
        update[0] = np.nan
    run.finish()
    assert isinstance(run, Filed)
    with pytest.raises(TrainingError, match="the training of every client in the secure sum"):
        moved(run, FedAvg())


def test_file_that_is_not_a_masked_update_is_refused(tmp_path: Path) -> None:
    run = session(tmp_path).until(Stage.UPLOAD)
    assert isinstance(run, Filed)
    write_tensors(tmp_path / "other.safetensors", MODEL, layout=LAYOUT)
    with pytest.raises(LayoutError, match="masked update refused"):
        check_masked(tmp_path / "other.safetensors", run.header)
    run.answer(["a"], closing=False)
    check_masked(run.path("a"), run.header)
