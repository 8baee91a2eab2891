"""What else a measurement has to know: how busy others keep the machine, and how much memory a process holds."""

from __future__ import annotations

import time
from pathlib import Path

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


def reset_peak_memory() -> None:
    """Forget the highest resident size so far (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_memory() -> tuple[int, int]:
    """Bytes that are resident now, and the most there were since `reset_peak_memory` (Linux)."""
    facts = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(facts[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]
