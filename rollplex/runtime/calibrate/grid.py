"""What a calibration measures for a job, and for how long: the points of every rate and of the co-run surface.

Qwen2.5-VL-3B, 4 prompts of 6000 tokens x 8, 132 SMs
batches 1 4 16 32     chunks 1024 2048 6000     SMs 32 64 80 96 132     60 points of 2 s, and 7 with nothing beside
"""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.ir.calibration import Shape
from rollplex.ir.job import Job

SECONDS = 240.0
STARTING_S = 70.0
"""Processes start, rates are measured, graphs are captured."""
LEAST_S, MOST_S, QUICK_S = 0.5, 2.0, 0.5
SETTLE_S, TURNING_S = 0.2, 0.6
"""Before a point is measured both sides are at work; that, a first forward and the end of the last are its own."""
EIGHTHS, QUICK_EIGHTHS = (2, 4, 5, 6), (4, 5)
"""Partitions, in eighths of the SMs."""
SM_STEP = 8
"""Hopper's partitions are multiples of 8 SMs."""
CHUNKS = (1024, 2048)
GEMM_TOKENS = (128, 512, 2048, 8192)


@dataclass(frozen=True)
class Grid:
    """The points; `chunks` ends with the whole prompt, `sms` with all of the GPU. A point takes `point_s` seconds.

    `sum_tokens` are those whose hidden states are summed over a trainer's ranks: none for one rank.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    sms: tuple[int, ...]
    gemm_tokens: tuple[int, ...]
    attention_tokens: tuple[int, ...]
    sum_tokens: tuple[int, ...]
    gpus: int
    point_s: float

    @classmethod
    def of(cls, job: Job, all_sms: int, seconds: float = SECONDS, quick: bool = False) -> Grid:
        """For a job on a GPU of so many SMs, in about so many seconds; `quick` for a coarse one in a minute."""
        prompt, live = job.workload.typical_prompt, job.prompts_per_engine * job.group
        powers = [4**i for i in range(12) if 4**i < live]
        batches = (*(powers[len(powers) // 2 :][:1] if quick else powers), live)
        chunks = (*(c for c in (() if quick else CHUNKS) if c < 0.8 * prompt), prompt)
        eighths = QUICK_EIGHTHS if quick else EIGHTHS
        parts = sorted({max(SM_STEP, e * all_sms // 8 // SM_STEP * SM_STEP) for e in eighths} - {all_sms})
        sms = (*(n for n in parts if n < all_sms), all_sms)
        points = len(batches) * (1 + len(chunks) * len(sms)) + len(chunks)
        each = QUICK_S if quick else min(MOST_S, max(LEAST_S, (seconds - STARTING_S) / points - TURNING_S))
        longest = prompt + job.workload.response_tokens
        gemm_tokens = tuple(sorted({*GEMM_TOKENS, prompt}))
        return cls(
            batches=batches,
            contexts=tuple(sorted({prompt, longest})),
            chunks=chunks,
            sms=sms,
            gemm_tokens=gemm_tokens,
            attention_tokens=tuple(sorted({max(256, prompt // 4), prompt, longest})),
            sum_tokens=gemm_tokens if job.train_tp > 1 else (),
            gpus=Shape.of(job).gpus,
            point_s=each,
        )

    @property
    def figures(self) -> int:
        """How many figures are measured, for a bar."""
        rates = len(self.gemm_tokens) + len(self.attention_tokens) + len(self.sum_tokens) + 3
        steps = len(self.batches) * len(self.contexts)
        return rates + steps + len(self.chunks) + len(self.batches) * len(self.chunks) * len(self.sms)
