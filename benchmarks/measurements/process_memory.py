"""How much memory this process holds, and the most it held (Linux)."""

from __future__ import annotations

from pathlib import Path


def reset_peak_memory() -> None:
    """Forget the highest resident size so far."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_memory() -> tuple[int, int]:
    """Bytes that are resident now, and the most there were since `reset_peak_memory`."""
    facts = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(facts[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]
