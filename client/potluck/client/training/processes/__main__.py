"""A worker process that was not forked.

Run with the descriptors that it inherits: of the connection, the board, the pipe.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from potluck.client.training.processes.training_worker import serve

if __name__ == "__main__":
    connection, board, life = map(int, sys.argv[1:])
    serve(Connection(connection), board, life)
