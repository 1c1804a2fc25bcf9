"""Put the facts of a compiled module together as a plan: what `--plan-only` prints and a run executes."""

from __future__ import annotations

from collections.abc import Iterator

from rollplex.ir.job import Job
from rollplex.ir.module import Module
from rollplex.ir.plan import (
    Infeasible,
    ObjectBytes,
    Plan,
    PlannedObject,
    ProcessKind,
    Resource,
    SolverResult,
    Summary,
    WindowSummary,
)
from rollplex.ir.plan import (
    Residency as Place,
)
from rollplex.ir.planned_rounds import Rounds
from rollplex.ir.sizes import pretty
from rollplex.ir.steps import touched
from rollplex.ir.work import patches
from rollplex.passes.calibrated import calibration_warnings
from rollplex.passes.candidates import Degrees, Grouped
from rollplex.passes.chunk_sizes import Chunks
from rollplex.passes.estimate import Estimate
from rollplex.passes.executable import not_executable
from rollplex.passes.host_pool import HostOffsets
from rollplex.passes.layout import Layout
from rollplex.passes.lower import Programs
from rollplex.passes.node_memory import kept, node_memory
from rollplex.passes.payload import batch_bytes
from rollplex.passes.pinned import crowded_out, host_share
from rollplex.passes.pools import Parts, by_pool, bytes_in, hbm_bytes, host_bytes, pool_summaries
from rollplex.passes.records import graph_records, host_names, loss_plans
from rollplex.passes.residency import Residency
from rollplex.passes.rewriting import fullest_parts
from rollplex.passes.schedule import Phase, Schedule
from rollplex.passes.share_policy import SharePolicy
from rollplex.passes.state import START, HeldSizes, Lifetimes, StateObject
from rollplex.passes.tail import tail, tail_warnings
from rollplex.passes.trajectories import trajectories, turn_warnings

NEEDS: tuple[type, ...] = (
    *(Schedule, Layout, HeldSizes, Lifetimes, Residency, Chunks),
    *(HostOffsets, SharePolicy, Estimate, Programs),
)
"""The facts that a plan is made of."""


def build_plan(module: Module) -> Plan:
    """The plan of a module that went through all passes."""
    summary = summarise(module)
    infeasible = explain(module.job, summary)
    return Plan(
        feasible=infeasible is None,
        schedule=module[Schedule].kind,
        algorithm=f"{module.algorithm.loc.file}:{module.algorithm.name}",
        job=module.job.model_dump(mode="json"),
        graph=graph_records(module),
        losses=loss_plans(module),
        hosts=host_names(module),
        not_executable=not_executable(module),
        summary=summary,
        infeasible=infeasible,
        processes=processes(module.job),
        programs=module[Programs].steps,
    )


def processes(job: Job) -> dict[str, ProcessKind]:
    """The kinds of processes: one controller, a training and a rollout rank for every GPU of their pools."""
    rollout = job.roles[job.policy].rollout
    assert rollout is not None
    trainer = job.trainer(job.policy)
    dp = job.data_parallel(job.policy)
    return {
        "controller": ProcessKind(engine="controller", ranks=1),
        "train": ProcessKind(
            engine=trainer.engine,
            pool=job.pool("train"),
            ranks=job.train_gpus,
            tensor_parallel=trainer.tensor_parallel,
            data_parallel=dp,
            role_data_parallel={r: job.data_parallel(r) for r in job.roles if job.data_parallel(r) != dp},
            role_replicas={r: d.replicas for r in job.roles if (d := job.degrees(r)).replicas != d.dp},
            pipeline_parallel=trainer.pipeline_parallel,
            context_parallel=trainer.context_parallel,
            expert_parallel=trainer.expert_parallel,
            distributed_optimizer=tuple(r for r in job.trained if job.cuts_optimizer(r)),
            fully_sharded=tuple(r for r in job.trained if job.zero(r) == 3),
        ),
        "rollout": ProcessKind(
            engine=rollout.engine,
            pool=job.pool("rollout"),
            ranks=job.rollout_gpus,
            tensor_parallel=rollout.tensor_parallel,
            data_parallel=job.engines,
        ),
    }


# ---- summary


def summarise(module: Module) -> Summary:
    """Objects, windows, peaks and the results of the solved passes."""
    objects = planned_objects(module)
    parts = fullest_parts(module, module[Chunks].summary.optimizer.elements)
    windows = window_summaries(module, objects, parts)
    peak = max(windows, key=lambda w: w.hbm_bytes)
    job, layout, chunks = module.job, module[Layout], module[Chunks]
    return Summary(
        capacity_bytes=job.capacity_bytes,
        host_capacity_bytes=host_share(job),
        peak_hbm_bytes=peak.hbm_bytes,
        peak_window=peak.name,
        peak_host_bytes=max(w.host_bytes for w in windows),
        batch_bytes=batch_bytes(job),
        pools=pool_summaries(job, objects, parts),
        tail=tail(job),
        rounds=rounds(module),
        trajectories=trajectories(module),
        objects=tuple(objects),
        windows=tuple(windows),
        layout=layout.summary,
        host_pool=module[HostOffsets].summary,
        node=node_memory(job, module[HostOffsets].summary),
        chunks=chunks.summary,
        times=module[Estimate].times,
        policy=module[SharePolicy].policy,
        solvers=solvers(module),
        degrees=module[Degrees].chosen,
        runners_up=module[Degrees].others,
        warnings=(*warnings(module), *tight(job, peak), *crowded_out(module, windows)),
    )


def solvers(module: Module) -> tuple[SolverResult, ...]:
    """What every solved pass reached, in their order."""
    facts = (module[Layout], module[Residency], module[Chunks], module[HostOffsets], module[SharePolicy])
    return tuple(result for fact in facts for result in fact.solvers)


def size_of(module: Module, o: StateObject) -> int:
    """Bytes of an object, as chunk-sizes decided where it is a workspace."""
    return module[Chunks].nbytes.get(o.name, o.nbytes)


def planned_objects(module: Module) -> list[PlannedObject]:
    """The state contract as plan lines."""
    names = module[Schedule].names()
    return [_planned(module, o, names) for o in module[Lifetimes].objects]


def _planned(module: Module, o: StateObject, names: tuple[str, ...]) -> PlannedObject:
    places = module[Residency].places[o.name]
    cyclic = o.always or o.produced == START
    # A dropped prefix is made again through a frozen tower: a use that only residency decides on.
    used = {s.window for s in module[Programs].steps["train"] if o.name in touched(s)}
    return PlannedObject(
        name=o.name,
        title=o.title,
        **{"class": o.class_},  # pyright: ignore[reportArgumentType]  (a keyword of Python)
        role=o.role,
        process=o.process,
        readers=o.readers,
        bytes=size_of(module, o),
        slots=o.slots,
        attached=o.attached,
        host_backed=o.host_backed,
        recomputable=o.recomputable,
        start=_start(places[names[0]], places[names[-1]]) if cyclic else "-",
        produced=START if cyclic else o.produced,
        consumed=tuple(w for w in names if w in o.uses or w in used),
        residency={w: places.get(w, "-") for w in names},
        why=o.why,
    )


def _start(first: Place, last: Place) -> Place:
    """Where an object is between two iterations: an iteration's end offloads and its start fetches."""
    return first if first == last else "host"


def window_summaries(module: Module, objects: list[PlannedObject], parts: Parts) -> list[WindowSummary]:
    """What a GPU holds in every window, in the pool that holds most."""
    seconds, pools = module[Estimate].window_s, by_pool(module.job, objects).values()
    return [_window(w.name, w.phase, seconds[w.name], list(pools), parts) for w in module[Schedule].windows]


def _window(name: str, phase: Phase, seconds: float, pools: list[list[PlannedObject]], parts: Parts) -> WindowSummary:
    return WindowSummary(
        name=name,
        phase=phase,
        seconds=round(seconds, 6),
        hbm_bytes=max(hbm_bytes(mine, name, parts) for mine in pools),
        host_bytes=max(host_bytes(mine, name) for mine in pools),
        by_object={o.name: bytes_in(o, name, parts) for mine in pools for o in mine if o.residency[name] == "hbm"},
    )


RESERVE = 0.03
"""Share of a GPU that torch's caching allocator may lose to fragmentation, where no arena holds what is allocated."""


def tight(job: Job, fullest: WindowSummary) -> list[str]:
    """A trainer that allocates as it goes needs more than the sum of what it holds."""
    left = job.capacity_bytes - fullest.hbm_bytes
    if not job.whole_sequences(job.policy) or not 0 <= left < RESERVE * job.capacity_bytes:
        return []
    return [
        f"{pretty(left)} of {pretty(job.capacity_bytes)} are left in {fullest.name}: fragmentation of the trainer's "
        "allocator is not counted"
    ]


def warnings(module: Module) -> list[str]:
    """What a reader should know before trusting the plan."""
    job, found = module.job, []
    times = module[Estimate].times
    if times.interference_s > times.prefix_s > 0:
        found.append("the prefixes are shorter than the decode slowdown they cause: schedule=serial may be faster")
    for o in module[Lifetimes].objects:
        fetches = _fetches(module, o)
        if o.host_backed and fetches:
            found.append(f"{o.title} ({pretty(o.nbytes)}) return to HBM {fetches}x a step")
    if job.spec.vision and job.workload.max_pixels is None and job.workload.frames:
        most = patches(job, job.policy)
        found.append(f"no workload.max_pixels: every prompt token may be visual, {most} patches a prompt")
    if module[HeldSizes].chunk_elements:
        chunks = module[Chunks].summary.optimizer
        found.append(
            f"an ablation holds the update of the full schedule: {chunks.count} chunks, the largest it has room for "
            "(paper section 3.2); state optimizer.chunks to see whether finer ones make up for what is switched off"
        )
    found += [str(module[Grouped])] if Grouped in module else []
    found += _sampled_again(module)
    found += tail_warnings(job)
    found += turn_warnings(module)
    found += calibration_warnings(job)
    found += _streamed(module)
    if job.workload.response_median is None:
        found.append("no workload.response_median: decode is predicted for responses that all fill their budget")
    return found


def _streamed(module: Module) -> Iterator[str]:
    """What training on complete groups keeps beside the KV cache, which otherwise has left by then."""
    if (stream := module[Schedule].stream) is None:
        return
    trained = [o for o in module[Lifetimes].objects if o.class_ == "phase-local" and o.produced == stream.name]
    sizes = {o.title: size_of(module, o) for o in trained}
    held = ", ".join(f"{title} {pretty(nbytes)}" for title, nbytes in sorted(sizes.items(), key=lambda s: -s[1]))
    yield f"streamed: {pretty(sum(sizes.values()))} live beside decode in {stream.name} ({held})"


def rounds(module: Module) -> Rounds | None:
    """The rounds of sampling as the plan tells them."""
    found = module[Schedule].rounds
    return Rounds(most=found.most, keeps=found.keeps) if found else None


def _sampled_again(module: Module) -> Iterator[str]:
    """What dynamic sampling does to the decode windows, and what it does not do to memory."""
    job, estimate = module.job, module[Estimate]
    if (again := job.workload.dynamic_sampling) is None:
        return
    rounds, decode = job.sampled_per_engine, estimate.times.decode_s
    extra = estimate.window_s["P1 sample"]
    yield (
        f"dynamic sampling: at most {again.rounds} rounds, at {again.kept:.0%} of the groups kept "
        f"{' + '.join(map(str, rounds))} prompts an engine; {extra:.3g} of {decode:.3g} s of decode come before the "
        "last round, and no prefix beside them; KV cache and boundaries hold one round: no window needs more memory"
    )
    yield (
        "dynamic sampling: a step whose groups still teach nothing after the last round trains on fewer of them, or "
        "ends the run (run.when_short)"
    )


def _fetches(module: Module, o: StateObject) -> int:
    names = module[Schedule].names()
    places = [module[Residency].place(o.name, w) for w in names]
    return sum(places[i] == "hbm" and places[i - 1] == "host" for i in range(len(names)))


# ---- infeasible


def explain(job: Job, summary: Summary) -> Infeasible | None:
    """The first window over a capacity, and what is live in it by size; None when everything fits."""
    pools = by_pool(job, summary.objects).values()
    for w in summary.windows:
        if w.hbm_bytes > summary.capacity_bytes:
            held = ({o.name: w.by_object[o.name] for o in mine if o.name in w.by_object} for mine in pools)
            live = max(held, key=lambda sizes: sum(sizes.values()))
            return _infeasible(w.name, "hbm", w.hbm_bytes - summary.capacity_bytes, live)
    for w in summary.windows:
        if w.host_bytes > summary.host_capacity_bytes:
            most = max(pools, key=lambda mine: host_bytes(mine, w.name))
            held = [o for o in most if o.host_backed or o.residency[w.name] == "host"]
            return _infeasible(w.name, "host", w.host_bytes - summary.host_capacity_bytes, _sizes(held))
    return _node_full(job, summary)


def _node_full(job: Job, summary: Summary) -> Infeasible | None:
    """Pinned pools, processes and the batch together, in the window in which most is at the host."""
    over = summary.node.total_bytes - summary.node.capacity_bytes
    if over <= 0:
        return None
    fullest = max(summary.windows, key=lambda w: w.host_bytes).name
    return _infeasible(fullest, "node", over, kept(job, summary.node, summary.objects, fullest))


def _sizes(objects: list[PlannedObject]) -> dict[str, int]:
    return {o.name: o.bytes for o in objects}


def _infeasible(window: str, resource: Resource, shortfall: int, live: dict[str, int]) -> Infeasible:
    by_size = sorted(live.items(), key=lambda item: (-item[1], item[0]))
    objects = tuple(ObjectBytes(name=name, bytes=nbytes) for name, nbytes in by_size)
    return Infeasible(window=window, resource=resource, shortfall_bytes=shortfall, objects=objects, remedies=())
