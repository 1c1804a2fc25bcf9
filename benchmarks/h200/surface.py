"""The co-run surface of a calibration beside another: how much longer a decode step is, and how fast prefixes go on.

| batch | TP 2 to 1: alone, ms | 64 SMs            | MPS default       | TP 1 to 1: alone, ms | 64 SMs        | ..
| 4     | 5.10                 | 1.20x, 0.55, 1.38 | 4.10x, 0.90, 1.14 | 4.64                 | 1.17x, 0.51.. | ..

The third figure of a cell is the sum of both rates relative to alone: what sharing gains is what it has over 1.
"""

from __future__ import annotations

from benchmarks.page import table
from rollplex.ir.calibration import Calibration, Surface


def surface(own: Calibration, beside: Calibration) -> list[str]:
    """Rows are the first one's decode batches; prefixes are whole prompts, the longest chunk that each has measured."""
    if own.surface is None or beside.surface is None:
        return ["no surface: `rollplex calibrate` ended before a batch was complete"]
    both = [(each.shape, each.surface) for each in (own, beside) if each.surface]
    head = ["batch"]
    for shape, found in both:
        counts = found.sms(_chunk(found))
        head += [f"TP {shape.train_tp} to {shape.rollout_tp}: alone, ms", *(_sms(found, count) for count in counts)]
    rows = [
        (str(batch), *(cell for _, found in both for cell in _cells(found, batch))) for batch in own.surface.batches
    ]
    chunks = " and ".join(f"{_chunk(found):,}" for _, found in both)
    told = "a cell: a decode step is so many times longer, prefixes keep so much of their rate, the sum of both rates"
    return [f"Co-run surface, prefix chunks of {chunks} tokens; {told}.", "", *table(head, rows)]


def _chunk(found: Surface) -> int:
    return max(row.chunk_tokens for row in found.prefix)


def _sms(found: Surface, count: int) -> str:
    return "MPS default" if count == found.all_sms else f"{count} SMs"


def _cells(found: Surface, batch: int) -> list[str]:
    """Of a batch that was measured; `-` where it was not."""
    alone = {row.batch: row.seconds for row in found.decode}
    chunk = _chunk(found)
    if batch not in alone:
        return ["-"] * (1 + len(found.sms(chunk)))
    cells = [f"{alone[batch] * 1e3:.2f}"]
    for count in found.sms(chunk):
        slower, rate = found.beside(batch, chunk, count)
        cells.append(f"{slower:.2f}x, {rate:.2f}, {1 / slower + rate:.2f}")
    return cells
