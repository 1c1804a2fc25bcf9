"""Everything that can be refused before a process starts: plan, backend, host functions, data and weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rollplex.backends.cuda.machine import Card, cards
from rollplex.backends.cuda.reach import unreached
from rollplex.backends.memory.available import available_bytes
from rollplex.ir.checker import verify_plan
from rollplex.ir.engines import lacking, runs
from rollplex.ir.errors import Problem, RunError
from rollplex.ir.job import Job
from rollplex.ir.placement import cuda_device, peers, rollout_seat
from rollplex.ir.plan import NodeRecord, Plan, references
from rollplex.ir.planned_hosts import early_hosts
from rollplex.ir.sizes import pretty
from rollplex.ir.steps import Exchange, Rebuild, written_by_peers
from rollplex.runtime.feed import Feed
from rollplex.runtime.hostvalues import OF_EARLY, OF_LATE, returned
from rollplex.runtime.offers import EARLY_OFFERS, OFFERS, parameters_of

HOST_FUNCTION = Callable[..., Any]
DTYPES = {True: ("float32", "float64"), False: ("bfloat16",)}
"""What engines compute in, on a host or not."""


def check_plan(plan: Plan) -> None:
    """Refuse an infeasible plan and one with a feature that no backend here executes; then the checker's verdict."""
    if plan.infeasible is not None:
        window, resource, short = plan.infeasible.window, plan.infeasible.resource, plan.infeasible.shortfall_bytes
        memory = {"hbm": "HBM", "host": "the pinned host pool", "node": "the host memory of a node"}[resource]
        what = f"the plan does not fit: {memory} is {pretty(short)} short in window {window}"
        raise RunError(
            what, where=plan.algorithm, hint="`rollplex compile` lists the cheapest changes that make it fit"
        )
    problems = [*_not_executable(plan), *_not_installed(plan)]
    if problems:
        raise RunError(*problems)
    verify_plan(plan)


def _not_executable(plan: Plan) -> Iterator[Problem]:
    cpu = plan.job["cluster"]["gpu"].lower() == "cpu"
    for kind, process in plan.processes.items():
        if kind != "controller" and not runs(process.engine, cpu):
            yield Problem(
                f"backend {process.engine} is not implemented yet for run ({kind})",
                plan.algorithm,
                "set the roles' engines to host and cluster.gpu to cpu, or inspect the plan with `compile --plan-only`",
            )
        elif (kind, process.engine) == ("train", "host") and process.tensor_parallel != 1:
            what = f"backend host trains whole models, the plan cuts them over {process.tensor_parallel} ranks"
            yield Problem(what, plan.algorithm)
    dtype = plan.job["model"]["dtype"]
    if dtype not in DTYPES[cpu]:
        what = f"backend host computes in {' or '.join(DTYPES[cpu])}, not in {dtype}"
        yield Problem(what, "model.dtype", "set model.dtype=float32")
    for feature in plan.not_executable:
        yield Problem(f"no backend executes this plan: {feature}", plan.algorithm)
    for kind, program in plan.programs.items():
        for step in program:
            if plan.processes[kind].engine == "megatron":
                continue
            if isinstance(step, Rebuild) or (isinstance(step, Exchange) and step.group not in ("dp", "refresh")):
                yield Problem(f"backend host does not execute `{step.kind} {step.object}` ({kind})", plan.algorithm)


def _not_installed(plan: Plan) -> Iterator[Problem]:
    """What the engines of the plan lack here."""
    cpu = plan.job["cluster"]["gpu"].lower() == "cpu"
    for name in sorted({p.engine for kind, p in plan.processes.items() if kind != "controller"}):
        if problem := lacking(name, cpu):
            yield problem


def check_machine(plan: Plan) -> None:
    """Refuse a plan whose device and pool do not fit the memory that this machine has free now."""
    job = Job.model_validate(plan.job)
    pool = plan.summary.host_pool.bytes
    if (short := pool - plan.summary.host_capacity_bytes) > 0:
        what = f"the pinned pool of a GPU reaches over {pretty(pool)}, {pretty(short)} more than its share of the host"
        raise RunError(what, where="host memory", hint="raise cluster.pinned_share or cluster.host_memory_gb")
    gpus, peak = plan.processes["train"].ranks, plan.summary.peak_hbm_bytes
    need, free = gpus * (pool + (peak if job.on_host else 0)), available_bytes()
    if need > free:
        devices = "the device" if gpus == 1 else f"each of {gpus} devices"
        held = f"{pretty(peak)} for {devices}, " if job.on_host else ""
        what = (
            f"the run needs {pretty(need)} of memory ({held}{pretty(pool)} for its pinned pool), "
            f"this machine has {pretty(free)} free"
        )
        raise RunError(what, where="host memory", hint="end other programs, or lower the workload of the job")
    if not job.on_host:
        check_engines(job)
        check_gpus([cuda_device(job, gpu) for gpu in range(gpus)], peak, cards())
        check_reach(plan, job)


def check_engines(job: Job) -> None:
    """Refuse ranks of one vLLM engine that would share a GPU: its groups are NCCL's."""
    rollout = job.roles[job.policy].rollout
    if rollout is None or rollout.engine != "vllm":
        return
    engines: dict[int, list[int]] = {}
    for gpu in range(job.gpus):
        engines.setdefault(rollout_seat(job, gpu).copy, []).append(cuda_device(job, gpu))
    for number, devices in engines.items():
        if len(set(devices)) < len(devices):
            on = ", ".join(map(str, devices))
            what = f"the {len(devices)} ranks of vLLM's engine {number} are on CUDA devices {on}: each needs its own"
            raise RunError(what, where="run.devices", hint="name as many devices, or rollout tensor_parallel: 1")


def check_gpus(devices: Sequence[int], peak_bytes: int, found: Sequence[Card]) -> None:
    """Refuse ranks, each on its CUDA device, that the machine has no GPU for or too little memory."""
    lacking = sorted({d for d in devices if d >= len(found)})
    if lacking:
        what = f"the run uses CUDA device {', '.join(map(str, lacking))}, this machine has {len(found)} GPUs"
        raise RunError(what, where="GPU", hint="set run.devices, CUDA_VISIBLE_DEVICES, or cluster.gpus_per_node")
    for device, ranks in sorted(Counter(devices).items()):
        card, need = found[device], ranks * peak_bytes
        if need > card.free_bytes:
            what = f"the run needs {pretty(need)} on device {device} ({card.name}), {pretty(card.free_bytes)} are free"
            hint = "end the programs that nvidia-smi lists there, or lower cluster.capacity_gib and compile again"
            raise RunError(what, where="GPU", hint=hint)


def check_reach(plan: Plan, job: Job, ask: Callable[[Sequence[int]], Sequence[tuple[int, int]]] = unreached) -> None:
    """Refuse ranks that write into each other's pages on GPUs that do not reach each other's memory."""
    if not written_by_peers(plan.programs["train"]):
        return
    ranks = range(plan.processes["train"].ranks)
    pairs = {(cuda_device(job, rank), cuda_device(job, peer)) for rank in ranks for peer in peers(job, rank)}
    apart = {(first, second) for first, second in pairs if first != second}
    missing = apart.intersection(ask(sorted(set(chain.from_iterable(apart))))) if apart else ()
    if missing:
        told = ", ".join(f"{first} into {second}" for first, second in sorted(missing))
        what = f"{job.q} training ranks have one rollout rank and write new weights into each other's memory, "
        what += f"which GPUs do not reach: CUDA device {told}"
        hint = "set run.devices to GPUs that do (nvidia-smi topo -p2p w), or the same tensor_parallel for both engines"
        raise RunError(what, where="GPU", hint=hint)


def check_hosts(plan: Plan, hosts: Mapping[str, HOST_FUNCTION]) -> None:
    """Every host function of the algorithm is given and takes only what a row offers; all problems at once."""
    problems: list[Problem] = []
    early = early_hosts(plan)
    records = {record.name: record for record in plan.graph}
    for node, name in plan.hosts.items():
        if name not in hosts:
            hint = f"define `{name}` in the run, or pass it with --host {name}=module:function"
            problems.append(Problem(f"no function for `{name}`", plan.algorithm, hint))
            continue
        problems += _unable(plan, records[node])
        parameters_of(hosts[name], name, EARLY_OFFERS if node in early else OFFERS)
    if problems:
        raise RunError(*problems)


def _unable(plan: Plan, record: NodeRecord) -> Iterator[Problem]:
    """What a host function of the algorithm cannot make here."""
    name, returns, early = plan.hosts[record.name], returned(plan, record.name), record.name in early_hosts(plan)
    may = OF_EARLY if early else OF_LATE
    if returns not in may:
        when = "before the rollout" if early else "of responses"
        yield Problem(f"`{name}` returns {returns} {when}", record.loc, f"it may return {', '.join(may)}")
    sampled = {r.name for r in plan.graph if r.op == "rx.generate"}
    if not early and not sampled.intersection(references(record.args)):
        what = f"`{name}` is called without the responses that its arguments are made of"
        yield Problem(what, record.loc, f"rx.host({name})(prompts, rollout)")


def make_feed(plan: Plan, job: Job, hosts: Mapping[str, HOST_FUNCTION]) -> Feed:
    """Read data, tokenizer and weights as far as they can be refused: DataError, JobError."""
    from rollplex.backends.data.encode import PromptMaker
    from rollplex.backends.data.rows import read_rows
    from rollplex.backends.data.video import VisionSpec
    from rollplex.backends.hf.fit import check_fit
    from rollplex.backends.training.placement import check_weights, config_of

    if job.run.data is None:
        raise RunError("the job names no data", where="run.data", hint="name a JSONL file of questions and answers")
    config = config_of(job)
    check_fit(job)
    check_weights(job)
    work = job.workload
    bounds = {} if work.max_pixels is None else {"max_pixels": work.max_pixels}
    defaults = VisionSpec()
    most = bounds.get("max_pixels", defaults.max_pixels)
    spec = VisionSpec.from_config(config, work.frames, min(defaults.min_pixels, most), most)
    maker = PromptMaker(config, tokenizer_of(job), spec)
    return Feed(plan, job, read_rows(job.run.data), maker, hosts)


def tokenizer_of(job: Job) -> Any:
    """The tokenizer beside the weights, else beside the model's config, else one token a byte."""
    from rollplex.backends.data.tokens import byte_tokenizer, load_tokenizer

    for place in (job.run.weights, job.model.name):
        if place is not None and (Path(place) / "tokenizer.json").is_file():
            return load_tokenizer(place)
    return byte_tokenizer()
