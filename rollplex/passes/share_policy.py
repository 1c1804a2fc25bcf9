"""How prefix work and decode share the GPU: MPS default, or a fixed share of the SMs (paper section 4.6).

sharing: {kind: mps}                  mps     either side may take what the other leaves idle
sharing: {kind: fixed, share: 0.6}    fixed   60 % of the SMs for prefix work
schedule: serial                      none    phases run one after the other
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rollplex.ir.module import Module
from rollplex.ir.plan import Policy
from rollplex.passes.schedule import Schedule


@dataclass(frozen=True)
class SharePolicy:
    """The policy that the runtime sets before engines start."""

    made_by: ClassVar[str] = "share-policy"
    policy: Policy

    def __str__(self) -> str:
        share = f" {self.policy.share:.0%} of the SMs for prefix work" if self.policy.share else ""
        return f"sharing {self.policy.kind}{share}: {self.policy.why}"


@dataclass(frozen=True)
class SharePolicyPass:
    """Take the job's sharing: MPS default, or the stated share; nothing is shared where nothing overlaps.

    Job keys: `sharing`.
    """

    name: ClassVar[str] = "share-policy"
    needs: ClassVar[tuple[type, ...]] = (Schedule,)
    makes: ClassVar[type] = SharePolicy

    def run(self, module: Module) -> Module:
        """Read the policy off the job and the schedule."""
        sharing = module.job.sharing
        schedule = module[Schedule]
        if schedule.kind == "disaggregated":
            policy = Policy(kind="none", why="rollout and training have GPUs of their own")
        elif not schedule.overlapped:
            policy = Policy(kind="none", why="phases run one after the other")
        elif sharing.kind == "fixed":
            policy = Policy(kind="fixed", share=sharing.share, why="as the job states")
        else:
            policy = Policy(kind="mps", why="either side may take what the other leaves idle (paper section 4.6)")
        return module.put(SharePolicy(policy))
