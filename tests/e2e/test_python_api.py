"""`potluck.federation`, used as in a script or a notebook: real processes on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save
from support.local_processes import until_no_process_of
from support.repository import ROOT

from potluck.common.errors import ConfigurationError, LayoutError, NotFoundError, RunError
from potluck.common.run_file.run_settings import Retention
from potluck.common.tasks.digits import Digits
from potluck.federation import Federation, Run, load_model

TASK = {"name": "digits", "clients": 6}
PATIENCE_SECONDS = 240


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with Federation.local(hosts=2, folder=tmp_path_factory.mktemp("federation") / "new") as made:
        yield made


@pytest.fixture(scope="module")
def finished(federation: Federation) -> Run:
    kept = Retention(keep_last=3)
    return federation.run(task=TASK, rounds=3, clients_per_round=3, seed=5, retention=kept).wait()


def test_iterating_a_run_yields_its_committed_rounds(finished: Run) -> None:
    rounds = list(finished)
    assert [each.number for each in rounds] == [1, 2, 3]
    assert [len(each.cohort) for each in rounds] == [3, 3, 3]
    assert rounds[-1].accuracy is not None
    assert finished.rounds["accuracy"].tolist() == [each.accuracy for each in rounds]
    assert finished.clients["selected"].sum() == 9
    assert set(finished.selections["state"]) == {"included"}
    assert finished.state == "finished"


def test_plotting_without_matplotlib_is_an_error_that_names_the_extra(
    finished: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("run_plot", "selection_plots"):
        monkeypatch.delitem(sys.modules, f"potluck.deploy.view.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    for draw in (finished.plot, finished.plot_selections):
        with pytest.raises(ConfigurationError, match="matplotlib is not installed; in a checkout"):
            draw()


async def test_async_iteration_of_a_run_yields_its_rounds(finished: Run) -> None:
    assert [each.number async for each in finished] == [1, 2, 3]


def test_model_of_a_run_is_a_network_with_trained_weights(finished: Run, tmp_path: Path) -> None:
    network = finished.model()
    assert not network.training
    with torch.no_grad():
        assert network(torch.zeros(2, 8, 8)).shape == (2, 10)
    first = finished.model(round=1)
    assert not torch.equal(first.state_dict()["1.weight"], network.state_dict()["1.weight"])
    path = finished.save(tmp_path / "model.safetensors")
    loaded = load_model(path)
    assert not loaded.training
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, network.state_dict()[name])
    exact = tmp_path / "exact.safetensors"
    exact.write_bytes(save({"weight": np.zeros(3, np.float32)}))
    with pytest.raises(LayoutError, match="does not name the task"):
        load_model(exact)


def test_exported_onnx_model_gives_the_same_outputs(finished: Run, tmp_path: Path) -> None:
    path, network = tmp_path / "model.onnx", load_model(finished.save(tmp_path / "model"))
    torch.onnx.export(
        network,
        (torch.rand(2, 8, 8),),
        path,
        input_names=["images"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        external_data=False,
    )
    images = torch.rand(7, 8, 8)
    [logits] = onnxruntime.InferenceSession(path).run(None, {"images": images.numpy()})
    with torch.inference_mode():
        assert np.abs(logits - network(images).numpy()).max() < 1e-5


def test_evaluate_reports_metrics_per_class(finished: Run) -> None:
    report = finished.evaluate()
    assert report.accuracy == finished.history[-1].accuracy
    assert report.samples == report.confusion.to_numpy().sum() == 400
    assert report.auroc is not None
    assert report.auroc > 0.9
    assert report.classes["samples"].tolist() == [40] * 10
    diagonal = np.diag(report.confusion.to_numpy())
    assert report.classes["recall"].tolist() == pytest.approx((diagonal / 40).tolist())
    assert "AUROC" in report._repr_html_()


def test_export_and_evaluate_commands_give_the_numbers_of_the_api(
    finished: Run, federation: Federation, tmp_path: Path
) -> None:
    assert federation.folder is not None
    config = ["--config", str(federation.folder / "federation-1" / "operator.toml")]

    def potluck(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "potluck.deploy.cli", *arguments, *config]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    done = potluck("export", finished.id, "-o", "rounds.csv")
    assert (done.returncode, "3 rows" in done.stdout) == (0, True), done.stderr
    rounds = pd.read_csv(tmp_path / "rounds.csv", index_col="round")
    assert rounds["accuracy"].tolist() == finished.rounds["accuracy"].tolist()
    potluck("export", finished.id, "--what", "selections", "-o", "selections.parquet")
    assert pd.read_parquet(tmp_path / "selections.parquet").equals(finished.selections)
    refused = potluck("export", finished.id, "-o", "rounds.xlsx")
    assert (refused.returncode, "written as .csv or .parquet" in refused.stderr) == (1, True)
    measured = potluck("evaluate", finished.id, "--json")
    assert json.loads(measured.stdout)["accuracy"] == finished.history[-1].accuracy
    shown = potluck("evaluate", finished.id)
    assert "predicted class by column" in shown.stdout, shown.stderr


def test_run_and_federation_have_notebook_displays_plots_and_tables(
    finished: Run, federation: Federation
) -> None:
    assert "digits" in finished._repr_html_()
    assert "3 of 3 rounds" in repr(finished)
    assert finished.plot().axes
    assert finished.plot_selections().axes
    assert finished.watch() is finished
    assert finished.id in federation.runs.index
    assert federation.clients["attending"].tolist() == [True] * 6
    assert federation.find(finished.id[:6]).wait().id == finished.id
    with pytest.raises(NotFoundError, match="no run 'nothing-like-it'"):
        federation.find("nothing-like-it")


def test_demo_command_with_the_same_settings_gives_the_same_model(
    finished: Run, tmp_path: Path
) -> None:
    demo = [sys.executable, "-m", "potluck.deploy.cli", "demo", "--selector", "uniform"]
    sizes = [
        "--json",
        "-o",
        f"task.alpha={Digits().alpha}",
        "-o",
        "task.seed=0",
        "--clients",
        "6",
        "--hosts",
        "2",
        "--clients-per-round",
        "3",
        "--rounds",
        "3",
        "--seed",
        "5",
    ]
    folder = ["--folder", str(tmp_path / "demo")]
    subprocess.run([*demo, *sizes, *folder], check=True, capture_output=True)
    with safe_open(tmp_path / "demo" / "model.safetensors", framework="numpy") as file:
        assert finished.history[-1].model == file.metadata()["potluck.blake3"]


def models_in(federation: Federation) -> set[str]:
    """Return the digests of the model files that the coordinator keeps."""
    assert federation.folder is not None
    files = (federation.folder / "federation-1" / "coordinator" / "models").glob("*.safetensors")
    return {path.stem for path in files}


def test_run_can_be_repeated_and_deleted(finished: Run, federation: Federation) -> None:
    again = federation.run(run_file=finished.run_file).wait()
    models = {each.model for each in finished.history}
    assert [each.model for each in again.history] == [each.model for each in finished.history]
    assert models <= models_in(federation)
    again.delete()
    assert again.id not in federation.runs.index
    assert models <= models_in(federation)  # the first run has the same models
    other = federation.run(run_file=finished.run_file, seed=6, rounds=1).wait()
    [only] = {each.model for each in other.history}
    assert only in models_in(federation)
    other.delete()
    assert only not in models_in(federation)
    with pytest.raises(NotFoundError):
        _ = other.run_file


def test_run_can_be_stopped_and_resumed(federation: Federation) -> None:
    run = federation.run(task=TASK, rounds=100_000, clients_per_round=2, seed=1)
    for committed in run:
        if committed.number == 2:
            with pytest.raises(RunError, match="stop it first"):
                run.delete()
            run.stop()
    assert run.state == "stopped"
    stopped_at = run.status.committed_rounds
    assert 2 <= stopped_at < 100_000
    run.resume()
    assert next(each for each in run if each.number > stopped_at).number == stopped_at + 1
    run.stop().wait()


def test_run_stops_early_and_returns_its_best_model(federation: Federation, tmp_path: Path) -> None:
    rule = {"measure": "loss", "patience": 2, "minimum_delta": 0.05}
    run = federation.run(task=TASK, rounds=60, clients_per_round=3, seed=5, stop=rule).wait()
    rounds, best = run.history, run.best
    assert run.status.reason.startswith("stopped early: loss has not improved by more than 0.05")
    assert run.state == "finished"
    assert len(rounds) < 60
    assert best is not None
    assert best.loss == min(each.loss for each in rounds if each.loss is not None)
    assert run.evaluate(best=True).accuracy == best.accuracy
    card = run.card(best=True)
    assert (card.round, card.blake3, card.best_of) == (best.number, best.model, "loss")
    assert card.measures == dict(best.measures)
    assert [each.model_blake3 for each in card.rounds] == [
        each.model for each in rounds[: best.number]
    ]
    assert {epoch for each in card.clients for epoch in each.data_epochs} == {1}
    assert card.software.coordinator["torch"] == [version("torch")]
    assert card.software.hosts == {card.software.card: 2}
    assert card.privacy.largest_epsilon == 0
    assert federation.folder is not None
    config = federation.folder / "federation-1" / "operator.toml"
    command = ["model", run.id, "--best", "--card", "--json", "-o", "best.safetensors"]
    said = subprocess.run(
        [sys.executable, "-m", "potluck.deploy.cli", *command, "--config", str(config)],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    ).stdout  # fmt: skip
    assert json.loads(said)["best"]["round"] == best.number
    assert json.loads((tmp_path / "best.card.json").read_text()) == card.values()
    assert f"round {best.number} of run `{run.id}`" in (tmp_path / "best.card.md").read_text()
    with safe_open(tmp_path / "best.safetensors", "np") as file:
        metadata = file.metadata()
    assert json.loads(metadata["potluck.measures"]) == dict(best.measures)
    assert metadata["potluck.best_of"] == "loss"


PUBLIC = {**TASK, "public": 60}
ENSEMBLE = {
    "name": "ensemble",
    "members": 6,
    "of": [{"name": "perceptron", "inputs": 64, "hidden": [8], "classes": 10, "dropout": 0.0}],
}
ON_THE_COORDINATOR = {
    "feddf": {"clients_per_round": 3, "strategy": {"name": "feddf", "steps": 4, "check_every": 2}},
    "rhfl-logits": {
        "clients_per_round": 6,
        "selector": "everyone",
        "model": ENSEMBLE,
        "strategy": {"name": "rhfl-logits", "clients": 6},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ON_THE_COORDINATOR)
def test_early_stopping_works_with_training_on_the_coordinator(
    federation: Federation, tmp_path: Path, strategy: str
) -> None:
    settings: dict[str, Any] = ON_THE_COORDINATOR[strategy]
    rule = {"measure": "loss", "patience": 1, "minimum_delta": 5.0}
    run = federation.run(task=PUBLIC, rounds=9, seed=5, stop=rule, **settings).wait()
    assert (run.state, len(run.history)) == ("finished", 2), run.status.reason
    best = run.best
    assert best is not None
    assert best.loss == min(each.loss for each in run.history if each.loss is not None)
    assert run.evaluate(best=True).accuracy == best.accuracy
    card = run.card(best=True)
    assert (card.round, card.blake3, card.coordinator_trains) == (best.number, best.model, True)
    with safe_open(run.save(tmp_path / "best.safetensors", best=True), "np") as file:
        assert file.metadata()["potluck.blake3"] == best.model


def test_invalid_settings_are_refused_before_a_process_starts() -> None:
    with (
        Federation.local() as federation,
        pytest.raises(ConfigurationError, match="rounds"),
    ):
        federation.run(task="digits", rounds=0)
    with pytest.raises(RunError, match="closed"):
        _ = federation.runs


def test_documented_connect_example_works_with_an_operator_certificate(
    finished: Run, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/start/selection-in-python.md").read_text()
    [block] = [
        text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if ".connect(" in text
    ]
    assert federation.folder is not None
    place = federation.folder / "federation-1"
    monkeypatch.chdir(place / "pki")
    address = tomllib.loads((place / "operator.toml").read_text())["coordinator"]
    names: dict[str, Any] = {"Federation": Federation}
    exec(block.replace("coordinator.example:7443", address), names)  # noqa: S102  # our page
    with names["federation"] as connected:
        assert finished.id in connected.runs.index


def test_connected_federation_uses_an_operator_certificate(
    finished: Run, federation: Federation
) -> None:
    assert federation.folder is not None
    config = federation.folder / "federation-1" / "operator.toml"
    with Federation.connect(config=config) as connected:
        run = seen = connected.find(finished.id)
        assert [each.number for each in run] == [1, 2, 3]
        assert run.profiles.index.tolist() == [f"client-{number}" for number in range(6)]
        assert run.disclosures.empty

        eight = {"name": "digits", "clients": 8}
        lonely = connected.run(
            task=eight, rounds=2, clients_per_round=2, expected_clients=8, start_timeout_seconds=0.2
        )
        with pytest.raises(RunError, match="6 of 8 clients were connected"):
            list(lonely)

        class Mine:
            """A selector class that is not installed on the coordinator."""

        with pytest.raises(ConfigurationError, match="install the class as a package"):
            connected.run(task=TASK, selector=Mine)  # type: ignore[arg-type]  # on purpose
    assert len(seen.rounds) == 3
    with pytest.raises(RunError, match=r"is closed; make this call before `close\(\)`"):
        _ = seen.profiles


NOTEBOOK = """
import sys
from pathlib import Path
from potluck.common.task import ClientData, Examples, Task
from potluck.federation import Federation
from potluck.server.selection import Selection, Selector
import torch
from torch import nn

class Blobs(Task):
    classes = 2
    training = {"learning_rate": 0.1, "epochs": 5, "batch_size": 8}

    def __init__(self, clients: int = 4):
        self.clients = clients

    def model(self):
        return nn.Linear(3, 2)

    def client_data(self, client, data):
        return ClientData(train=self.samples(int(client.rpartition("-")[2])))

    def evaluation_data(self, data):
        return self.samples(99)

    def samples(self, seed):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.arange(40) % 2
        inputs = torch.randn(40, 3, generator=generator) + 3.0 * labels[:, None]
        return Examples(inputs=inputs, labels=labels)

class FromTheEnd(Selector):
    def select(self, state, context):
        rows = context.available[::-1][: context.count]
        return Selection(rows=rows, reasons=["last"] * len(rows))

folder = Path(sys.argv[1])
with Federation.local(hosts=2, folder=folder) as federation:
    run = federation.run(task=Blobs(clients=5), selector=FromTheEnd, rounds=2, clients_per_round=2)
    for committed in run:
        print(committed.number, *committed.cohort, committed.members[0].reason)
    print(run.rounds["accuracy"].iloc[-1] > 0.9, type(run.model()).__name__, flush=True)
    for committed in federation.run(task=Blobs(clients=5), selector=FromTheEnd, rounds=100000):
        print("again", flush=True)
"""


SUMS = """
import os
assert not hasattr(os, "posix_fallocate")
from potluck.federation import Federation
with Federation.local(hosts=5, root=True) as federation:
    run = federation.run(
        task={"name": "digits", "clients": 5},
        rounds=1,
        clients_per_round=5,
        secure_aggregation=True,
    )
    print(run.wait().state)
"""


def test_federation_runs_without_linux_only_functions() -> None:
    """Python on macOS lacks some functions; masked updates and models must work without them."""
    path = os.pathsep.join([str(ROOT / "tests" / "support" / "without_linux"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", SUMS],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert done.stdout == "finished\n", done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_notebook_classes_are_used_as_plugins_and_no_process_is_left(
    tmp_path: Path, number: signal.Signals
) -> None:
    program, folder = tmp_path / "notebook.py", tmp_path / "folder"
    program.write_text(NOTEBOOK)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(program), str(folder)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_SECONDS):
        said = [(await process.stdout.readline()).decode().rstrip() for _ in range(4)]
        process.send_signal(number)
        _, err = await process.communicate()
    first = ["1 client-4 client-3 last", "2 client-4 client-3 last", "True Linear", "again"]
    assert said == first, err.decode()
    assert process.returncode != 0
    assert number is signal.SIGKILL or b"KeyboardInterrupt" in err
    await until_no_process_of(folder)


def test_round_table_is_serializable_to_json(finished: Run) -> None:
    assert json.loads(finished.rounds.to_json())["accuracy"]["1"] == finished.history[0].accuracy


@pytest.mark.slow
def test_documented_python_listings_run(tmp_path: Path) -> None:
    page = (ROOT / "docs/start/selection-in-python.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    first, *others = [block for block in blocks if ".connect(" not in block]
    assert len([line for line in first.splitlines() if line.strip()]) <= 8
    *others, loading, exporting, elsewhere = others
    assert len(others) == 2
    program = "\n".join(
        [
            first,
            "assert type(network).__name__ == 'Sequential'",
            "federation = Federation.local(hosts=2)",
            *(
                f"{block}\nrun.wait()\nassert len(run.rounds) == run.status.rounds"
                for block in others
            ),
            "assert run.selections['reason'].unique().tolist() == ['last']",
            "run.save('model.safetensors')",
            loading,
            "assert type(network).__name__ == 'Sequential'",
            "assert labels.shape == (5,)",
            exporting,
            elsewhere,
            "assert logits.shape == (7, 10)",
            "federation.close()",
        ]
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, timeout=300)
