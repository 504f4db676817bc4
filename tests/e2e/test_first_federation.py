"""The commands of docs/start/first-federation.md work word for word."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.repository import ROOT

from potluck.deploy.local.demo_files import reserved_port

PAGE = (ROOT / "docs/start/first-federation.md").read_text(encoding="utf-8")
PORT = "7443"
PATIENCE_SECONDS = 240.0
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def commands(label: str) -> list[str]:
    """Return the shell blocks below each comment with that label, in order."""
    return re.findall(rf"<!-- {label} -->\n```sh\n(.*?)```", PAGE, re.DOTALL)


def typed(folder: Path, text: str) -> str:
    """Run commands to their end, check that they succeed, and return their output."""
    done = subprocess.run(
        ["bash", "-e", "-c", text],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@contextmanager
def in_terminals(folder: Path, texts: list[str]) -> Iterator[None]:
    """Run each command in a terminal of its own; end all of them afterwards."""
    with (folder / "terminals.log").open("wb") as log:
        terminals = [
            subprocess.Popen(
                ["bash", "-e", "-c", text],
                cwd=folder,
                env=ENVIRONMENT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            for text in texts
        ]
        try:
            yield
        finally:
            for terminal in terminals:
                os.killpg(terminal.pid, signal.SIGTERM)
            for terminal in terminals:
                terminal.wait(PATIENCE_SECONDS)


def test_tutorial_commands_train_a_model_with_four_hospitals(tmp_path: Path) -> None:
    hosts = commands("host")
    assert len(hosts) == 4
    clients_and_run, *looking = commands("operator")
    with reserved_port() as port:
        for text in commands("setup"):
            typed(tmp_path, text)
        for file in tmp_path.glob("*.toml"):
            # The page's port may be in use.
            file.write_text(file.read_text().replace(PORT, str(port)))
        with in_terminals(tmp_path, [*commands("coordinator"), *hosts]):
            typed(tmp_path, "until potluck clients; do :; done")
            said = typed(tmp_path, clients_and_run)
            shown = "".join(typed(tmp_path, text) for text in looking)
    assert "(heart) is finished; 20 of 20 rounds committed" in said
    events = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    rounds = [event for event in events if event["event"] == "committed"]
    reasons = {member["reason"] for committed in rounds for member in committed["members"]}
    assert "drawn uniformly" in reasons
    assert any(re.fullmatch(r"entropy [+-]\d\.\d\d bit", reason) for reason in reasons)
    assert (tmp_path / "report.png").stat().st_size > 0
    assert "client-2: ε = 1 of 4 spent" in shown
    assert (tmp_path / "model.safetensors").is_file()
