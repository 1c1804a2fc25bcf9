"""What runs one program of a plan: how many processes, and how they cut and repeat the models they hold."""

from __future__ import annotations

from pydantic import Field

from rollplex.ir.steps import Strict, Whole


class ProcessKind(Strict):
    """Processes that run one program: one a rank, placed on GPUs in rank order."""

    engine: str
    pool: str = Field(default="", description="the pool of summary.pools that it runs on; the controller has no GPU")
    ranks: Whole
    tensor_parallel: Whole = 1
    data_parallel: Whole = 1
    pipeline_parallel: Whole = 1
    context_parallel: Whole = 1
    expert_parallel: Whole = 1
    role_data_parallel: dict[str, Whole] = Field(
        default_factory=dict, description="copies of a role's model, where they are not `data_parallel`"
    )
    role_replicas: dict[str, Whole] = Field(
        default_factory=dict, description="ranks with the same weights of a role, where they are not its copies"
    )
    distributed_optimizer: tuple[str, ...] = Field(
        default=(), description="roles of which each replica updates a share of the parameters"
    )

    fully_sharded: tuple[str, ...] = Field(
        default=(), description="roles whose new weights stay cut over the replicas (ZeRO-3)"
    )

    def replicas(self, role: str) -> int:
        """Ranks with the same weights of a role, over which its gradients are reduced."""
        return self.role_replicas.get(role, self.copies(role))

    def copies(self, role: str) -> int:
        """Data-parallel copies of a role's model."""
        return self.role_data_parallel.get(role, self.data_parallel)
