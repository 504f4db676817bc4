"""FedAvg over all nodes; records when each round is aggregated."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class NotedFedAvg(FedAvg):
    def __init__(self, record, **settings):
        super().__init__(**settings)
        self.record = record

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        answered = int(metrics["answered"]) if metrics else 0
        note(self.record, "committed", answered=answered if arrays is not None else 0)
        return arrays, metrics


def note(record, what, **values):
    with Path(record).open("a") as file:
        file.write(json.dumps({"what": what, "at": time.monotonic(), **values}) + "\n")


def count_answers(contents, _weighted_by):
    return MetricRecord({"answered": len(contents)})


@app.main()
def main(grid, context):
    settings = context.run_config
    record, clients = settings["record"], int(settings["clients"])
    try:
        strategy = NotedFedAvg(
            record,
            fraction_evaluate=0.0,
            min_train_nodes=clients,
            min_available_nodes=clients,
            train_metrics_aggr_fn=count_answers,
        )
        model = np.random.default_rng(0).random(int(settings["parameters"]), dtype=np.float32)
        strategy.start(
            grid=grid, initial_arrays=ArrayRecord([model]), num_rounds=int(settings["rounds"])
        )
    except BaseException as error:
        note(record, "failed", reason=repr(error))
        raise
