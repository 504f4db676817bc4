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
        "each sum covers one client more than the sum before, so their difference is this "
        "client's exact label counts; every other client receives the sums too"
    ),
    (
        "the random draws of several rounds can be combined: after about as many rounds as there "
        "are clients, the sums give the exact label counts of all clients"
    ),
    (
        "each distance is an equation about the label counts of the client that reports it, even "
        "if the client is not selected: a few more distances than classes give the exact counts"
    ),
    "distances can't be checked: a client that always reports 0 is always selected",
)
"""Description of what the procedure discloses, for operators who choose it and owners who allow
it."""
