"""Runs and errors as a notebook shows them."""

import traceback

import pytest

from potluck.common.errors import ConfigurationError
from potluck.common.records.round_message import round_of as record_of
from potluck.deploy.operator.run_view import RunView
from potluck.federation.rounds import round_of
from potluck.federation.run_html import run_html
from potluck.federation.run_settings_text import run_table
from potluck.rpc.v1 import operator_pb2 as rpc


def test_html_of_a_run_shows_committed_rounds_and_the_current_one() -> None:
    status = rpc.RunStatus(
        name="<b>", task="digits", state=rpc.RUN_STATE_RUNNING, rounds=4, committed_rounds=1
    )
    member = rpc.Member(client_id="a&b", state=rpc.MEMBER_STATE_INCLUDED)
    committed = record_of(
        rpc.CommittedRound(round=1, metrics=rpc.Metrics(accuracy=0.5), members=[member])
    )
    progress = rpc.RoundProgress(round=2, phase="train", members=[member])
    view = RunView(status=status, committed={1: committed}, progress=progress)
    html = run_html("3f9a", view, [round_of(committed)])
    assert "<b>&lt;b&gt;</b>" in html
    assert "1 of 4 rounds" in html
    assert "<td>1</td><td>50.0 %</td><td>a&amp;b</td>" in html
    assert "round 2: training" in html
    assert '<progress max="1" value="1.00">' in html
    status.state, status.reason = rpc.RUN_STATE_FAILED, "no quorum"
    over = run_html("3f9a", view, [])
    assert "failed: no quorum" in over
    assert "<progress" not in over
    assert run_html("3f9a", RunView(), []) == "<p>run 3f9a</p>"


def test_notebook_traceback_shows_only_lines_of_the_caller() -> None:
    def mine() -> None:
        run_table("no-such-file.toml", {})

    with pytest.raises(ConfigurationError) as caught:
        mine()
    shown = caught.value._render_traceback_()
    whole = traceback.format_exception(caught.value)
    assert shown[-1].startswith("ConfigurationError: can't read the run file no-such-file.toml")
    assert any("in mine" in line for line in shown)
    assert not any("run_settings_text" in line for line in shown)
    assert any("run_settings_text" in line for line in whole)
