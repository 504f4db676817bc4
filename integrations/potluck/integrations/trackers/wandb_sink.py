"""A sink that writes runs for Weights & Biases, offline: `wandb sync` uploads them to a server."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from potluck.common.tensors.digest import digest_of
from potluck.server.sink import Sink, TrackedRound, TrackedRun

_ABOUT: Final = "potluck.json"
"""File in each folder with the run and the first and last round that the folder contains."""


class Wandb(Sink):
    """Writes W&B folders for each run, with one step per round.

    W&B writes a folder in the background and does not report its progress. So rounds are held back
    until the run ends, or until there are `rounds` of them. Then they are written to a folder,
    which gets its name once it is complete.
    """

    alone_in = "folder"
    library = "wandb"
    extra = "potluck[wandb]"

    def __init__(
        self, *, folder: str = ".", project: str = "potluck", entity: str = "", rounds: int = 0
    ) -> None:
        """folder: parent of the folders; made if missing. project, entity: as in W&B. rounds:
        number of rounds per folder; 0 for all until the run ends."""
        self._folder = Path(folder).resolve()
        self._project = project
        self._entity = entity
        self._rounds = rounds
        # Several coordinators may record to this folder, so each works in its own subfolder.
        self._draft = self._folder / f"draft-{digest_of(str(Path.cwd()).encode())[:12]}"
        self._held: dict[str, list[TrackedRound]] = {}

    def open(self, run: TrackedRun) -> int:
        """Return the run's last recorded round, or 0; remove an incomplete folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._draft, ignore_errors=True)
        self._held[run.run_id] = []
        found = [json.loads(path.read_text()) for path in self._folder.glob(f"*/{_ABOUT}")]
        return max((each["last"] for each in found if each["run"] == run.run_id), default=0)

    def write(self, run: TrackedRun, rounds: Sequence[TrackedRound]) -> None:
        """Hold rounds back; write them to a folder once there are `rounds` of them."""
        held = self._held[run.run_id]
        held += rounds
        while self._rounds and len(held) >= self._rounds:
            self._write(run, held[: self._rounds])
            del held[: self._rounds]

    def end(self, run: TrackedRun) -> None:
        """Write the rounds that were held back."""
        held = self._held.pop(run.run_id)
        if held:
            self._write(run, held)

    def close(self) -> None:
        """End W&B's background process.

        Rounds held back are lost here; the sink gets them again later.
        """
        import wandb

        wandb.teardown()

    def _write(self, run: TrackedRun, rounds: Sequence[TrackedRound]) -> None:
        import wandb

        draft = self._draft
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        quiet = wandb.Settings(
            console="off",
            disable_git=True,
            save_code=False,
            silent=True,
            x_disable_stats=True,
            # The folder will be uploaded: exclude facts about the coordinator's machine.
            host="potluck",
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        with wandb.init(
            dir=draft,
            mode="offline",
            project=self._project,
            entity=self._entity or None,
            id=run.run_id,
            name=run.name,
            config=run.settings,
            resume="allow",
            settings=quiet,
        ) as logged:
            written = Path(logged.dir).parent
            for each in rounds:
                logged.log(each.numbers, step=each.number)
        about = {"run": run.run_id, "first": rounds[0].number, "last": rounds[-1].number}
        (written / _ABOUT).write_text(json.dumps(about))
        _sync(written)
        written.rename(self._folder / f"{run.run_id}-{rounds[0].number}-{rounds[-1].number}")
        shutil.rmtree(draft, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Sync all files of a folder to disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
