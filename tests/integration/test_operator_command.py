"""The `potluck` command against a scripted coordinator, over mutual TLS."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from support.operator_service import (
    RUN_ID,
    FakeOperatorService,
    committed,
    notice,
    progress,
    running_operator_service,
    status,
)
from support.pki import TestFederation
from support.programs import run_program

from potluck.common.disclosure import CLAIM
from potluck.common.errors import (
    ConfigurationError,
    NotFoundError,
    StorageError,
    UnreachableError,
)
from potluck.common.run_file.runfile import example_run_file
from potluck.common.tensors.digest import digest_of
from potluck.common.tensors.shards import opened_weights
from potluck.common.tensors.tensor_files import open_tensors
from potluck.deploy.operator.model_download import download_model
from potluck.deploy.operator.operator_client import connect
from potluck.deploy.operator.operator_config import OperatorConfig
from potluck.deploy.view import watch
from potluck.rpc.v1 import operator_pb2
from potluck.rpc.v1.operator_pb2 import RunState

FINISHED = RunState.RUN_STATE_FINISHED


@pytest.fixture
def service() -> FakeOperatorService:
    # Calls that no test makes here stay unimplemented, as in the generated base class.
    return FakeOperatorService()  # type: ignore[abstract]


@pytest.fixture
async def config(
    service: FakeOperatorService, federation: TestFederation
) -> AsyncIterator[OperatorConfig]:
    async with running_operator_service(service, federation) as config:
        yield config


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


async def start(
    config: OperatorConfig, folder: Path, *arguments: str, **variables: str
) -> asyncio.subprocess.Process:
    """Start `potluck ARGUMENTS…` in `folder`, with the connection in its environment."""
    environment = {
        **os.environ,
        "POTLUCK_COORDINATOR": config.coordinator,
        "POTLUCK_CERTIFICATE": str(config.tls.certificate),
        "POTLUCK_KEY": str(config.tls.key),
        "POTLUCK_AUTHORITY": str(config.tls.authority),
        "HOME": str(folder),
        **variables,
    }
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "potluck.deploy",
        *arguments,
        cwd=folder,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def potluck(config: OperatorConfig, folder: Path, *arguments: str, **variables: str) -> Ended:
    process = await start(config, folder, *arguments, **variables)
    out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


async def test_a_run_is_started_with_overrides_and_watched(
    config: OperatorConfig, service: FakeOperatorService, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(example_run_file())
    service.watches = [
        [status(), progress(1), committed(1, 0.5), notice("lost client-2"), status(FINISHED)]
    ]
    arguments = ["run", "run.toml", "-o", "rounds=5", "-o", "training.epochs=2", "--watch"]
    ended = await potluck(config, tmp_path, *arguments)
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert lines[0] == RUN_ID
    assert lines[1] == "run 3f9ac0de (tea) is running; 0 of 3 rounds committed"
    assert lines[2].startswith("round 1/3  cohort 3  loss 0.5000  accuracy 50.0 %")
    assert lines[3] == "warning: lost client-2"
    assert lines[4] == "run 3f9ac0de (tea) is finished; 0 of 3 rounds committed"
    assert "rounds = 5" in service.started[0]
    assert "# Seed of all random choices" in service.started[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('sel = 1\n[task]\nname = "digits"', "potluck: run.toml: unknown key 'sel'; known keys: "),
        ("rounds = = 3", "potluck: run.toml: not valid TOML"),
        ('[task]\nname = "digits"\n[selector]\nname = "powr"', "potluck: 'powr' is not installed"),
        (None, "potluck: can't read the run file run.toml: No such file or directory; "),
    ],
)
async def test_invalid_run_file_is_a_one_line_error(
    config: OperatorConfig,
    service: FakeOperatorService,
    tmp_path: Path,
    text: str | None,
    message: str,
) -> None:
    if text is not None:
        (tmp_path / "run.toml").write_text(text)
    ended = await potluck(config, tmp_path, "run", "run.toml")
    assert (ended.code, ended.out, service.started) == (1, "", [])
    assert ended.err.startswith(message)
    assert ended.err.count("\n") == 1


async def test_run_file_is_checked_before_connecting(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('rounds = 0\ntask = {name = "digits"}\n')
    nowhere = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    found = []
    for change in ("seed=1", "rounds=3"):
        ended = await asyncio.to_thread(
            run_program, "potluck", "run", "run.toml", "-o", change,
            folder=tmp_path, environment=nowhere,
        )  # fmt: skip
        assert ended.returncode == 1
        [line] = ended.stderr.decode().splitlines()
        found.append(line)
    assert found[0].startswith("potluck: run.toml: 'rounds': must be")
    assert "can't find a coordinator" in found[1]


async def test_json_option_lists_runs_and_clients_as_json(
    config: OperatorConfig, service: FakeOperatorService, tmp_path: Path
) -> None:
    service.runs = [status(committed=1).status]
    service.clients = [
        operator_pb2.ClientStatus(client_id="client-0", host_id="host-0", attending=True)
    ]
    runs, clients = await asyncio.gather(
        potluck(config, tmp_path, "runs", "--json"), potluck(config, tmp_path, "clients", "--json")
    )
    listed = json.loads(runs.out)["runs"]
    assert [(entry["run"], entry["state"]) for entry in listed] == [(RUN_ID, "running")]
    assert json.loads(clients.out)["clients"][0]["attending"] is True


async def test_doctor_warns_about_a_disconnected_host(
    config: OperatorConfig, service: FakeOperatorService, tmp_path: Path
) -> None:
    service.clients = [
        operator_pb2.ClientStatus(client_id="client-0", host_id="host-0", attending=True),
        operator_pb2.ClientStatus(client_id="client-1", host_id="host-1", attending=False),
    ]
    ended = await potluck(config, tmp_path, "doctor", "--json")
    found = {each["about"]: each for each in json.loads(ended.out)["the federation"]}["hosts"]
    assert found["verdict"] == "warning"
    assert "1 host disconnected: host-1 (last heard of " in found["found"]
    assert found["remedy"].startswith("start it: `potluck-client --config FILE`")


async def test_runs_command_shortens_reasons_except_for_a_named_run(
    config: OperatorConfig, service: FakeOperatorService, tmp_path: Path
) -> None:
    reason = "no quorum: " + "; ".join(f"client-{n}: can't train\nat all" for n in range(40))
    failed = status(RunState.RUN_STATE_FAILED, committed=1, reason=reason)
    service.runs = [failed.status] * 5
    narrow = await potluck(config, tmp_path, "runs", COLUMNS="80", FORCE_COLOR="1")
    piped = await potluck(config, tmp_path, "runs")
    for ended in (narrow, piped):
        assert len(ended.out.splitlines()) == 1 + 5
        assert ended.out.count(RUN_ID) == 5
    assert "no quorum: client-0: can't train at all" in piped.out
    assert "no quorum: c" in narrow.out

    service.watches = [[failed], [failed]]
    one = await potluck(config, tmp_path, "runs", "3f9a")
    assert "client-39: can't train" in " ".join(one.out.split())
    assert "1 of 3 committed" in one.out
    listed = await potluck(config, tmp_path, "runs", "3f9a", "--json")
    [values] = json.loads(listed.out)["runs"]
    assert (values["run"], values["reason"]) == (RUN_ID, reason.replace("\n", " "))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rep", "potluck: rep: pictures are PNG files; name the file rep.png\n"),
        ("rep.pdf", "potluck: rep.pdf: pictures are PNG files; name the file rep.png\n"),
        (
            "no/rep.png",
            "potluck: can't write the file no/rep.png; name a file in a folder that exists\n",
        ),
    ],
)
async def test_picture_with_an_invalid_file_name_is_not_written(
    config: OperatorConfig, tmp_path: Path, name: str, said: str
) -> None:
    (tmp_path / "rep.png").write_text("dear")
    drawn = await potluck(config, tmp_path, "report", "3f9a", "-o", name)
    assert (drawn.code, drawn.err) == (1, said)
    assert (tmp_path / "rep.png").read_text() == "dear"
    described = await potluck(config, tmp_path, "data", "describe", "digits", "--plot", name)
    assert (described.code, described.err) == (1, said)


async def test_report_and_profiles_are_of_the_newest_run_by_default(
    config: OperatorConfig, service: FakeOperatorService, tmp_path: Path
) -> None:
    service.runs = [status(committed=1).status]
    service.profiles = [operator_pb2.ClientProfile(client_id=f"client-{n}") for n in range(3)]
    service.watches = [[status(committed=1), committed(1, 0.5)]]
    drawn = await potluck(config, tmp_path, "report", "-o", "report.png")
    assert (drawn.code, drawn.out.startswith("report.png: 1 round;")) == (0, True), drawn.err
    written = await potluck(config, tmp_path, "profiles", "-o", "profiles.json")
    assert (written.code, written.out) == (0, "profiles.json: profiles of 3 clients\n")


async def test_report_of_a_masked_run_prints_the_secure_aggregation_claim(
    config: OperatorConfig, service: FakeOperatorService, tmp_path: Path
) -> None:
    service.profiles = [operator_pb2.ClientProfile(client_id=f"client-{n}") for n in range(3)]
    service.watches = [[status(committed=1), committed(1, 0.5)] for _ in range(2)]
    open_run = await potluck(config, tmp_path, "report", "3f9a", "-o", "open.png")
    service.started = ["secure_aggregation = true"]
    masked = await potluck(config, tmp_path, "report", "3f9a", "-o", "masked.png")
    assert (open_run.code, masked.code) == (0, 0), masked.err
    assert "secure_aggregation" not in open_run.out
    assert masked.out.splitlines()[-1] == f"secure_aggregation: {CLAIM}"


async def test_watch_follows_the_newest_run_and_exits_with_1_if_it_fails(
    config: OperatorConfig, service: FakeOperatorService, tmp_path: Path
) -> None:
    service.runs = [status().status]
    service.watches = [[status(), status(RunState.RUN_STATE_FAILED, reason="no quorum")]]
    ended = await potluck(config, tmp_path, "watch", "--json")
    first, last = map(json.loads, ended.out.splitlines())
    assert (ended.code, first["state"], last["state"], ended.err) == (1, "running", "failed", "")
    assert last["reason"] == "no quorum"


async def test_stop_prints_the_state_of_the_run(config: OperatorConfig, tmp_path: Path) -> None:
    stopped, unknown = await asyncio.gather(
        potluck(config, tmp_path, "stop", "3f9a"), potluck(config, tmp_path, "stop", "ffff")
    )
    assert stopped.out.startswith("run 3f9ac0de (tea) was stopped: by an operator; 1 of 3 rounds")
    assert (unknown.code, unknown.err) == (1, "potluck: no run begins with 'ffff'\n")


async def test_resume_prints_the_state_of_the_run_and_can_watch_it(
    config: OperatorConfig, service: FakeOperatorService, tmp_path: Path
) -> None:
    service.watches = [[status(), status(RunState.RUN_STATE_FINISHED, committed=3)]]
    resumed, refused = await asyncio.gather(
        potluck(config, tmp_path, "resume", "3f9a", "--watch", "--json"),
        potluck(config, tmp_path, "resume", "ffff"),
    )
    states = [json.loads(line)["state"] for line in resumed.out.splitlines()]
    assert (resumed.code, states) == (0, ["waiting", "running", "finished"])
    assert (refused.code, refused.err) == (1, "potluck: run ffff is finished\n")


async def test_resume_without_a_run_resumes_the_newest(
    config: OperatorConfig, service: FakeOperatorService, tmp_path: Path
) -> None:
    nothing = await potluck(config, tmp_path, "resume")
    assert (nothing.code, "start one with `potluck run FILE`" in nothing.err) == (1, True)
    service.runs = [status(committed=1).status]
    resumed = await potluck(config, tmp_path, "resume", "--json")
    assert (resumed.code, json.loads(resumed.out)["run"]) == (0, RUN_ID)


async def test_delete_command_requires_the_yes_option(
    config: OperatorConfig, service: FakeOperatorService, tmp_path: Path
) -> None:
    over = status(FINISHED, committed=2)
    service.watches = [[status(committed=1)], [over], [over]]
    running = await potluck(config, tmp_path, "delete", "3f9a")
    told = f"potluck: run {RUN_ID} is running; stop it first: `potluck stop {RUN_ID}`\n"
    assert (running.code, running.err, service.deleted) == (1, told, [])
    asked = await potluck(config, tmp_path, "delete", "3f9a")
    assert (asked.code, service.deleted) == (1, [])
    assert "add --yes to delete the run" in asked.err
    deleted = await potluck(config, tmp_path, "delete", "3f9a", "--yes")
    assert deleted.out == "deleted run 3f9ac0de (tea)\n"
    assert (deleted.code, service.deleted) == (0, [RUN_ID])


async def test_run_again_starts_an_earlier_run_with_overrides(
    config: OperatorConfig, service: FakeOperatorService, tmp_path: Path
) -> None:
    service.started.append('rounds = 3\n[task]\nname = "digits"\n')
    again = await potluck(config, tmp_path, "run", "--again", "3f9a", "-o", "rounds=5")
    assert (again.code, again.out.strip()) == (0, RUN_ID)
    assert service.started[-1].startswith("rounds = 5\n")
    shown = await potluck(config, tmp_path, "runs", "3f9a", "--file")
    assert shown.out.strip() == service.started[-1].strip()
    neither = await potluck(config, tmp_path, "run")
    assert (neither.code, "name a run file" in neither.err) == (1, True)


async def test_ascii_terminal_receives_ascii_replacements(
    config: OperatorConfig, service: FakeOperatorService, tmp_path: Path
) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    service.runs = [status(reason="ß → 1 … 2").status]
    service.watches = [
        [status(), notice("3 × ‘ß’"), status(FINISHED, committed=3)],
        [status(reason="ß"), status(FINISHED, committed=3)],
    ]
    runs = await potluck(config, tmp_path, "runs", **ascii_only)
    watched = await potluck(config, tmp_path, "watch", **ascii_only)
    listed = await potluck(config, tmp_path, "watch", "--json", **ascii_only)
    assert (runs.code, watched.code, listed.code) == (0, 0, 0)
    assert "? > 1 . 2" in runs.out
    assert "3 x '?'" in watched.out
    assert json.loads(listed.out.splitlines()[0])["reason"] == "ß"  # JSON keeps the characters


async def test_ctrl_c_ends_a_watch_with_exit_code_130(
    config: OperatorConfig, service: FakeOperatorService, tmp_path: Path
) -> None:
    service.watches, service.holds = [[status()]], True
    process = await start(config, tmp_path, "watch", RUN_ID)
    assert process.stdout is not None
    await process.stdout.readline()  # now it waits for events
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert process.returncode == 130
    assert err.decode() == (
        f"stopped watching; run {RUN_ID} continues (`potluck watch {RUN_ID}`, `potluck stop "
        f"{RUN_ID}`)\n"
    )


async def test_unreachable_coordinator_is_an_error_with_a_remedy(
    federation: TestFederation, tmp_path: Path
) -> None:
    config = OperatorConfig(coordinator="127.0.0.1:1", tls=federation.operator)
    ended = await potluck(config, tmp_path, "runs")
    assert ended.code == 1
    found, _, remedy = ended.err.partition("; ")
    assert found == "potluck: nothing listens at 127.0.0.1:1 (connection refused)"
    assert remedy == "is the coordinator running?\n"


async def test_watch_reconnects_to_a_restarted_coordinator(
    config: OperatorConfig, service: FakeOperatorService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "FIRST_PAUSE_SECONDS", 0.01)
    service.watches = [
        [status(), committed(1, 0.5), notice("hello")],
        [status(), committed(1, 0.5), notice("hello")],
        [status(), committed(1, 0.5), committed(2, 0.6), status(FINISHED, committed=2)],
    ]
    shown = io.StringIO()
    async with connect(config) as client:
        view = await watch.follow(client, RUN_ID, watch.LinesDisplay(shown))
    assert sorted(view.committed) == [1, 2]
    starts = [line.split()[0:2] for line in shown.getvalue().splitlines()]
    assert starts == [
        ["run", RUN_ID],
        ["round", "1/3"],
        ["warning:", "hello"],
        ["warning:", "lost"],
        ["back", "with"],
        ["warning:", "lost"],
        ["back", "with"],
        ["round", "2/3"],
        ["run", RUN_ID],
    ]


async def test_watch_of_an_unreachable_coordinator_fails_at_once(
    federation: TestFederation,
) -> None:
    config = OperatorConfig(coordinator="127.0.0.1:1", tls=federation.operator)
    async with connect(config) as client:
        with pytest.raises(UnreachableError):
            await watch.follow(client, RUN_ID, watch.LinesDisplay(io.StringIO()))


async def test_interrupted_model_download_resumes_at_its_offset(
    config: OperatorConfig, service: FakeOperatorService, tmp_path: Path
) -> None:
    service.model = bytes(range(256)) * 40
    service.model_breaks = [3000, 7000]
    target = tmp_path / "model.safetensors"
    async with connect(config) as client:
        done = await download_model(client, RUN_ID, target)
    assert target.read_bytes() == service.model
    assert (done.size, service.offsets) == (len(service.model), [0, 3000, 7000])
    assert files_in(tmp_path) == ["model.safetensors"]


async def test_model_download_with_many_interruptions_completes(
    config: OperatorConfig, service: FakeOperatorService, tmp_path: Path
) -> None:
    service.model = bytes(range(256)) * 40
    service.model_breaks = list(range(500, 10_000, 500))  # 19 breaks
    target = tmp_path / "model.safetensors"
    async with connect(config) as client:
        await download_model(client, RUN_ID, target)
    assert target.read_bytes() == service.model
    assert service.offsets == [0, *range(500, 10_000, 500)]


async def test_model_download_without_progress_fails_and_the_next_one_resumes(
    config: OperatorConfig, service: FakeOperatorService, tmp_path: Path
) -> None:
    service.model = bytes(range(256)) * 40
    service.model_breaks = [3000] * 6  # only the first attempt makes progress
    ended = await potluck(config, tmp_path, "model", RUN_ID, "-o", "m", "--exact")
    assert ended.code == 1
    assert (
        f"3000 bytes of the file are in {tmp_path}, and the same command resumes the download"
        in ended.err
    )
    await potluck(config, tmp_path, "model", RUN_ID, "-o", "m", "--exact")
    assert (tmp_path / "m").read_bytes() == service.model
    assert service.offsets == [0, *[3000] * 6]


async def test_model_file_holds_its_run_and_round(
    config: OperatorConfig, service: FakeOperatorService, tmp_path: Path
) -> None:
    weights = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
    service.model = safetensors.numpy.save(weights)
    service.origin = operator_pb2.ModelOrigin(
        run_id=RUN_ID,
        name="tea",
        round=12,
        run_file='seed = 7\n[task]\nname = "digits"\nclients = 24\n[training]\nepochs = 2\n'
        '[model]\nkeep = ["b.*", "c"]\n',
    )
    ended = await potluck(config, tmp_path, "model", "3f9a", "-o", "m.safetensors", "--json")
    told = json.loads(ended.out)
    described = tmp_path / "m.safetensors"
    assert (told["blake3"], told["run"], told["round"]) == (digest_of(service.model), RUN_ID, 12)
    assert told["size"] == described.stat().st_size
    with safetensors.safe_open(described, "np") as file:
        assert file.metadata() == {
            "format": "pt",
            "potluck.run": RUN_ID,
            "potluck.name": "tea",
            "potluck.round": "12",
            "potluck.blake3": digest_of(service.model),
            "potluck.seed": "7",
            "potluck.task": '{"name": "digits", "clients": 24}',
            "potluck.model": '{"keep": ["b.*", "c"]}',
            "potluck.training": '{"epochs": 2}',
        }
        assert (file.get_tensor("a.weight") == weights["a.weight"]).all()
    with open_tensors(described) as ours:  # read as an `initial_model`
        assert (ours.arrays["a.weight"] == weights["a.weight"]).all()

    ended = await potluck(config, tmp_path, "model", "3f9a", "-o", "exact", "--exact")
    assert (tmp_path / "exact").read_bytes() == service.model
    assert ended.out.startswith(f"exact: round 12 of run {RUN_ID} (tea), ")
    assert ended.out.rstrip().endswith(
        "; the file does not contain the tensors that clients keep: b.*, c"
    )
    assert files_in(tmp_path) == ["exact", "m.safetensors"]


async def test_model_is_written_in_shards(
    config: OperatorConfig, service: FakeOperatorService, tmp_path: Path
) -> None:
    weights = {name: np.full(300, number, np.float32) for number, name in enumerate("abc")}
    service.model = safetensors.numpy.save(weights)
    service.origin = operator_pb2.ModelOrigin(run_id=RUN_ID, round=12, run_file="seed = 7\n")
    ended = await potluck(
        config, tmp_path, "model", "3f9a", "--shards", "2.5kB", "-o", "m", "--json"
    )
    told = json.loads(ended.out)
    assert (told["path"], told["blake3"]) == ("m", digest_of(service.model))
    assert files_in(tmp_path / "m") == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    with opened_weights(tmp_path / "m") as found:
        assert all((found.arrays[name] == array).all() for name, array in weights.items())
    with safetensors.safe_open(tmp_path / "m" / "model-00002-of-00002.safetensors", "np") as file:
        assert file.metadata()["potluck.round"] == "12"
    refused = await potluck(config, tmp_path, "model", "3f9a", "--shards", "much", "-o", "n")
    assert "'much' is not a size; write a size such as 5GB" in refused.err


async def test_partial_download_of_another_model_is_not_resumed(
    config: OperatorConfig, service: FakeOperatorService, tmp_path: Path
) -> None:
    target = tmp_path / "model.safetensors"
    (tmp_path / f".model.safetensors.{'0' * 64}.part").write_bytes(b"of another model")
    service.model = b"weights" * 999
    ended = await potluck(config, tmp_path, "model", "3f9a", "-o", str(target), "--json")
    assert target.read_bytes() == service.model
    assert json.loads(ended.out)["size"] == len(service.model)
    assert service.offsets == [0]
    assert files_in(tmp_path) == ["model.safetensors"]


async def test_evaluation_on_a_missing_data_folder_is_refused(
    config: OperatorConfig, tmp_path: Path
) -> None:
    ended = await potluck(config, tmp_path, "evaluate", "--data", "none")
    told = "potluck: none is not a folder; name an existing folder with --data\n"
    assert (ended.code, ended.err) == (1, told)


async def test_model_download_names_why_its_file_cant_be_written(
    config: OperatorConfig, service: FakeOperatorService, tmp_path: Path
) -> None:
    service.model = b"weights"
    long = tmp_path / ("m" * 250)  # too long for the name of the partial file
    async with connect(config) as client:
        with pytest.raises(ConfigurationError, match="because it is a folder; name a file in it"):
            await download_model(client, RUN_ID, tmp_path)
        with pytest.raises(ConfigurationError, match="name a file in a folder that exists"):
            await download_model(client, RUN_ID, tmp_path / "none" / "m")
        with pytest.raises(StorageError, match=f"can't write {long}: File name too long; free"):
            await download_model(client, RUN_ID, long)


async def test_client_raises_the_error_class_of_the_coordinator(
    config: OperatorConfig, service: FakeOperatorService
) -> None:
    async with connect(config) as client:
        with pytest.raises(NotFoundError, match="ffff"):
            await client.stop_run("ffff")
