"""Read a job file and its overrides; everything wrong with them comes back in one JobError, each with its line.

job.yaml:14: unknown key `tensor_paralel`
    try: tensor_parallel
--set schedule=fast: `schedule` is 'fast'; expected one of serial, rollplex, naive
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rollplex.ir.calibration import read_calibration
from rollplex.ir.errors import JobError, Problem
from rollplex.ir.job import Job
from rollplex.ir.job_checks import Finding, check_job
from rollplex.ir.job_keys import explain, locate, nearest
from rollplex.ir.models import read_config, registry_name
from rollplex.ir.yamlsource import KeyPath, YamlSource, parse_value, read_yaml


@dataclass(frozen=True)
class Override:
    """One `a.b=c` of the command line."""

    text: str
    path: tuple[str, ...]
    value: Any


@dataclass(frozen=True)
class Draft:
    """A job before it is checked: its keys and values, what was wrong in reading them, and where each stands.

    `unread` are keys whose files cannot be read: nothing is to be said about the job that rests on them.
    """

    data: dict[str, Any]
    problems: tuple[Problem, ...]
    where: _Locator
    unread: tuple[KeyPath, ...] = ()

    def put(self, values: dict[KeyPath, Any]) -> Draft:
        """The same job with other values of some keys that it has."""
        data = copy.deepcopy(self.data)
        for (*sections, key), value in values.items():
            section: Any = data
            for part in sections:
                section = section[part]
            section[key] = value
        return replace(self, data=data)


def read_draft(path: Path, overrides: tuple[str, ...]) -> Draft:
    """The values of a job file under its overrides."""
    source = read_yaml(path)
    if not isinstance(source.data, dict):
        found = "nothing" if source.data is None else f"a {type(source.data).__name__}"
        raise JobError(f"expected the sections of a job, found {found}", where=source.where(()), hint=_SECTIONS)
    problems = list(source.problems)
    applied, data = [], copy.deepcopy(source.data)
    for text in overrides:
        try:
            applied.append(_apply(data, text))
        except ValueError as error:
            problems.append(Problem(str(error), f"--set {text}"))
    _resolve_paths(data, path.parent)
    where = _Locator(source, tuple(applied))
    unread = list(_embed_calibration(data, path.parent))
    problems += [Problem(p.what, where(key), p.hint) for key, error in unread for p in error.problems]
    return Draft(data, tuple(problems), where, tuple(key for key, _ in unread))


def checked(draft: Draft) -> Job:
    """The job of a draft; JobError with everything that is wrong."""
    data, where, problems = draft.data, draft.where, list(draft.problems)
    job, wrong = validate(data)
    problems += [_problem(error, where) for error in wrong]
    if job is not None:
        suspects = [*(_suspect(error, data) for error in wrong), *draft.unread]
        problems += [f.problem(where(f.path)) for f in check_job(job) if not _doubtful(f, suspects)]
    if problems or job is None:
        raise JobError(*dict.fromkeys(problems))
    return job


def change_job(job: Job, overrides: Iterable[str]) -> Job:
    """The job with `a.b=c` overrides, checked as those of a file are; JobError tells what refuses them."""
    data = job.model_dump(mode="json")
    try:
        for text in overrides:
            _apply(data, text)
    except ValueError as error:
        raise JobError(str(error)) from None
    changed, wrong = validate(data)
    problems = [_problem(error, _nowhere) for error in wrong]
    problems += [] if changed is None else [f.problem(_nowhere(f.path)) for f in check_job(changed)]
    if problems or changed is None:
        raise JobError(*dict.fromkeys(problems))
    return changed


def _nowhere(path: KeyPath) -> str:
    """A job that is no longer a file has keys and no lines."""
    return ".".join(map(str, path))


_SECTIONS = "start with " + ", ".join(k for k, f in Job.model_fields.items() if f.is_required())


class _Locator:
    """Where a key was given its value: the override that set it, else the line of the file."""

    def __init__(self, source: YamlSource, overrides: tuple[Override, ...]) -> None:
        self.source, self.overrides = source, overrides

    def __call__(self, path: KeyPath) -> str:
        for override in reversed(self.overrides):
            made_by_it = override.path[: len(path)] == path and path not in self.source.lines
            if path[: len(override.path)] == override.path or (path and made_by_it):
                return f"--set {override.text}"
        return self.source.where(path)


# ---- overrides


def _apply(data: dict[str, Any], text: str) -> Override:
    """Set the key of one override in place; ValueError says what is wrong with it."""
    key, equals, value_text = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise ValueError("write section.key=value")
    value = parse_value(value_text)
    section = data
    for depth, part in enumerate(path[:-1]):
        if part == "model" and isinstance(section.get(part), str):
            section[part] = {"name": section[part]}
        inner = section.setdefault(part, {})
        if inner is None:
            inner = section[part] = {}
        if not isinstance(inner, dict):
            raise ValueError(f"`{'.'.join(path[: depth + 1])}` holds {inner!r}, not a section")
        section = inner
    section[path[len(path) - 1]] = value
    return Override(text, path, value)


# ---- paths, which are relative to the job file


def _resolve_paths(data: dict[str, Any], base: Path) -> None:
    roles = data.get("roles")
    named = [role for role in (roles.values() if isinstance(roles, dict) else ()) if isinstance(role, dict)]
    run = data.get("run")
    for section, keys in [(run, ("data", "weights")), *((role, ("weights",)) for role in named)]:
        for key in keys if isinstance(section, dict) else ():
            if isinstance(section.get(key), str):
                section[key] = str(_resolve(base, section[key]))
    bound = run.get("hosts") if isinstance(run, dict) else None
    hosts = bound if isinstance(bound, dict) else {}
    for name, address in hosts.items():
        if isinstance(address, str) and (file := address.rpartition(":")[0]).endswith(".py"):
            hosts[name] = f"{_resolve(base, file)}:{address.rpartition(':')[2]}"
    for section in (data, *named):
        _embed_config(section, base)


def _resolve(base: Path, text: str) -> Path:
    return Path(os.path.abspath(base / os.path.expanduser(text)))  # unlike pathlib, never raises


def _embed_config(data: dict[str, Any], base: Path) -> None:
    """For a model given by path, put its absolute path and its config fields into the section that names it."""
    model = data.get("model")
    model = {"name": model} if isinstance(model, str) else model
    if not isinstance(model, dict):
        return
    name = model.get("name")
    if not isinstance(name, str) or registry_name(name):
        return
    path = _resolve(base, name)
    if not name or not os.path.exists(path):
        return
    embedded: dict[str, Any] = {**model, "name": str(path)}
    if embedded.get("config") is None:
        with contextlib.suppress(JobError):  # told by the rule that looks the model up
            embedded["config"] = read_config(path)
    data["model"] = embedded


def _embed_calibration(data: dict[str, Any], base: Path) -> Iterator[tuple[KeyPath, JobError]]:
    """For a calibration given by path, put its content there; nothing where it cannot be read."""
    cluster = data.get("cluster")
    if not isinstance(cluster, dict) or not isinstance(cluster.get("calibration"), str):
        return
    try:
        cluster["calibration"] = read_calibration(_resolve(base, cluster["calibration"])).model_dump(mode="json")
    except JobError as error:
        del cluster["calibration"]
        yield ("cluster", "calibration"), error


# ---- validation


def validate(data: dict[str, Any]) -> tuple[Job | None, list[ErrorDetails]]:
    """The job, and what is wrong in its keys; stand-ins take the place of wrong values, so that the rest is checked."""
    try:
        return Job.model_validate(data), []
    except ValidationError as error:
        wrong = _causes(error.errors(include_url=False))
    except RecursionError:
        raise JobError("nested too deeply") from None
    trimmed = copy.deepcopy(data)
    for problem in wrong:
        _stand_in(trimmed, *locate(Job, problem["loc"]))
    try:
        return Job.model_validate(trimmed), wrong
    except ValidationError:
        return None, wrong


def _causes(wrong: list[ErrorDetails]) -> list[ErrorDetails]:
    """Without lists that are too short for no other reason than that their values are wrong."""
    inner = {error["loc"][:-1] for error in wrong}
    return [error for error in wrong if error["type"] != "too_short" or error["loc"] not in inner]


def _stand_in(data: Any, path: KeyPath, parent: type[BaseModel] | None) -> None:
    """Take a wrong key out; where it cannot be left out, its field's example goes in."""
    *sections, key = path
    for part in sections:
        if not isinstance(data, dict) or part not in data:
            return
        data = data[part]
    if isinstance(data, dict):
        data.pop(key, None)
        field = parent.model_fields.get(str(key)) if parent else None
        if field is not None and field.is_required() and field.examples:
            data[key] = field.examples[0]


def _suspect(error: ErrorDetails, data: dict[str, Any]) -> KeyPath:
    """The key whose value cannot be trusted after an error: the key itself, or the one it was a misspelling of."""
    path, parent = locate(Job, error["loc"])
    if error["type"] == "extra_forbidden" and parent is not None:
        meant = nearest(str(path[-1]), [key for key in parent.model_fields if not _has(data, (*path[:-1], key))])
        return (*path[:-1], meant) if meant else path
    return path


def _has(data: Any, path: KeyPath) -> bool:
    for part in path:
        if not isinstance(data, dict) or part not in data:
            return False
        data = data[part]
    return True


def _doubtful(finding: Finding, suspects: list[KeyPath]) -> bool:
    """Whether a finding rests on a default that stands in for a key the user got wrong."""
    return any(_related(used, suspect) for used in (finding.path, *finding.uses) for suspect in suspects)


def _related(a: KeyPath, b: KeyPath) -> bool:
    shorter = min(len(a), len(b))
    return a[:shorter] == b[:shorter]


def _problem(error: ErrorDetails, where: Callable[[KeyPath], str]) -> Problem:
    path, parent = locate(Job, error["loc"])
    what, hint = explain(error, path, parent)
    return Problem(what, where(path), hint)
