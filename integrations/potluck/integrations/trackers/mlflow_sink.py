"""A sink that records runs in MLflow, on a tracking server or in a file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

from potluck.common.tables.round_columns import SECONDS
from potluck.server.sink import Sink, TrackedRound, TrackedRun

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

_RUN_TAG: Final = "potluck.run"
_MODEL_TAG: Final = "potluck.model"
_MOST_METRICS: Final = 1000
_MOST_PARAMS: Final = 100
_LONGEST_PARAM: Final = 500
_REQUEST_LIMITS: Final = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
"""Limits of MLflow's own retries.

By default MLflow retries for four minutes, during which the sink does not respond. The sink's
caller also retries."""
_STATES: Final = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_FORBIDDEN: Final = re.compile(r"[^\w\-. /:]", re.ASCII)


class Mlflow(Sink):
    """Records each run as one MLflow run: settings as parameters, one step per round.

    A round's metrics are sent in one request, with `seconds` last and the time of the round's
    commit. So a repeated request changes nothing, and the steps of `seconds` show which rounds are
    recorded. A run that was deleted in MLflow is not recorded again.
    """

    library = "mlflow"
    extra = "potluck[mlflow]"

    def __init__(
        self, *, tracking_uri: str = "sqlite:///mlflow.db", experiment: str = "potluck"
    ) -> None:
        """tracking_uri: MLflow's URI of a server or a file.

        experiment: name of the experiment; created if missing.
        """
        self._uri = tracking_uri
        self._experiment = experiment
        self._connected: MlflowClient | None = None
        self._ids: dict[str, str] = {}
        self._ahead: dict[str, set[tuple[str, int]]] = {}

    def open(self, run: TrackedRun) -> int | None:
        """Find the run by its tag, or make it. Return its last recorded round, or 0.

        Returns None for a run that was deleted in MLflow."""
        from mlflow.entities import LifecycleStage, Param, ViewType

        client = self._client()
        experiment = client.get_experiment_by_name(self._experiment)
        where = (
            client.create_experiment(self._experiment)
            if experiment is None
            else experiment.experiment_id
        )
        query = f"tags.`{_RUN_TAG}` = '{run.run_id}'"
        found = client.search_runs([where], query, run_view_type=ViewType.ALL)
        if found and found[0].info.lifecycle_stage == LifecycleStage.DELETED:
            return None
        if found:
            of_mlflow = found[0].info.run_id
            client.update_run(of_mlflow, status="RUNNING")
        else:
            of_mlflow = client.create_run(
                where,
                start_time=_milliseconds(run.created_at),
                tags={_RUN_TAG: run.run_id},
                run_name=run.name,
            ).info.run_id
        self._ids[run.run_id] = of_mlflow
        params = [Param(_key(name), text[:_LONGEST_PARAM]) for name, text in run.settings.items()]
        for begin in range(0, len(params), _MOST_PARAMS):
            client.log_batch(of_mlflow, params=params[begin : begin + _MOST_PARAMS])
        return self._last(run.run_id, list(found[0].data.metrics) if found else [])

    def write(self, run: TrackedRun, rounds: Sequence[TrackedRound]) -> None:
        """Log the rounds' metrics."""
        client, of_mlflow = self._client(), self._ids[run.run_id]
        for metrics in _batches(rounds, self._ahead[run.run_id]):
            client.log_batch(of_mlflow, metrics=metrics)
        client.set_tag(of_mlflow, _MODEL_TAG, rounds[-1].model)

    def end(self, run: TrackedRun) -> None:
        """Record how the run ended, and when."""
        client, of_mlflow = self._client(), self._ids[run.run_id]
        if run.reason:
            client.set_tag(of_mlflow, "mlflow.note.content", run.reason)
        client.set_terminated(of_mlflow, _STATES[run.state], _milliseconds(run.changed_at))

    def _last(self, run_id: str, names: Sequence[str]) -> int:
        """Return the last complete step, or 0.

        Remembers which metrics of later steps are recorded, so that they are not logged again.
        """
        client, of_mlflow = self._client(), self._ids[run_id]
        steps = {
            name: [each.step for each in client.get_metric_history(of_mlflow, name)]
            for name in names
        }
        last = max(steps.get(SECONDS, ()), default=0)
        self._ahead[run_id] = {(name, n) for name, of in steps.items() for n in of if n > last}
        return last

    def _client(self) -> MlflowClient:
        from mlflow.tracking import MlflowClient

        if self._connected is None:
            for name, value in _REQUEST_LIMITS.items():
                os.environ.setdefault(name, value)
            self._connected = MlflowClient(self._uri)
        return self._connected


def _batches(rounds: Sequence[TrackedRound], ahead: set[tuple[str, int]]) -> Iterator[list[Metric]]:
    """Yield the metrics of rounds, one list per request; split a round only if it is too large.

    ahead: names and steps that are already recorded."""
    from mlflow.entities import Metric

    batch: list[Metric] = []
    for each in rounds:
        at = _milliseconds(each.committed_at)
        numbers = {_key(name): value for name, value in each.numbers.items()}
        numbers[SECONDS] = numbers.pop(SECONDS)  # move it to the end
        metrics = [
            Metric(name, value, at, each.number)
            for name, value in numbers.items()
            if (name, each.number) not in ahead
        ]
        if len(batch) + len(metrics) > _MOST_METRICS and batch:
            yield batch
            batch = []
        batch += metrics
        while len(batch) > _MOST_METRICS:
            yield batch[:_MOST_METRICS]
            batch = batch[_MOST_METRICS:]
    if batch:
        yield batch


def _key(name: str) -> str:
    """Return a name with only the characters that MLflow allows."""
    return _FORBIDDEN.sub("_", name)


def _milliseconds(at: datetime) -> int:
    return round(at.timestamp() * 1000)
