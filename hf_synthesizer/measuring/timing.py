"""Interleaved timing: all candidates in turn, round by round, so that a busy moment slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

MIN_ROUNDS = 3


@dataclass(frozen=True)
class Spread:
    """Median, 20th and 80th percentile, in milliseconds."""

    median: float
    p20: float
    p80: float
    rounds: int

    @classmethod
    def of(cls, seconds: list[float]) -> Spread:
        tenths = statistics.quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else seconds * 9
        return cls(1e3 * statistics.median(seconds), 1e3 * tenths[1], 1e3 * tenths[7], len(seconds))

    def row(self) -> dict[str, str]:
        return {
            "median_ms": f"{self.median:.3f}",
            "p20_ms": f"{self.p20:.3f}",
            "p80_ms": f"{self.p80:.3f}",
            "rounds": str(self.rounds),
        }


def interleaved(
    runs: dict[str, Callable[[], object]],
    rounds: int,
    seconds: float,
    before: Callable[[], object] = lambda: None,
    advance: Callable[[], object] = lambda: None,
    wait: Callable[[], object] = lambda: None,
) -> dict[str, Spread]:
    """Time each of `runs` once a round, after a round of warm-up. Each round starts with another run.

    There are `rounds` rounds, or as many as fit into `seconds`, but not fewer than three. `before` runs untimed before each run,
    and `advance` after each round. `wait` returns when the device is ready, and belongs to the time.
    """
    started = time.perf_counter()
    for run in runs.values():
        before()
        run()
        wait()
    round_time = time.perf_counter() - started
    rounds = max(min(rounds, MIN_ROUNDS), min(rounds, int(seconds / max(round_time, 1e-9)) - 1))
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            before()
            wait()
            start = time.perf_counter()
            runs[name]()
            wait()
            times[name].append(time.perf_counter() - start)
        advance()
    return {name: Spread.of(values) for name, values in times.items()}
