"""What a layout costs in time: decode that reads other orders, copies of a rebuild, rent of HBM.

32B, TP8 -> TP4, 32 x 8 responses of 2048: QKV re-indexed 0.07 s a step, o and down transposed 0.33 s, rebuild 0.9 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rollplex.ir.job import Job
from rollplex.passes.costs import Costs
from rollplex.passes.lengths import Decode
from rollplex.passes.work import decoded_bytes

TRANSPOSED_SLOWDOWN = 0.08
"""Of a row-parallel GEMM at decode sizes that reads [I, O] through .t(): 2, 16 and 8 % on an H200, three shapes."""


@dataclass(frozen=True)
class LayoutCosts:
    """Seconds of one step that a layout adds on one GPU of the job; every one is taken as exposed."""

    job: Job

    @cached_property
    def _costs(self) -> Costs:
        return Costs(self.job)

    @cached_property
    def _decode(self) -> Decode:
        return Decode.of(self.job)

    @cached_property
    def tokens(self) -> float:
        """Tokens of a step that one rollout engine runs through its layers: each prompt once, and all else."""
        job = self.job
        prompt, last = self._costs.prompt_tokens, self._costs.history_tokens(job.workload.turn_count)
        return job.prompts_per_engine * (prompt + job.group * (last - prompt + self._decode.lengths.mean))

    def reindex_s(self, token_bytes: int) -> float:
        """One gather of `token_bytes` a token, over all layers: read once, written once; less where it fuses."""
        return self.tokens * 2 * token_bytes / self._costs.hbm_bytes_per_s

    def transposed_s(self, shard_bytes: int) -> float:
        """Decode steps whose GEMMs read `shard_bytes` of weights in transposed order."""
        steps = self.job.workload.turn_count * self._decode.ends
        return TRANSPOSED_SLOWDOWN * steps * shard_bytes / self._costs.hbm_bytes_per_s

    def rebuild_s(self, nbytes: int) -> float:
        """Copy and permute after an update: read once, written once."""
        return 2 * nbytes / self._costs.hbm_bytes_per_s

    @property
    def rent_s_per_byte(self) -> float:
        """GPU time that a byte held through decode is worth: its share of HBM, of the seconds that decode takes."""
        job = self.job
        weights, turns = decoded_bytes(job), range(1, job.workload.turn_count + 1)
        decode_s = sum(self._costs.decode_s(weights, job.rollout_tp, job.prompts_per_engine, t) for t in turns)
        return decode_s / job.capacity_bytes
