"""Custom trainers in real processes: a fault is one log line, and rounds continue."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.federation import Federation, set_values
from support.profile_federation import profile_federation

from potluck.common.tensors.tensor_files import open_tensors
from potluck.deploy.operator.model_download import download_model
from potluck.rpc.v1 import operator_pb2

PLUGINS = Path(__file__).parents[1] / "support" / "trainer_plugins"
pytestmark = pytest.mark.slow


async def troubles(federation: Federation, fault: str, *assignments: str) -> dict[str, str]:
    """Run two rounds with a fault of client-1; return the reported trouble of each failed
    client."""
    run = await federation.start_run(f"task.fault={fault}", *assignments)
    await federation.finished(run)
    found: dict[str, str] = {}
    for entry in await federation.history(run):
        included = [m for m in entry.members if m.state == operator_pb2.MEMBER_STATE_INCLUDED]
        assert len(included) >= (2 if fault == "hangs" else 3), "those of its host wait for it"
        found |= {member.client_id: member.trouble for member in entry.members if member.trouble}
    return found


async def test_rounds_continue_without_clients_whose_trainer_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS))
    async with profile_federation(
        tmp_path,
        task="line",
        selector="uniform",
        count=4,
        assignments=["round.quorum=0.5", "round.leavers=drop"],
        start_hosts=False,
    ) as federation:
        for path in federation.files.hosts:
            set_values(path, {"cancel_timeout_seconds": 0.2})
        await federation.start_hosts()
        for fault, line in {
            "raises": "failed for client 'client-1': ValueError: the scanner's file is empty",
            "exits": "failed for client 'client-1': SystemExit: 3",
            "interrupts": "failed for client 'client-1': KeyboardInterrupt: no message",
            "not-a-number": "left NaN, infinity or huge numbers in tensor 'slope'",
            "shapes": "returned a model that is not compatible with the task's model",
            "undeclared": "has the measure 'accuracy', which the task's trainer does not declare",
        }.items():
            assert line in (await troubles(federation, fault))["client-1"]
        hanging = await troubles(federation, "hangs", "round.deadline_seconds=4")
        assert hanging["client-1"].startswith("no update within 4 s")
        assert await troubles(federation, "") == {}, "the hosts are of use after all that"
        run = await federation.start_run("task.fault=evaluation")
        await federation.finished(run)
        for entry in await federation.history(run):
            assert entry.metrics.others["near"] >= 0, "the others are measured"
        run = await federation.start_run('model.keep=["slope"]')
        await federation.finished(run)
        rounds = await federation.history(run)
        assert all(entry.metrics.others["near"] >= 0 for entry in rounds)
        model = tmp_path / "model.safetensors"
        await download_model(federation.operator, run, model)
        with open_tensors(model) as file:
            assert list(file.layout.by_name) == ["offset"], "each client has a slope of its own"
