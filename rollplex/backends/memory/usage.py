"""From the ledgers' logs to bytes by window: what a run really held, to be set beside what the plan said.

window      |-- P1 prefix --|-- P1 decode --------|-- P2 ..      between marks of one process, the trainer
train0      acquire boundary ............ release boundary
rollout0         acquire kv ..... release kv
counted     boundary, kv     boundary, kv          (an object live at any time in a window counts)
"""

from __future__ import annotations

from collections.abc import Iterable

from rollplex.backends.memory.ledger import Event, Mark

TOTAL = "total"


def bytes_by_window(events: Iterable[Event], marks: Iterable[Mark]) -> dict[str, dict[str, int]]:
    """Peak bytes of each object, and of all together under "total", in each window; logs of one device's processes.

    `marks` are those of the one process whose windows count. A window that comes again (the next iteration) keeps the
    larger figure. Changes before the first mark are known through what the mark saw live.
    """
    windows: dict[str, dict[str, int]] = {}
    live: dict[str, int] = {}
    peaks: dict[str, int] | None = None
    for entry in sorted([*events, *marks], key=lambda entry: entry.seq):
        if isinstance(entry, Mark):
            live = dict(entry.live)
            peaks = windows.setdefault(entry.window, {TOTAL: 0})
        elif entry.kind != "touch":
            change = entry.nbytes if entry.kind == "acquire" else -entry.nbytes
            live[entry.object] = live.get(entry.object, 0) + change
        if peaks is not None:
            _raise_peaks(peaks, live)
    return windows


def fullest_by_window(events: Iterable[Event], marks: Iterable[Mark]) -> dict[str, dict[str, int]]:
    """Bytes of each object at the first moment of each window at which most is live; as `bytes_by_window`.

    Of what comes or goes part by part in a window: what of it is there then, beside all others.
    """
    windows: dict[str, dict[str, int]] = {}
    live: dict[str, int] = {}
    window: str | None = None
    for entry in sorted([*events, *marks], key=lambda entry: entry.seq):
        if isinstance(entry, Mark):
            live, window = dict(entry.live), entry.window
        elif entry.kind != "touch":
            change = entry.nbytes if entry.kind == "acquire" else -entry.nbytes
            live[entry.object] = live.get(entry.object, 0) + change
        if window is not None and sum(live.values()) > sum(windows.get(window, {}).values()):
            windows[window] = {name: nbytes for name, nbytes in live.items() if nbytes}
    return windows


def touched_by_window(events: Iterable[Event], marks: Iterable[Mark]) -> dict[str, dict[str, int]]:
    """The most bytes measured inside each reservation (`Ledger.touch`), by window; as `bytes_by_window`."""
    windows: dict[str, dict[str, int]] = {}
    peaks: dict[str, int] | None = None
    for entry in sorted([*events, *marks], key=lambda entry: entry.seq):
        if isinstance(entry, Mark):
            peaks = windows.setdefault(entry.window, {})
        elif entry.kind == "touch" and peaks is not None:
            peaks[entry.object] = max(peaks.get(entry.object, 0), entry.nbytes)
    return windows


def _raise_peaks(peaks: dict[str, int], live: dict[str, int]) -> None:
    for name, nbytes in live.items():
        if nbytes:
            peaks[name] = max(peaks.get(name, 0), nbytes)
    peaks[TOTAL] = max(peaks[TOTAL], sum(live.values()))
