"""The notebooks run, each in a kernel of its own; an interrupted kernel leaves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from support.doc_pages import NOTEBOOKS
from support.local_processes import processes_of, until_no_process_of

pytestmark = pytest.mark.slow
PATIENCE_SECONDS = 240

CHECKS = {
    "first-federation": """
assert run.rounds["accuracy"].iloc[-1] > 0.8
assert report.accuracy == run.history[-1].accuracy
assert again.history[-1].model == run.history[-1].model
""",
    "choosing-clients": """
assert set(names) == set(runs) == set(accuracies.columns)
assert labels.shape == (12, 10)
assert len(accuracies) == 8
""",
    "heterogeneity": """
worst_group = means.loc["worst_group_accuracy"]
assert worst_group["feddiverse"] > worst_group["uniform"]
assert spread.rounds[worst].notna().all()
assert kept.rounds[worst].iloc[-1] > spread.rounds[worst].iloc[-1]
""",
    "privacy": """
off = (told - truth).abs().to_numpy()
assert 0 < off.mean() < 8
assert first.disclosures["epsilon"].sum() > 0
""",
    "secure-sums": """
assert set(masked.disclosures.query("round == 1")["clients"]) == {6}
noisy = steered.disclosures.query("epsilon > 0")
assert set(noisy["subject"]) == {"label counts of digits", "label_counts"}
""",
    "your-own-model": """
assert run.rounds["accuracy"].iloc[-1] > 0.8
assert set(walking.selections["reason"]) == {f"step {number}" for number in range(1, 13)}
""",
}
"""Assertions that must hold at the end of each notebook."""
CLOSED = """
from potluck.common.errors import RunError
try:
    federation.find("any").profiles
except RunError as error:
    assert "closed" in str(error)
"""
SAID = {
    "privacy": ["epsilon_budget", "exact_label_counts"],
    "secure-sums": ["hosts"],
    "your-own-model": ["width"],
}
"""Words that the errors shown in each notebook must contain."""


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the files of kernels and federations in a folder of the test."""
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))


def shown(notebook: Any) -> Iterator[Any]:
    for cell in notebook.cells:
        yield from cell.get("outputs", [])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
async def test_each_notebook_runs_without_errors(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    last = next(cell for cell in notebook.cells if "federation.close()" in cell.source)
    check = nbformat.v4.new_code_cell(CHECKS[path.stem])
    notebook.cells.insert(notebook.cells.index(last), check)
    notebook.cells.append(nbformat.v4.new_code_cell(CLOSED))
    place = {"metadata": {"path": str(tmp_path)}}
    await NotebookClient(notebook, timeout=PATIENCE_SECONDS, resources=place).async_execute()
    outputs = list(shown(notebook))
    printed = "".join(each["text"] for each in outputs if each["output_type"] == "stream")
    assert [word for word in SAID.get(path.stem, ()) if word not in printed] == []
    assert "Warning" not in printed
    kinds = {kind for each in outputs for kind in each.get("data", {})}
    assert "text/html" in kinds
    assert path.stem in ("privacy", "secure-sums") or "image/png" in kinds
    await until_no_process_of(tmp_path)


class Kernel:
    """A kernel and the output of its cells."""

    def __init__(self, manager: AsyncKernelManager, client: AsyncKernelClient) -> None:
        self.manager = manager
        self.client = client
        self._cell = ""

    def begin(self, code: str) -> None:
        """Begin to execute a cell."""
        self._cell = self.client.execute(code)

    async def until(self, found: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Return the messages of the cell up to the first of that kind."""
        messages: list[dict[str, Any]] = []
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not messages or not found(messages[-1]):
                    message = await self.client.get_iopub_msg(timeout=PATIENCE_SECONDS)
                    if message["parent_header"].get("msg_id") == self._cell:
                        messages.append(message)
        except TimeoutError:
            pytest.fail(f"the cell says only: {texts(messages)}")
        return messages

    async def run(self, code: str) -> list[dict[str, Any]]:
        """Execute a cell to its end."""
        self.begin(code)
        return await self.until(is_idle)


def is_idle(message: dict[str, Any]) -> bool:
    return bool(message["content"].get("execution_state") == "idle")


def says(text: str) -> Callable[[dict[str, Any]], bool]:
    return lambda message: text in message["content"].get("text", "")


def texts(messages: list[dict[str, Any]]) -> str:
    """Return everything printed, and the tracebacks of errors."""
    contents = [message["content"] for message in messages]
    return "".join(each.get("text", "") + "\n".join(each.get("traceback", [])) for each in contents)


@pytest.fixture
async def kernel(own_places: None) -> AsyncIterator[Kernel]:
    manager = AsyncKernelManager()
    await manager.start_kernel()
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=PATIENCE_SECONDS)
    try:
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)


START = """
from potluck.federation import Federation
federation = Federation.local(hosts=2)
run = federation.run({"name": "digits", "clients": 4}, clients_per_round=2, rounds=100_000)
"""


async def test_interrupted_cell_shows_a_short_error_and_stops_its_run(
    kernel: Kernel, tmp_path: Path
) -> None:
    await kernel.run(START)
    kernel.begin("for committed in run:\n    print('round', committed.number, flush=True)")
    await kernel.until(says("round 2"))
    await kernel.manager.interrupt_kernel()
    assert "KeyboardInterrupt" in texts(await kernel.until(is_idle))
    kernel.begin("run.watch()")
    drawn = await kernel.until(lambda message: message["msg_type"] == "update_display_data")
    assert "round" in drawn[-1]["content"]["data"]["text/html"]
    await kernel.manager.interrupt_kernel()
    await kernel.until(is_idle)
    assert "running" in texts(await kernel.run("print(run.state)"))
    assert "stopped" in texts(await kernel.run("run.stop().wait()\nprint(run.state)"))

    shown = texts(await kernel.run("def mine():\n    federation.run('digits', rounds=0)\nmine()"))
    assert "ConfigurationError: the run's arguments: " in shown
    assert "in mine" in shown
    assert "site-packages" not in shown
    assert "potluck/" not in shown
    assert len(shown.splitlines()) < 10

    before = len(await processes_of(tmp_path))
    await kernel.run("1 / 0")  # else the last error's traceback would keep the federation alive
    again = START + "del committed\nimport gc\ngc.collect()"
    assert "Error" not in texts(await kernel.run(again))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(await processes_of(tmp_path)) > before:  # noqa: ASYNC110  # no signal of these
            await asyncio.sleep(0.05)


async def test_kernel_shutdown_leaves_no_process(kernel: Kernel, tmp_path: Path) -> None:
    await kernel.run(START)
    assert await processes_of(tmp_path)
    await kernel.manager.shutdown_kernel(now=True)
    await until_no_process_of(tmp_path)
