"""`potluck data`: describes a task's partition, prepares a paper's data set."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from potluck.deploy.operator.json_view import to_line
from potluck.deploy.operator.offline_selection import parse_options
from potluck.deploy.terminal import table_console
from potluck.deploy.view.pictures import check_picture

if TYPE_CHECKING:
    from potluck.experiments.reports.partition_description import Description

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Prepare data sets; show how data are split over clients.",
)


@app.callback()
def data() -> None:
    """Prepare data sets; show how data are split over clients."""


TaskName = Annotated[
    str, typer.Argument(metavar="TASK", help="Name of an installed task.", show_default=False)
]
TaskOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        help="An option of the task, for example -o clients=6; repeatable.",
        show_default=False,
    ),
]
Data = Annotated[
    Path | None, typer.Option("--data", metavar="FOLDER", help="Folder of the task's data.")
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="FILE.png", help="Also plot each client's samples by class to this file."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.command()
def describe(
    task: TaskName,
    assignments: TaskOptions = None,
    data_directory: Data = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Describe how a task's data are split over its clients.

    Reads all clients' training samples, so these must be on this machine, as for the tasks that
    come with Potluck. A client's matrix counts samples by class (rows) and attribute; CI, AI
    and SC are its class imbalance, attribute imbalance and spurious correlation. GCI, GAI, GSC are
    those of all samples together, CCI, CAI, CSC the means over clients. If a task's groups are not
    class × 2 + attribute, only the numbers about classes are shown.

        potluck data describe colored-digits
        potluck data describe digits -o alpha=0.1 -o clients=10 --json
        potluck data describe mnist --data data -o partition=labels --plot mnist.png
    """
    from potluck.experiments.reports.partition_description import describe_task

    if plot is not None:
        check_picture(plot)
    description = describe_task(task, parse_options(assignments or []), data_directory)
    if plot is not None:
        from potluck.experiments.reports.partition_plot import plot_partition

        plot_partition(description, plot)
    if as_json:
        values = asdict(description)
        typer.echo(to_line({**values.pop("metrics"), **values}))
    else:
        _print_description(description)


@app.command()
def card(
    task: TaskName,
    assignments: TaskOptions = None,
    data_directory: Data = None,
) -> None:
    """Print a workload's card as Markdown.

    It lists the clients, their sizes and label mixes, the six metrics of `describe`, and the number
    of classes, inputs and parameters. The distance of a label mix is the total variation distance
    to the mix of all samples. The accuracies are those of always answering the most frequent label,
    of all samples or of the client.

        potluck data card heart
        potluck data card shakespeare --data data
    """
    from potluck.experiments.reports.workload_card import card_markdown, workload_card

    options = parse_options(assignments or [])
    typer.echo(card_markdown(workload_card(task, options, data_directory)).rstrip())


def _print_description(description: Description) -> None:
    typer.echo(
        f"{description.task}: {len(description.clients)} clients, "
        f"{sum(client.samples for client in description.clients)} samples, "
        f"{description.classes} classes"
    )
    metrics = asdict(description.metrics)
    typer.echo("  ".join(f"{name.upper()} {_number(value)}" for name, value in metrics.items()))
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    counted = "matrix" if description.clients[0].interaction_matrix else "label counts"
    for name in ("client", "samples", counted, "CI", "AI", "SC"):
        table.add_column(name, justify="left" if name in ("client", counted) else "right")
    for client in description.clients:
        counts = client.interaction_matrix or client.label_counts
        shares = [_number(share) for share in client.triplet]
        table.add_row(client.id, str(client.samples), _compact(counts), *shares)
    table_console().print(table)


@app.command()
def prepare(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Name of the data set: mnist, emnist, femnist, cifar10, cifar100, cinic10, "
            "covtype, covtype-binary, shakespeare, tcga-brca, isic2019, waterbirds or spawrious.",
            show_default=False,
        ),
    ],
    source: Annotated[
        Path,
        typer.Option(
            "--from",
            metavar="FOLDER",
            help="Folder with the official download.",
            show_default=False,
        ),
    ],
    target: Annotated[
        Path, typer.Option("--to", metavar="FOLDER", help="Data directory to write to.")
    ] = Path("data"),
    side: Annotated[
        int, typer.Option(min=8, max=1024, help="Height and width of photographs, in pixels.")
    ] = 224,
) -> None:
    """Convert the official download of a data set for its task.

    The file NAME.npz in the data directory is not compressed, so that all processes of a machine
    can share one mapping of it. The command reads MNIST's and EMNIST's idx files (plain or .gz),
    CIFAR's binary version (never the Python one, which is a pickle), covtype.data, LIBSVM's
    covtype.libsvm.binary, CINIC-10's folders, WaterBirds' metadata.csv and images, Spawrious'
    images by place and breed, LEAF's JSON of FEMNIST, the plays as one text, and FLamby's files of
    Fed-TCGA-BRCA and Fed-ISIC2019. Arrays are checked by their SHA-256 if it is known.

        potluck data prepare mnist --from ~/Downloads/mnist
        potluck data prepare waterbirds --from ~/Downloads/waterbirds --side 64
    """
    from potluck.experiments.data_sets.prepare import prepare as convert

    written = convert(name, source, target, side)
    for key, shape in written.shapes.items():
        typer.echo(f"{key:8} {' × '.join(map(str, shape)):24} sha256 {written.sums[key]}")
    verdict = "as expected" if written.known else "unknown data set, so not compared"
    typer.echo(f"{written.path}: checksums {verdict}")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _compact(counts: Any) -> str:
    if isinstance(counts, list):
        return "[" + " ".join(_compact(entry) for entry in counts) + "]"
    return str(counts)
