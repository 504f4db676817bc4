"""The DC selection procedure as described in its paper, and the data that it discloses.

Düsing and Cimiano, "Distribution-Controlled Client Selection to Improve Federated Learning
Strategies", §3: at every step, the label counts of the clients chosen so far are summed securely.
Then every other client reports its distance: how far from the target the sum would be with its own
counts added. Run files and the owners' configurations call the procedure `unsafe-stepwise`;
messages and ledgers call its sums `protocol`.
"""

from __future__ import annotations

from typing import Final

UNSAFE_STEPWISE: Final = "unsafe-stepwise"
"""Name of the procedure in a run file and in an owner's configuration."""

LABEL_DISTANCE: Final = "label-distance"
"""Name of the question with which clients report their distance at every step."""

LEAKS: Final = (
    (
        "each sum is over the cohort before and one client more, so the difference is that "
        "client's exact label counts; every other client is told the sums as well"
    ),
    (
        "sums over clients drawn at random add up over the rounds: after about as many rounds as "
        "there are clients, everybody's exact label counts follow from them"
    ),
    (
        "a distance is an equation about the label counts of the client that tells it, selected or "
        "not: a few more distances than there are classes give them exactly"
    ),
    "distances can't be checked: a client that tells 0 is selected every time",
)
"""Description of what the procedure discloses, for operators who choose it and owners who allow
it."""
