"""What a plan says of a node's host memory: pinned pools, engine processes and a step's batch share it."""

from __future__ import annotations

from pydantic import Field

from rollplex.ir.steps import Flag, Strict, Whole

PROCESSES, BATCH = "node.processes", "node.batch"
NODE_TITLES = {PROCESSES: "engine processes", BATCH: "batch of a step"}
"""What is there beside the pinned pools, as an explanation names it."""


class NodeMemory(Strict):
    """The node whose host memory is fullest. Every rank that trains has its share of the batch, the controller all."""

    gpus: dict[str, Whole] = Field(description="its GPUs by pool")
    controller: Flag = Field(description="whether the controller runs on it: on the first node it does")
    capacity_bytes: Whole = Field(description="host memory of a node")
    pinned_bytes: Whole = Field(description="the pinned pools of its GPUs")
    process_bytes: Whole = Field(description="what its processes keep beside that: libraries, CUDA's and NCCL's own")
    batch_bytes: Whole = Field(description="prompts, pixels and responses: of its training ranks, of the controller")

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.pinned_bytes + self.process_bytes + self.batch_bytes
