"""How prefix work and decode share the GPU: MPS default, a fixed share of the SMs, or a table solved from a surface.

sharing: {kind: mps}                  mps     either side may take what the other leaves idle (paper section 4.6)
sharing: {kind: fixed, share: 0.6}    fixed   60 % of the SMs for prefix work
sharing: {kind: solved}               solved  by how far decode has come: prefix work waits, or runs on so many SMs
schedule: serial                      none    phases run one after the other

Solved: decode is cut into parts, by how many responses still decode (lengths.py). The co-run surface of the job's
calibration says what each way of running prefixes does in each part; the table under which decode and prefixes end
first is searched for (co_run_search.py). MPS default and every measured share are among the tables, so none of them
is better; where the search was cut short, no change of one row is, and the plan has the bound of all tables. Lengths
are a guess, but none is over the budget: a row also holds from the token on from which a step at its budget has no
more to decode than the row and those behind it were to take. Prefixes keep the schedule's order and places: what runs
when changes, nothing else. They run whole, prompt by prompt, so that of the surface's chunks only those of about a
prompt's length count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rollplex.ir.job import Job
from rollplex.ir.module import Module
from rollplex.ir.plan import SolverResult
from rollplex.ir.planned_sharing import Policy, PolicyRow
from rollplex.passes.co_run import CoRun, under_mps
from rollplex.passes.layout import Layout
from rollplex.passes.schedule import Schedule
from rollplex.passes.timeline import Added, Turn, window_seconds


@dataclass(frozen=True)
class SharePolicy:
    """The policy that the runtime follows; where it was solved, how far."""

    made_by: ClassVar[str] = "share-policy"
    policy: Policy
    solvers: tuple[SolverResult, ...] = ()

    def __str__(self) -> str:
        share = f" {self.policy.share:.0%} of the SMs for prefix work" if self.policy.share else ""
        rows = "".join(
            f"\n  at most {row.live_at_most:>5} decode, or from token {row.from_tokens:>5}: "
            + (f"prefixes of {row.chunk_tokens} tokens on {row.sms} SMs" if row.sms else "prefixes wait")
            for row in self.policy.rows
        )
        return f"sharing {self.policy.kind}{share}: {self.policy.why}{rows}"


@dataclass(frozen=True)
class SharePolicyPass:
    """Take the job's sharing: MPS default, a stated share, or the best table of its calibration's surface (search).

    Job keys: `sharing`, `cluster.calibration`.
    """

    name: ClassVar[str] = "share-policy"
    needs: ClassVar[tuple[type, ...]] = (Schedule, Layout)
    makes: ClassVar[type] = SharePolicy

    def run(self, module: Module) -> Module:
        """Read the policy off the job and the schedule, its table off the timeline."""
        job, schedule = module.job, module[Schedule]
        if schedule.kind == "disaggregated":
            return module.put(SharePolicy(Policy(kind="none", why="rollout and training have GPUs of their own")))
        if not schedule.overlapped:
            return module.put(SharePolicy(Policy(kind="none", why="phases run one after the other")))
        if not schedule.names("prefix", phase="P1"):
            return module.put(SharePolicy(Policy(kind="none", why="no prefix runs beside decode")))
        turn = window_seconds(job, schedule, Added.of(job, module[Layout].summary)).turns[-1]
        found = _solved(job, turn, turn.shared) if turn.shared and job.sharing.kind == "solved" else _stated(job, turn)
        return module.put(found)


_WHY = {
    "mps": "either side may take what the other leaves idle (paper section 4.6)",
    "fixed": "as the job states",
    "solved": "the table of the surface under which decode and prefixes end first",
    "found": "the best table of the surface that was found; no change of one row is better",
}


def _stated(job: Job, turn: Turn) -> SharePolicy:
    rows, surface = _rows(job, turn.shared) if turn.shared else ((), "")
    kind = job.sharing.kind
    return SharePolicy(Policy(kind=kind, share=job.sharing.share, surface=surface, rows=rows, why=_WHY[kind]))


def _solved(job: Job, turn: Turn, shared: CoRun) -> SharePolicy:
    rows, surface = _rows(job, shared)
    mps, reached = under_mps(job, turn.decode_s, turn.prefix_s), _reached(shared)
    policy = Policy(
        kind="solved",
        surface=surface,
        rows=rows,
        mps_s=round(mps.both_s, 6) if mps else None,
        why=_WHY["solved" if reached.status == "optimal" else "found"],
    )
    return SharePolicy(policy, (reached,))


def _reached(shared: CoRun) -> SolverResult:
    """What the search showed, to the microsecond of rows."""
    both, bound = round(shared.both_s, 6), round(shared.both_s - shared.gap_s, 6)
    status = "optimal" if bound == both else "feasible"
    return SolverResult(name="share-policy", status=status, objective="P1 seconds", value=both, bound=bound)


def _rows(job: Job, shared: CoRun) -> tuple[tuple[PolicyRow, ...], str]:
    assert job.cluster.calibration, "what is shared by a surface has a calibration"
    return shared.rows, job.cluster.calibration.digest
