"""The coordinator's side of a session: a pure state machine, the unmasking, the session's record.

It imports the messages and the primitives. Input: envelopes, lost clients and closed stages.
Output: a `CoordinatorStep` with the next session and messages. Clients' policies are not checked
here: each client enforces its own policy.
"""

from potluck.secagg.protocol.coordinator.coordinator_side import (
    MOST_ATTEMPTS,
    abort,
    close,
    invite,
    lost,
    receive,
    retry_header,
)

__all__ = ["MOST_ATTEMPTS", "abort", "close", "invite", "lost", "receive", "retry_header"]
