"""Wall time for the benchmarks beside this file: machines are shared, so the shortest of several runs counts."""

import time
from collections.abc import Callable


def best_seconds(run: Callable[[], object], *, runs: int) -> float:
    """The shortest of several runs."""
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)
