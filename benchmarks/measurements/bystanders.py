"""How busy other processes keep the machine during a measurement."""

from __future__ import annotations

import time

import psutil


class Bystanders:
    """How many cores other processes kept busy since this was made: a measurement with many is worth little."""

    def __init__(self) -> None:
        self.began = self._now()

    def cores(self) -> float:
        elapsed, busy, own = (now - then for now, then in zip(self._now(), self.began, strict=True))
        return max(0.0, (busy - own) / max(elapsed, 1e-9))

    @staticmethod
    def _now() -> tuple[float, float, float]:
        system, own = psutil.cpu_times(), psutil.Process().cpu_times()
        return time.perf_counter(), sum(system) - system.idle - getattr(system, "iowait", 0.0), own.user + own.system
