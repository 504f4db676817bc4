"""Run the benchmark's work on NVFlare's own deployment: a server, a client per site, a job.

Server and clients communicate by gRPC with mTLS, as NVFlare provisions them.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from peers_memory import Memory, processes_of
from peers_processes import Programs, programs_in, until
from peers_work import Measurement, Notes, Work, measurement

from potluck.common.errors import RunError
from potluck.deploy.local.demo_files import reserved_port
from potluck.deploy.local.processes import TetheredProcess

APP = Path(__file__).parent / "peers" / "nvflare"
ADMINISTRATOR = "admin@benchmark.test"
MODEL_MOVED = re.compile(r"\[client\] download ref=.* done: .*\(([\d,]+) bytes\)")
"""NVFlare's log line on the side that received a model; `client` is the transfer's client."""


def project(clients: int, port: int) -> dict[str, Any]:
    """Return the project file from which NVFlare makes startup kits."""
    server: dict[str, Any] = {
        "name": "server",
        "type": "server",
        "host_names": ["localhost"],
        "default_host": "localhost",
        "fed_learn_port": port,
        "admin_port": port,
    }
    sites = [{"name": site, "type": "client"} for site in names(clients)]
    administrator = {"name": ADMINISTRATOR, "type": "admin", "role": "project_admin"}
    builders = "nvflare.lighter.impl"
    return {
        "api_version": 3,
        "name": "benchmark",
        "description": "A model back and forth.",
        "participants": [{**part, "org": "benchmark"} for part in (server, *sites, administrator)],
        "builders": [
            {"path": f"{builders}.workspace.WorkspaceBuilder"},
            {
                "path": f"{builders}.static_file.StaticFileBuilder",
                "args": {"config_folder": "config", "scheme": "grpc"},
            },
            {"path": f"{builders}.cert.CertBuilder"},
            {"path": f"{builders}.signature.SignatureBuilder"},
        ],
    }


def names(clients: int) -> list[str]:
    """Return NVFlare's names of the clients."""
    return [f"site-{number}" for number in range(clients)]


def write_job(job: Path, model: Path, notes: Path, work: Work) -> None:
    """Write the job: FedAvg as in NVFlare's recipe, with the persistor that records rounds."""
    application = job / "app"
    shutil.copytree(
        APP,
        application / "custom",
        ignore=lambda _folder, entries: [name for name in entries if name in NOT_IN_THE_JOB],
    )
    (application / "config").mkdir()
    (job / "meta.json").write_text(
        json.dumps(
            {
                "name": "benchmark",
                "resource_spec": {},
                "min_clients": work.clients,
                "deploy_map": {"app": ["@ALL"]},
            }
        )
    )
    controller = {
        "id": "controller",
        "path": "nvflare.app_common.workflows.fedavg.FedAvg",
        "args": {"num_clients": work.clients, "num_rounds": work.rounds + 1},
    }
    persistor = {
        "id": "persistor",
        "path": "noted_persistor.NotedPersistor",
        "args": {"record": str(notes), "model": str(model)},
    }
    executor = {
        "path": "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor",
        "args": {
            "execution_mode": "in_process",
            "task_script_path": "untrained.py",
            "params_exchange_format": "numpy",
        },
    }
    for name, value in (
        ("server", {"workflows": [controller], "components": [persistor]}),
        ("client", {"executors": [{"tasks": ["*"], "executor": executor}], "components": []}),
    ):
        filters: dict[str, Any] = {"task_data_filters": [], "task_result_filters": []}
        (application / "config" / f"config_fed_{name}.json").write_text(
            json.dumps({"format_version": 2, **value, **filters})
        )


NOT_IN_THE_JOB = {"submit.py", "__pycache__"}


async def start_party(programs: Programs, kit: Path, environment: Sequence[str]) -> TetheredProcess:
    """Start a server or a client from its startup kit."""
    script = str(kit / "startup" / "sub_start.sh")
    return await programs.start(kit.name, ["bash", script, "--once"], environment)


async def provision(programs: Programs, work: Work, port: int, environment: Sequence[str]) -> Path:
    """Make the startup kits. Return their folder."""
    description = programs.folder / "project.yml"
    description.write_text(json.dumps(project(work.clients, port)))  # JSON is YAML
    workspace = programs.folder / "workspace"
    command = ["nvflare", "provision", "-p", str(description), "-w", str(workspace)]
    process = await programs.start("provision", command, environment)
    await until(
        lambda: (workspace / "benchmark" / "prod_00" / ADMINISTRATOR).exists(),
        what="making NVFlare's startup kits",
        patience=work.timeout,
        passing=[process],
    )
    if await process.ended():
        raise process.exit_reason()
    return workspace / "benchmark" / "prod_00"


async def measure(folder: Path, binaries: Path, version: str, work: Work) -> Measurement:
    """Run the work on NVFlare. Raises RunError."""
    loop = asyncio.get_running_loop()
    async with programs_in(folder) as programs:
        environment = [f"HOME={folder}", f"PATH={binaries}:/usr/bin:/bin", "PYTHONPATH="]
        notes = Notes(folder / "notes")
        model = folder / "model.npy"
        np.save(model, np.random.default_rng(0).random(work.parameters, dtype=np.float32))
        write_job(folder / "job", model, notes.path, work)
        with reserved_port() as port:
            kits = await provision(programs, work, port, environment)

            launched = loop.time()
            server = await start_party(programs, kits / "server", environment)
            sites = [
                await start_party(programs, kits / name, environment)
                for name in names(work.clients)
            ]
            submit = [str(APP / "submit.py"), str(kits / ADMINISTRATOR), str(folder / "job")]
            arguments = [*submit, str(work.clients), str(notes.path)]
            submission = await programs.start("submit", ["python", *arguments], environment)
            memory = Memory(lambda: server_processes(server))
            async with memory.sampled():
                await until(
                    lambda: bool(notes.read("ended")),
                    what=f"{work.rounds + 1} rounds",
                    patience=work.timeout,
                    lasting=[server, *sites],
                    passing=[submission],
                )
    rounds = len(notes.commits())
    if rounds <= work.rounds:
        raise RunError(f"NVFlare ended the job after {rounds} of {work.rounds + 1} rounds")
    total = traffic(kits)
    return measurement(
        version=version,
        transport="gRPC with mTLS",
        launched=launched,
        notes=notes,
        memory=memory,
        bytes_per_client=total / work.clients / (work.rounds + 1) if total else None,
    )


def server_processes(server: TetheredProcess) -> list[int]:
    """Return the server's process without its launcher; the job's process is its child."""
    return processes_of("nvflare.private.fed.app.server.server_train", [server.group])


def traffic(kits: Path) -> int:
    """Return the bytes of all models received by server and clients, from the job's logs."""
    logs = [log.read_text(errors="replace") for log in kits.glob("*/*/log.txt")]
    moved = [match for log in logs for match in MODEL_MOVED.findall(log)]
    return sum(int(number.replace(",", "")) for number in moved)
