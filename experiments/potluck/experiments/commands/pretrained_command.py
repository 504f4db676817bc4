"""`potluck pretrained`: weights trained elsewhere, for a run to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from potluck.common.errors import ConfigurationError, StorageError
from potluck.deploy.view.readable import readable_count


def pretrained(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="WEIGHTS",
            help="File (torchvision's .pth, or .safetensors) or folder of shards.",
            show_default=False,
        ),
    ],
    run_file: Annotated[
        Path,
        typer.Option(
            "--run",
            metavar="RUN.toml",
            help="Run file of the run that starts from the weights.",
        ),
    ],
    target: Annotated[
        Path,
        typer.Option(
            "--to",
            metavar="FILE.safetensors",
            help="File to write, in the coordinator's data directory.",
            show_default=False,
        ),
    ],
) -> None:
    """Convert weights of another model for a run's model.

    Tensors must have torchvision's names (MobileNetV2, ResNets) or Potluck's. The last layer is
    re-created if it has other classes. Running means and variances are dropped, since Potluck's
    models use group normalisation. A .pth file is read by torch's restricted reader, which takes
    tensors only. Put the file into the coordinator's data directory and name it in the run file:

        potluck pretrained mobilenet_v2.pth --run run.toml --to data/imagenet.safetensors
        initial_model = "imagenet.safetensors"
    """
    import torch

    from potluck.common.tensors.large_arrays import large_arrays_in
    from potluck.common.tensors.model_arrays import state_arrays
    from potluck.common.tensors.tensor_files import write_tensors
    from potluck.experiments.weights import fitted, read_weights
    from potluck.server.plan.plan import draw_up

    try:
        text = run_file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"can't read {run_file}: {error.strerror}") from None
    plan = draw_up(text, source=str(run_file))
    torch.manual_seed(plan.run_file.seed)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with large_arrays_in(target.parent):
            found = fitted(read_weights(source), state_arrays(plan.task.model()))
        write_tensors(target, found.arrays)
    except OSError as error:
        raise StorageError(f"can't write {target}: {error.strerror}", path=target) from None
    kept = len(found.arrays) - len(found.fresh)
    typer.echo(f"{target}: {readable_count(kept, 'tensor')} of {source}")
    for what, names in (("new", found.fresh), ("dropped", found.dropped)):
        if names:
            shown = ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
            typer.echo(f"{what}: {readable_count(len(names), 'tensor')} ({shown})")
