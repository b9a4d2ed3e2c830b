"""How much memory this process has, as the system counts it."""

import resource
from pathlib import Path

__all__ = ["reset_peak_memory", "resident_bytes"]


def resident_bytes() -> tuple[int, int]:
    """(now, peak) bytes of this process in memory."""
    status = Path("/proc/self/status")
    if not status.is_file():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak, peak
    found = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    now, peak = (int(found[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, peak


def reset_peak_memory() -> None:
    """Makes the peak of `resident_bytes` begin from now, where the system allows it (Linux, proc(5))."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")
