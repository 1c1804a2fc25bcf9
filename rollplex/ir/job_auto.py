"""A job file that says `auto` for parallel degrees stands for several jobs: one for every legal choice.

found = load_jobs("job.yaml", ["roles.actor.train.tensor_parallel=auto"])
found.keys      ("roles.actor.train.tensor_parallel",)
found.degrees   ((4,), (8,))          of found.jobs, in this order

Legal is what the static rules of `job_checks` let pass, so there is no second list of what divides what.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rollplex.ir.errors import JobError, Problem
from rollplex.ir.job import Job
from rollplex.ir.job_checks import check_job
from rollplex.ir.job_engines import DEGREES, Parallel, Rollout, Score, Train
from rollplex.ir.job_file import Draft, checked, read_draft, validate
from rollplex.ir.yamlsource import KeyPath

AUTO = "auto"
SECTIONS: dict[str, type[Parallel]] = {"train": Train, "score": Score, "rollout": Rollout}
MAX_JOBS = 4096


@dataclass(frozen=True)
class JobSet:
    """The jobs of a file; `keys` were `auto`, `degrees` are their values in each job."""

    keys: tuple[str, ...]
    degrees: tuple[tuple[int, ...], ...]
    jobs: tuple[Job, ...]

    def only(self, where: str) -> Job:
        """The job of a set of one: for whoever cannot choose."""
        if self.keys:
            raise JobError(f"{', '.join(self.keys)}: auto leaves {len(self.jobs)} jobs to choose from", where=where)
        return self.jobs[0]


def load_jobs(path: str | Path, overrides: Iterable[str] = ()) -> JobSet:
    """Every legal job of a YAML file under its overrides: one without `auto`; JobError if there is none."""
    draft = read_draft(Path(path), tuple(overrides))
    paths = tuple(auto_keys(draft))
    if not paths:
        return JobSet((), ((),), (checked(draft),))
    domains = _domains(draft, paths)
    refused: list[JobError] = []
    legal: dict[tuple[int, ...], Job] = {}
    for values in itertools.islice(itertools.product(*domains), MAX_JOBS):
        try:
            legal[values] = checked(draft.put(dict(zip(paths, values, strict=True))))
        except JobError as error:
            refused.append(error)
    if not legal:
        raise _none(draft, paths, refused)
    return JobSet(tuple(".".join(map(str, p)) for p in paths), tuple(legal), tuple(legal.values()))


def auto_keys(draft: Draft) -> Iterator[KeyPath]:
    """Degrees that the job leaves to the compiler, in the order of the file."""
    roles = draft.data.get("roles")
    for name, role in roles.items() if isinstance(roles, dict) else ():
        for kind in SECTIONS:
            section = role.get(kind) if isinstance(role, dict) else None
            if isinstance(section, dict):
                yield from (("roles", name, kind, k) for k, v in section.items() if v == AUTO and _is_degree(kind, k))


def _is_degree(kind: str, key: str) -> bool:
    """Whether sections of this kind have the key: another engine's degree is an unknown key, and told as such."""
    return key in DEGREES and key in SECTIONS[kind].model_fields


def _domains(draft: Draft, paths: tuple[KeyPath, ...]) -> list[list[int]]:
    """Values of each key that no rule refuses whatever the other degrees are; JobError for what is wrong beside."""
    ones = draft.put(dict.fromkeys(paths, 1))
    job, wrong = validate(ones.data)
    if job is None or wrong or draft.problems:
        checked(ones)
    assert job is not None
    return [[v for v in _values(job) if not _refused(ones, path, v, paths)] or [1] for path in paths]


def _values(job: Job) -> list[int]:
    """Any count up to a node's GPUs, and what divides the cluster: the rest fails a rule, and would take long."""
    gpus, per_node = job.gpus, job.cluster.gpus_per_node
    return [v for v in range(1, gpus + 1) if v <= per_node or gpus % v == 0]


def _refused(ones: Draft, path: KeyPath, value: int, paths: tuple[KeyPath, ...]) -> bool:
    job, wrong = validate(ones.put({path: value}).data)
    assert job is not None
    assert not wrong
    others = {p for p in paths if p != path}
    return any(f.path == path and others.isdisjoint(f.uses) for f in check_job(job))


def _none(draft: Draft, paths: tuple[KeyPath, ...], refused: list[JobError]) -> JobError:
    """What stands in the way of every choice; else how the choice with the fewest problems fails."""
    common = [p for p in refused[0].problems if all(p in e.problems for e in refused)]
    nearest = min(reversed(refused), key=lambda e: len(e.problems))
    what = f"none of {len(refused)} choices of degrees is legal; the nearest to it fails by what follows"
    return JobError(*(common or (Problem(what, draft.where(paths[0])), *nearest.problems)))
