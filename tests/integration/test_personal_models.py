"""Models of single clients, over real gRPC: measured beside the round's, and never sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from support.sum_federation import Members, host_of, sum_federation
from support.wire_recording import Recording

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.common.tensors.tensor_files import open_tensors
from potluck.deploy.view.watch_lines import round_line
from potluck.rpc.v1 import operator_pb2
from potluck.server.live.feed import committed_round_message, run_status
from potluck.server.store import RoundRow, RunState, Store
from potluck.server.store.round_record import round_record

CLIENTS = 5
RUN_FILE = """
rounds = 2
clients_per_round = 5
expected_clients = 5
task = {name = "digits", clients = 5, held_out = 0.3, alpha = 0.1}
evaluation = {spread = true, fine_tune_epochs = 3}
personal = {method = "ditto", pull = 0.05}
training = {steps = 5}
"""
WILLING = DisclosurePolicy(held_out_counts=True, masked_runs=9, sets_per_model="any")
HALVES = {"accuracy", "personal_accuracy", "tuned_accuracy"}


def pieces(path: Path) -> list[bytes]:
    """Return sixteen numbers from the middle of each tensor, as stored in a file."""
    with open_tensors(path) as file:
        raw = [array.tobytes() for array in file.arrays.values() if array.nbytes >= 256]
    return [each[len(each) // 8 * 4 :][:64] for each in raw]


async def test_personal_models_are_evaluated_and_never_sent(tmp_path: Path) -> None:
    members = Members.make(tmp_path / "members", CLIENTS)
    recording = Recording(spool=tmp_path / "coordinator" / "spool")
    async with sum_federation(members, tmp_path, interceptors=[recording]) as federation:
        await federation.start(disclosure=WILLING)
        row = await federation.finished(RUN_FILE)
        assert row.state is RunState.FINISHED, row.reason
        rounds = await federation.coordinator.store.call(lambda store: store.rounds(row.run_id))
        last = rounds[-1]
        assert last.spreads.keys() >= HALVES
        for name in HALVES:
            assert last.spreads[name].clients == CLIENTS
            assert 0.0 <= last.metrics[name] <= 1.0
        for better in ("tuned_accuracy", "personal_accuracy"):
            assert last.spreads[better].mean > last.spreads["accuracy"].mean
        line = round_line(round_record(last), run_status(row))
        for said in ("personal accuracy", "tuned worst tenth", "personal worst tenth"):
            assert said in line
        outgoing = (tmp_path / host_of("client-0") / "outgoing").rglob("*client-0*")
        left = b"".join(path.read_bytes() for path in outgoing)
        assert left.count(b'"subject":"its own model"') == 2
        assert left.count(b'"subject":"the model after more training"') == 2
        kept = [
            path
            for name in members.names
            for path in (tmp_path / host_of(name) / "kept").glob("*.safetensors")
        ]
        assert len(kept) == CLIENTS
        crossed = [
            *(message for each in recording.received.values() for message in each),
            *(message for each in recording.sent.values() for message in each),
            *recording.spooled.values(),
        ]
        disk = [p.read_bytes() for p in (tmp_path / "coordinator").rglob("*") if p.is_file()]
        for path in kept:
            for piece in pieces(path):
                assert not any(piece in each for each in (*crossed, *disk))
        sent = pieces(tmp_path / "coordinator" / "models" / f"{rounds[0].model_blake3}.safetensors")
        assert all(any(piece in each for each in crossed) for piece in sent), "the search works"


WITH = {
    "masked": "secure_aggregation = true\n",
    "scaffold": 'strategy = {name = "scaffold"}\n',
}


def rounds_of(run_id: str) -> Callable[[Store], list[RoundRow]]:
    return lambda store: store.rounds(run_id)


async def test_personal_models_do_not_change_the_shared_model(tmp_path: Path) -> None:
    """The shared model is the same with and without personal models, which differ from it."""
    members = Members.make(tmp_path / "members", CLIENTS)
    async with sum_federation(members, tmp_path) as federation:
        await federation.start(disclosure=WILLING)
        call = federation.coordinator.store.call
        for name, setting in WITH.items():
            digests = []
            for text in (RUN_FILE, RUN_FILE.replace("personal =", "#")):
                row = await federation.finished(setting + text)
                assert row.state is RunState.FINISHED, (name, row.reason)
                digests.append(row.model_blake3)
                [*_, last] = await call(rounds_of(row.run_id))
                assert ("personal_accuracy" in last.metrics) == (text is RUN_FILE)
                assert last.metrics.get("personal_loss") != last.metrics["tuned_loss"]
            assert digests[0] == digests[1], name


async def test_run_without_personal_models_has_no_metrics_of_them(tmp_path: Path) -> None:
    members = Members.make(tmp_path / "members", 2)
    async with sum_federation(members, tmp_path) as federation:
        await federation.start(disclosure=WILLING)
        row = await federation.finished(
            "rounds = 1\nclients_per_round = 2\nexpected_clients = 2\n"
            'task = {name = "digits", clients = 2, held_out = 0.3, central_test = false}\n'
        )
        [entry] = await federation.coordinator.store.call(lambda store: store.rounds(row.run_id))
    assert entry.metrics.keys() == {"accuracy", "loss", "weighted_f1"}
    assert entry.spreads == {}
    assert committed_round_message(entry).metrics.others == operator_pb2.Metrics().others
