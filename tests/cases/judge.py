"""Compile a public case as a user would, and read the verdict and the words off what the product says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rollplex import api
from rollplex.ir.errors import JobError
from rollplex.ir.plan import Plan
from rollplex.show.page import plan_page

from .table import CASES, Case, Observed, Verdict

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent.parent / "examples"
VERDICTS: tuple[Verdict, ...] = ("refused", "infeasible", "warned", "fits")
OBSERVED: tuple[Observed, ...] = ("failed", "worked")


@dataclass(frozen=True)
class Outcome:
    """What the product said of a case: the verdict, all of its words, and the plan if there is one."""

    case: Case
    verdict: Verdict
    text: str
    plan: Plan | None

    @property
    def false_fits(self) -> bool:
        """The worst answer: it fits, where it did not and nothing has changed since."""
        return self.case.observed == "failed" and self.verdict == "fits" and not self.case.ours_now


def judge(case: Case) -> Outcome:
    """Compile the case; a plan that fits counts as warned when it says all that the case asks of it as warnings."""
    job = HERE / f"{case.file}.yaml"
    try:
        plan = api.compile_files(str(EXAMPLES / f"{case.algorithm}.py"), job).plan
    except JobError as error:
        return Outcome(case, "refused", str(error), None)
    text = "\n".join(line.plain for line in plan_page(plan, job.name))
    if not plan.feasible:
        return Outcome(case, "infeasible", text, plan)
    warnings = "\n".join(plan.summary.warnings)
    warned = bool(case.says) and all(words in warnings for words in case.says)
    return Outcome(case, "warned" if warned else "fits", text, plan)


def outcomes(cases: Iterable[Case] = CASES) -> tuple[Outcome, ...]:
    """Every case, in the order of the table."""
    return tuple(judge(case) for case in cases)


def confusion(found: Iterable[Outcome]) -> Iterator[str]:
    """Observed against predicted, one line each, and the count of false fits on the last line."""
    found = tuple(found)
    count = Counter((o.case.observed, o.verdict) for o in found if not o.case.ours_now)
    yield f"{'observed':<12}" + "".join(f"{v:>12}" for v in VERDICTS)
    for seen in OBSERVED:
        yield f"{seen:<12}" + "".join(f"{count[seen, v]:>12}" for v in VERDICTS)
    changed = [o.case for o in found if o.case.ours_now]
    yield from (f"left out: {c.file}, failed there and fits here: {c.ours_now}" for c in changed)
    wrong = sum(o.false_fits for o in found)
    yield f"{len(found)} cases of {len({o.case.row for o in found})} rows, false fits: {wrong}"
