"""Hosts of a federation that train on a device."""

from __future__ import annotations

from pathlib import Path

from potluck.deploy.local.demo_files import DemoOptions, reserved_port, write_demo_files
from potluck.deploy.local.local_federation import LocalFederation


async def test_two_hosts_train_on_one_shared_device(device: str, tmp_path: Path) -> None:
    options = DemoOptions(
        task="digits",
        selector="uniform",
        strategy="fedavg",
        clients=4,
        hosts=2,
        count=4,
        rounds=3,
        seed=1,
        device=device,
        assignments=["training.learning_rate=0.1"],
    )
    accuracies: list[float] = []
    with reserved_port() as port:
        files = write_demo_files(tmp_path / "f", options, port)
        async with LocalFederation(files) as federation:
            await federation.start()
            async with federation.operator() as client:
                run_id = await client.start_run(files.run_file)
                async for event in client.watch_run(run_id):
                    assert not event.status.reason
                    if event.WhichOneof("event") == "committed":
                        accuracies.append(event.committed.metrics.accuracy)
                hosts = await client.list_clients()
    assert {each.device for each in hosts} == {device}
    assert len(accuracies) == 3
    assert accuracies[-1] > 0.5
