"""Without MLflow's server, the sink soon reports an error and is not treated as hanging."""

from __future__ import annotations

import os
import socket
import time

import pytest
from support.tracked import TRACKED

from potluck.integrations.trackers.mlflow_sink import Mlflow


def test_unreachable_mlflow_server_is_an_error_within_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "to be put back")
        del os.environ[name]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but no process listens
        port = taken.getsockname()[1]
        import mlflow.tracking  # noqa: F401  # takes seconds, which are not measured

        sink = Mlflow(tracking_uri=f"http://127.0.0.1:{port}")
        begun = time.monotonic()
        with pytest.raises(Exception, match="Connection refused"):
            sink.open(TRACKED)
    assert time.monotonic() - begun < 60
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "30"
