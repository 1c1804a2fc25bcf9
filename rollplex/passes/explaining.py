"""Why an object is where it is: the residency problem of its plan, solved again with the object held elsewhere.

Formula   its bytes as a sum of products of the job's own numbers (`formulas.py`), where that comes to what the plan has
Sizes     each number of the job is doubled and halved, and the state contract made again: what moves the object's bytes
Places    for window w and place p it is not in: the problem of residency.py with place[o,w] = p added; the differences
          in exposed time, peak and bytes moved are the price. Where p is outside F[o,w], why it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rollplex.ir.errors import RollplexError
from rollplex.ir.explanation import Effect, Explanation, Move, Stay
from rollplex.ir.job_file import change_job
from rollplex.ir.module import Module
from rollplex.ir.plan import Plan, PlannedObject, Residency
from rollplex.ir.steps import MapPart
from rollplex.passes.formulas import formula_of
from rollplex.passes.rebuild import as_planned, rebuild
from rollplex.passes.residency import FAMILIES, Model
from rollplex.passes.residency_data import PLACES, Data, gather
from rollplex.passes.solver import constrain, minimise
from rollplex.passes.state import Lifetimes, StateObject

SECTIONS = ("roles", "workload", "optimizer", "cluster")
FOREIGN = "the compiler makes another state contract of this plan's job: other places are not priced"


def explain_object(plan: Plan, name: str) -> Explanation:
    """Everything about an object that the plan has."""
    planned = plan.object(name)
    module = as_planned(plan, rebuild(plan))
    if name not in module[Lifetimes]:  # a pass of an installed package made it
        return Explanation(planned, (), tuple(_stays(plan, planned, None)), (), FOREIGN)
    state = module[Lifetimes][name]
    effects = tuple(_effects(plan, module, name))
    moves = tuple(_moves(plan, module, planned, state))
    stays, formula = tuple(_stays(plan, planned, state)), formula_of(plan, module.job, name)
    return Explanation(planned, effects, stays, moves, formula=formula)


# ---- sizes


def _effects(plan: Plan, module: Module, name: str) -> Iterator[Effect]:
    """Keys in the order of the job; the first of double and half that the job admits is told."""
    base = _smallest(rebuild(plan), name)
    for key, value in _numbers({s: plan.job[s] for s in SECTIONS}):
        for other in (value * 2, value // 2 if isinstance(value, int) else value / 2):
            size = _size_with(plan, module, f"{key}={other}", name)
            if size is not None:
                if size != base:
                    yield Effect(key, f"{value:g}", f"{other:g}", size)
                break


def _smallest(module: Module, name: str) -> int:
    return module[Lifetimes][name].nbytes


def _size_with(plan: Plan, module: Module, override: str, name: str) -> int | None:
    """Bytes under a changed job; None where it is refused. A change of degrees needs a layout of its own."""
    try:
        job = change_job(module.job, [override])
        other = rebuild(plan, job, None if "parallel" in override or "cluster" in override else module)
    except RollplexError:
        return None  # refused by the job, or by a pass
    return other[Lifetimes][name].nbytes if name in other[Lifetimes] else 0


def _numbers(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, int | float]]:
    """Numbers of a job by key; flags are none."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{path}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool) and value:
            yield f"{path}{key}", value


# ---- places


def _stays(plan: Plan, o: PlannedObject, state: StateObject | None) -> Iterator[Stay]:
    for w in plan.summary.windows:
        yield Stay(w.name, o.residency[w.name], _why(o, state, w.name))


def _why(o: PlannedObject, state: StateObject | None, window: str) -> str:
    """Made, needed, forced, or chosen."""
    place = o.residency[window]
    if place == "-":
        return "does not exist: " + ("released after its last use" if _over(o, window) else "not made yet")
    if window == o.produced:
        return "made here"
    if state is None:
        return ""
    if state.uses.get(window) == "hbm":
        return "used here, all of it"
    if state.always:
        return "stays in HBM all the time"
    if not state.options:
        return "kept between its production and its last use"
    used = "used here piece by piece over the link; " if state.uses.get(window) == "stream" else ""
    return f"{used}chosen by the solver among {', '.join(p for p in PLACES if p in state.options)}"


def _over(o: PlannedObject, window: str) -> bool:
    """Whether a window comes after every window in which the object is somewhere."""
    names = list(o.residency)
    alive = [i for i, w in enumerate(names) if o.residency[w] != "-"]
    return bool(alive) and names.index(window) > alive[-1]


def _moves(plan: Plan, module: Module, o: PlannedObject, state: StateObject) -> Iterator[Move]:
    steps = (step for program in plan.programs.values() for step in program)
    data = gather(module, "release" if any(isinstance(step, MapPart) for step in steps) else "keep")
    item = next(i for i in data.items if i.name == o.name)
    base = _solve(module, data, None)
    places: tuple[Residency, ...] = PLACES
    for window, legal in item.places.items():
        for place in places:
            if place == o.residency[window]:
                continue
            if place not in legal:
                yield Move(window, place, refused=_refused(state, place, window))
            else:
                other = _solve(module, data, (o.name, window, place))
                yield _priced(window, place, base, other)


def _refused(state: StateObject, place: Residency, window: str) -> str:
    if state.uses.get(window) == "hbm":
        return "it is used in this window and must be in HBM, all of it"
    if state.always:
        return "it is held in HBM all the time: " + (state.why or "no mechanism moves it")
    if place == "dropped":
        return "permanent: nothing could make it again" if state.class_ == "permanent" else "no step makes it again"
    if state.class_ == "boundary":
        return "a boundary is not moved between its production and its last use"
    return (
        "the job, or an ablation, allows no other place" if state.options else "a workspace lives as long as its window"
    )


def _solve(module: Module, data: Data, held: tuple[str, str, Residency] | None) -> dict[str, float] | None:
    """Objective values of the residency problem, with one place held; None when nothing satisfies it."""
    model, limits = constrain(Model(data), FAMILIES), module.job.solver
    if held is not None:
        model.cp.add(model.at[held] == 1)
    solution = minimise(model.cp, "explain", model.objectives(), seconds=limits.seconds, seed=limits.seed)
    return {r.objective: r.value for r in solution.results} if solution else None


def _priced(window: str, place: Residency, base: dict[str, float] | None, other: dict[str, float] | None) -> Move:
    assert base is not None
    if other is None:
        return Move(window, place, refused="no plan has it there: it keeps one place for its whole life")
    by = {name: other[name] - base[name] for name in base}
    return Move(
        window,
        place,
        exposed_s=by["seconds lost"],
        peak_bytes=round(by["peak bytes"]),
        moved_bytes=round(by["bytes moved"]),
        over_bytes=round(other["bytes over capacity"]),
    )
