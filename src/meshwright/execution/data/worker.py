"""The program of a process that tokenises: reads units of work from stdin, and writes their `Shard`s to stdout."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.execution.data.shards import make_shard
from meshwright.execution.data.workers import receive, send


def _work() -> None:
    """Run the process: read (encoder, rule, directory), then units of work, until the parent closes stdin.

    The answer to each unit is its `Shard`, or the error.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Send prints of libraries to stderr, not between the answers.
    source = sys.stdin.buffer
    if (job := receive(source)) is None:
        return
    encoder, rule, directory = pickle.loads(job)
    while (message := receive(source)) is not None:
        try:
            answer: Any = make_shard(pickle.loads(message), encoder, rule, directory)
        except MeshwrightError as error:
            answer = MeshwrightError(str(error))
        except MemoryError:
            answer = MeshwrightError("too little memory to tokenise; take fewer processes")
        send(out, pickle.dumps(answer))


if __name__ == "__main__":
    _work()
