"""What a host still has for programs: available_bytes() == 31_204_515_840."""

from __future__ import annotations

from pathlib import Path


def available_bytes() -> int:
    """Memory that programs can still take without swapping: MemAvailable of /proc/meminfo."""
    rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(rows["MemAvailable"].split()[0]) * 1024
