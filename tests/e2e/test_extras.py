"""The wheel with each extra, installed in its own environment, does the work of its role."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.federation import until_listening
from support.repository import ROOT

from potluck.common.settings.extras import not_installed
from potluck.deploy.local.demo_files import reserved_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PATIENCE_SECONDS = 300.0
OF_EXTRAS = ("docker", "jinja2", "matplotlib", "PIL", "pyarrow", "safetensors", "scipy", "sklearn")

EXPERIMENT = """
name = "miniature"
seeds = [0, 1]
hosts = 1
[run]
rounds = 2
clients_per_round = 2
[run.task]
name = "digits"
clients = 4
[quick.run]
rounds = 1
"""
RUN = """
clients_per_round = 2
rounds = 2
expected_clients = 3
[task]
name = "digits"
clients = 3
[selector]
name = "flash"
[training]
validation_share = 0.1
"""
HOST = """
coordinator = "127.0.0.1:{port}"
clients = ["client-0:2"]
state_directory = "state/host-0"
[tls]
certificate = "pki/host-0.pem"
key = "pki/host-0.key"
authority = "pki/authority.pem"
[disclosure]
questions = ["context"]
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run([sys.executable, *build], check=True, capture_output=True)
    [built] = folder.glob("*.whl")
    return built


def required_by(found: Distribution, extra: str, names: set[str]) -> set[str]:
    """Add the names of a distribution's transitive requirements to `names`, and return it."""
    for requirement in map(Requirement, found.requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            new = requirement.name not in names
            names.add(requirement.name)
            for each in requirement.extras or ([""] if new else ()):
                required_by(distribution(requirement.name), each, names)
    return names


def parts(names: set[str]) -> set[str]:
    """Return the names of the distributions' files and folders, next to one another."""
    found = {file.parts[0] for name in names for file in distribution(name).files or ()}
    return found - {".."}


OF_TORCH = parts(required_by(distribution("torch"), "", {"torch"}))


class Machine:
    """An environment with Potluck's wheel and one extra, and no other part of this project.

    What the wheel requires is linked from this environment, so that nothing is downloaded.
    """

    def __init__(self, folder: Path, wheel: Path, extra: str) -> None:
        self.folder = folder
        self.programs = folder / "environment" / "bin"
        venv.create(folder / "environment", symlinks=True)
        [self.modules] = (folder / "environment" / "lib").glob("python*/site-packages")
        pip = [sys.executable, "-m", "pip", "--python", str(self.programs / "python")]
        installed = subprocess.run(
            [*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert installed.returncode == 0, installed.stderr
        [metadata] = self.modules.glob("potluck-*.dist-info")
        required = required_by(Distribution.at(metadata), extra, {"torch"}) - {"potluck"}
        for entry in parts(required) | OF_TORCH:
            (self.modules / entry).symlink_to(Path(sysconfig.get_path("purelib")) / entry)
        self.here = {module for module in OF_EXTRAS if module not in OF_TORCH and self.has(module)}

    def has(self, module: str) -> bool:
        return (self.modules / module).exists()

    def command(self, *arguments: str) -> list[str]:
        """Return the command line of a program, or of python, isolated from this tree and from the
        caller's settings."""
        program, *rest = arguments
        return ["env", "-i", f"HOME={self.folder}", str(self.programs / program), *rest]

    def run(self, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_SECONDS,
        )

    def done(self, folder: Path, *arguments: str) -> str:
        result = self.run(folder, *arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def complaint(self, folder: Path, *arguments: str) -> str:
        """Return the one-line error with which a program fails."""
        result = self.run(folder, *arguments)
        assert result.returncode == 1
        [line] = result.stderr.splitlines()
        return line


@contextmanager
def in_terminals(folder: Path, *commands: Sequence[str]) -> Iterator[None]:
    """Run each command in a process; end all of them afterwards."""
    with (folder / "terminals.log").open("ab") as log:
        running = [
            subprocess.Popen(command, cwd=folder, stdout=log, stderr=log) for command in commands
        ]
        try:
            yield
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait(30)


def test_potluck_without_extras_runs_the_demo(tmp_path: Path, wheel: Path) -> None:
    machine = Machine(tmp_path, wheel, "")
    assert machine.here == set()
    (tmp_path / "miniature.toml").write_text(EXPERIMENT)
    for arguments, library, extra in [
        (("deploy", "config"), "docker", "operator"),
        (("experiment", "miniature.toml", "--quick"), "scipy", "experiments"),
        (("data", "describe", "digits", "--plot", "digits.png"), "matplotlib", "experiments"),
    ]:
        said = machine.complaint(tmp_path, "potluck", *arguments)
        assert said.endswith(not_installed(library, f"potluck[{extra}]"))
    listed = " ".join(machine.done(tmp_path, "potluck", "--help").split())
    assert "experiment Run a grid of settings × seeds" in listed
    assert "deploy Needs the extra 'operator', which is not installed." in listed

    shutil.rmtree(machine.modules / "potluck" / "experiments")
    options = [
        "--clients",
        "6",
        "--hosts",
        "2",
        "--clients-per-round",
        "3",
        "--rounds",
        "2",
        "--seed",
        "7",
    ]
    result = machine.run(tmp_path, "potluck", "demo", *options, "--folder", "demo", "--json")
    assert result.returncode == 0, result.stderr
    [line] = result.stdout.splitlines()
    assert json.loads(line) == json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert (tmp_path / "demo" / "model-uniform.safetensors").stat().st_size > 1_000
    assert "none: matplotlib is not installed;" in result.stderr


def test_coordinator_host_and_operator_extras_together_run_a_federation(
    tmp_path: Path, wheel: Path
) -> None:
    coordinator, host, operator = (
        Machine(tmp_path / extra, wheel, extra) for extra in ("server", "client", "operator")
    )
    assert coordinator.here == {"scipy"}
    assert host.here == set()
    # Matplotlib requires PIL.
    assert operator.here == {"docker", "matplotlib", "PIL", "safetensors"}
    folder = tmp_path / "federation"
    folder.mkdir()
    for pki in (
        ("init", "pki", "--federation", "demo"),
        ("issue", "pki", "coordinator", "--host", "127.0.0.1"),
        ("issue", "pki", "host", "host-0", "--clients", "client-0:2"),
        ("issue", "pki", "operator", "operator"),
    ):
        operator.done(folder, "potluck", "pki", *pki)
    with reserved_port() as port:
        for name, example in (
            ("coordinator", coordinator.done(folder, "potluck-server", "config")),
            ("operator", operator.done(folder, "potluck", "config", "operator")),
            ("host-0", HOST.format(port=port)),
            ("run", RUN),
        ):
            (folder / f"{name}.toml").write_text(example.replace("7443", str(port)))
        assert "--config" in host.done(folder, "potluck-client", "--help")
        with in_terminals(
            folder,
            coordinator.command("potluck-server", "--config", "coordinator.toml"),
            host.command("potluck-client", "--config", "host-0.toml"),
        ):
            asyncio.run(until_listening(port))
            while operator.run(folder, "potluck", "clients").returncode:
                pass
            run_id = operator.done(folder, "potluck", "run", "run.toml").strip()
            said = operator.done(folder, "potluck", "watch", run_id)
            operator.done(folder, "potluck", "report", run_id, "-o", "report.png")
            operator.done(folder, "potluck", "model", "-o", "model.safetensors")
    assert "2 of 2 rounds committed" in said
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    opened = "from safetensors import safe_open; safe_open('model.safetensors', 'np')"
    operator.done(folder, "python", "-c", opened)
    assert "[[machines]]" in operator.done(folder, "potluck", "deploy", "config")


def test_experiments_extra_runs_and_reports_an_experiment(tmp_path: Path, wheel: Path) -> None:
    machine = Machine(tmp_path, wheel, "experiments")
    assert machine.here == set(OF_EXTRAS) - {"docker", "jinja2", "sklearn"}  # torch requires jinja2
    (tmp_path / "miniature.toml").write_text(EXPERIMENT)
    listed = machine.done(
        tmp_path, "potluck", "experiment", "miniature.toml", "--quick", "--dry-run"
    )
    assert "2 cells, 0 finished" in listed
    machine.done(tmp_path, "potluck", "experiment", "miniature.toml", "--quick", "--output", "done")
    assert {"report.html", "report.md", "rounds.parquet", "rounds.csv"} <= {
        path.name for path in (tmp_path / "done").iterdir()
    }
    assert "mnist" in machine.done(tmp_path, "potluck", "preset", "dc")
    said = machine.complaint(tmp_path, "potluck", "experiment", "miniature.toml", "--ray")
    assert said.endswith(not_installed("ray", "potluck[experiments,ray]"))
