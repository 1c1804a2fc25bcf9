"""What can be known to be wrong with a job before anything is planned: one small rule each, all of them reported."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, cast

from rollplex.ir.calibration_checks import calibration_rules
from rollplex.ir.decay import decay_rules
from rollplex.ir.engines import Work, can, engine, engine_names, is_so
from rollplex.ir.errors import JobError, PluginError
from rollplex.ir.findings import Finding, KeyPath
from rollplex.ir.group_checks import group_rules
from rollplex.ir.lora_checks import lora_rules
from rollplex.ir.parallel_checks import degrees, parallel_notes
from rollplex.ir.releasing import check_release
from rollplex.ir.serving_checks import kv_rules, serving_notes, serving_rules
from rollplex.ir.streamed_checks import streamed_rules
from rollplex.ir.turn_checks import seen_rules, turn_rules

if TYPE_CHECKING:
    from rollplex.ir.job import Job
    from rollplex.ir.job_schema import ModelChoice, Parallel, RoleModel

WORK: tuple[Work, ...] = ("train", "score", "rollout")


def check_job(job: Job) -> tuple[Finding, ...]:
    """Every finding; a rule is left out only where it reads what an earlier rule found missing."""
    no_model, bad_roles = list(_model(job)), list(_roles(job))
    bad_pools = list(_pools(job)) if not no_model else []
    bad_engines = list(_engines(job))
    findings = [*no_model, *_gpu(job), *_capacity(job), *bad_roles, *bad_engines]
    findings += [*_workload(job), *_tail(job), *_one_way_of_sampling_more(job), *_sharing(job), *_chunks(job)]
    findings += turn_rules(job)
    findings += bad_pools
    if not no_model:
        findings += seen_rules(job)
        findings += [
            *(f for path, section in _sections(job) for f in degrees(job, path, section)),
            *_visual(job),
            *_frozen(job),
        ]
    if not bad_roles and not bad_pools:
        findings += [*_ratio(job), *_batches(job), *_sampled(job), *streamed_rules(job)]
    if not bad_roles and not no_model:
        findings += calibration_rules(job)
        findings += [*serving_rules(job), *((*lora_rules(job), *group_rules(job)) if not bad_engines else ())]
        findings += (*decay_rules(job), *check_release(job)) if not bad_engines else ()
    if not findings:
        findings += kv_rules(job)
    return tuple(findings)


def job_notes(job: Job) -> tuple[str, ...]:
    """What is legal but worth knowing: repeated KV heads, a capacity that no log confirms."""
    notes = [note for path, section in _sections(job) for note in parallel_notes(job, path, section)]
    if job.cluster.rollout_gpus is not None and not job.disaggregated:
        notes.append(f"cluster.rollout_gpus has no effect: {job.schedule} runs every engine on all {job.gpus} GPUs")
    if job.cluster.capacity_gib is None and job.device.logged_usable_gib is None:
        notes.append(f"{job.device.name}: usable memory {job.device.usable_gib:.1f} GiB is {job.device.usable_source}")
    return (*notes, *serving_notes(job))


# ---- names


def _model(job: Job) -> Iterator[Finding]:
    sections: list[tuple[KeyPath, ModelChoice | RoleModel]] = [(("model",), job.model)]
    sections += [(("roles", name, "model"), role.model) for name, role in job.roles.items() if role.model]
    for path, model in sections:
        try:
            assert job.load(model)
        except JobError as error:
            for p in error.problems:
                what = f"{p.where}: {p.what}" if p.where else p.what
                yield Finding((*path, "name"), what, p.hint, ((*path, "config"),))


def _gpu(job: Job) -> Iterator[Finding]:
    try:
        assert job.device
    except JobError as error:
        for p in error.problems:
            yield Finding(("cluster", "gpu"), p.what, p.hint)


def _capacity(job: Job) -> Iterator[Finding]:
    if job.on_host and job.cluster.capacity_gib is None:
        hint = 'cluster.capacity_gib: "256 MiB"'
        what = "a cpu has no memory size of its own; the job must state one"
        yield Finding(("cluster", "gpu"), what, hint, (("cluster", "capacity_gib"),))


# ---- roles and engines


def _sections(job: Job) -> Iterator[tuple[KeyPath, Parallel]]:
    """Every engine section with its key path."""
    for name, role in job.roles.items():
        for kind in WORK:
            if section := getattr(role, kind):
                yield ("roles", name, kind), section


def _roles(job: Job) -> Iterator[Finding]:
    for name, role in job.roles.items():
        here: KeyPath = ("roles", name)
        if not name.isidentifier():
            yield Finding(here, f"`{name}` cannot be the name of an algorithm's parameter")
        if not role.train and not role.score:
            hint = "train for the role that learns, score for a frozen one"
            yield Finding(here, f"role `{name}` has neither `train` nor `score`", hint)
        if role.train and role.score:
            yield Finding((*here, "score"), f"role `{name}` has both `train` and `score`", "train scores as well")
        if role.rollout and role.model:
            what = f"`{name}` is sampled from, so its model is the job's"
            yield Finding((*here, "model"), what, "name it under `model` at the top")
        if role.train and set(role.freeze) == {"vision", "language"} and not role.lora:
            yield Finding((*here, "freeze"), f"every part of `{name}` is frozen, so there is nothing to train")
    policies = [name for name, role in job.roles.items() if role.train and role.rollout]
    if not policies:
        hint = "give the policy (usually `actor`) both sections"
        yield Finding(("roles",), "no role has both `train` and `rollout`", hint)
    for name in policies[1:]:
        what = f"`{policies[0]}` is sampled from already; one policy a job"
        yield Finding(("roles", name, "rollout"), what, uses=(("roles", policies[0]),))


def _engines(job: Job) -> Iterator[Finding]:
    for path, section in _sections(job):
        yield from _engine(job, (*path, "engine"), section)
    if not job.on_host and job.model.dtype != "bfloat16":
        what = f"dtype {job.model.dtype} is for host engines; GPU engines hold weights in bfloat16"
        yield Finding(("model", "dtype"), what, "bfloat16", (("cluster", "gpu"),))


def _engine(job: Job, path: KeyPath, section: Parallel) -> Iterator[Finding]:
    """The engine is installed, does this work, and does it on these machines."""
    name, work = section.engine, cast(Work, path[2])
    try:
        fit = can(engine(name), work)
    except PluginError as error:
        yield from (Finding(path, f"engine {name}: {p.where}: {p.what}", p.hint) for p in error.problems)
        return
    except JobError:
        fit = False
    if not fit:
        yield Finding(path, f"no {work} engine `{name}`", "one of " + ", ".join(engine_names(work)))
    elif job.on_host and not is_so(name, "on_cpu"):
        yield Finding(path, f"engine {name} cannot run on {job.cluster.gpu}", "engine: host", (("cluster", "gpu"),))


# ---- pools

_POOL: KeyPath = ("cluster", "rollout_gpus")
_POOLS: tuple[KeyPath, ...] = (("schedule",), ("cluster", "nodes"), ("cluster", "gpus_per_node"))


def _pools(job: Job) -> Iterator[Finding]:
    """Under `disaggregated` both pools have GPUs, and whole tensor-parallel groups of every engine on them."""
    if not job.disaggregated:
        return
    rollout = job.cluster.rollout_gpus
    if rollout is None:
        hint = f"cluster.rollout_gpus: {max(job.gpus // 2, 1)}"
        yield Finding(("schedule",), "disaggregated needs to know the GPUs of the rollout pool", hint, (_POOL, *_POOLS))
    elif rollout >= job.gpus:
        what = f"{rollout} rollout GPUs leave none of the cluster's {job.gpus} to train on"
        yield Finding(_POOL, what, f"less than {job.gpus}, or schedule: rollplex", _POOLS)
    else:
        for path, section in _sections(job):
            yield from _whole_groups(job, path, section)
    for ablation, why in _ONE_POOL_ONLY.items():
        if ablation in job.ablate:
            yield Finding(("ablate",), f"ablate has {ablation}, but {why}", "schedule: rollplex", (("schedule",),))


_ONE_POOL_ONLY = {
    "weight_sharing": "pools of their own share no weights",
    "rollout_release": "a rollout pool of its own releases nothing",
}


def _whole_groups(job: Job, path: KeyPath, section: Parallel) -> Iterator[Finding]:
    pool, gpus = ("rollout", job.rollout_gpus) if path[2] == "rollout" else ("training", job.train_gpus)
    if gpus % section.tensor_parallel:
        tp = section.tensor_parallel
        what = f"the {gpus} GPUs of the {pool} pool are not whole groups of tensor_parallel {tp}"
        legal = [t for t in job.spec.legal_tp() if gpus % t == 0 and job.cluster.gpus_per_node % t == 0]
        hint = "tensor_parallel " + " or ".join(map(str, legal))
        yield Finding((*path, "tensor_parallel"), what, hint, (_POOL, *_POOLS))


# ---- sharing weights


def _ratio(job: Job) -> Iterator[Finding]:
    if not job.shares_weights:
        return
    train, rollout = job.train_tp, job.rollout_tp
    if train % rollout:
        legal = [t for t in range(1, train + 1) if train % t == 0]
        what = (
            f"q = {train} / {rollout} = {Fraction(train, rollout)}: a rollout shard is made of whole training shards, "
            "so q must be a positive integer"
        )
        path: KeyPath = ("roles", job.policy, "rollout", "tensor_parallel")
        uses = (("roles", job.policy, "train", "tensor_parallel"),)
        yield Finding(path, what, "rollout tensor_parallel " + " or ".join(map(str, legal)), uses)


# ---- the work of a step


def _workload(job: Job) -> Iterator[Finding]:
    work = job.workload
    for kind, median, budget in (
        ("prompt", work.prompt_median, work.prompt_tokens),
        ("response", work.response_median, work.response_tokens),
    ):
        if median is not None and median > budget:
            what = f"{kind}_median {median} exceeds the budget {kind}_tokens {budget}"
            yield Finding(("workload", f"{kind}_median"), what, uses=(("workload", f"{kind}_tokens"),))


def _frozen(job: Job) -> Iterator[Finding]:
    """A model without a tower trains its language model or nothing."""
    for name, role in job.roles.items():
        if role.train and not role.lora and set(role.freeze) == {"language"} and job.spec_of(name).vision is None:
            what = f"every part of `{name}` is frozen: {job.spec_of(name).name} has no vision tower"
            yield Finding(("roles", name, "freeze"), what, "freeze: []", (("model", "name"),))


def _visual(job: Job) -> Iterator[Finding]:
    work, vision = job.workload, job.spec.vision
    if not work.frames:
        return
    for name, role in job.roles.items():
        if role.model and vision and job.spec_of(name).vision is None:
            what = f"{job.spec_of(name).name} has no vision tower, and the prompts have {work.frames} frames"
            yield Finding(("roles", name, "model"), what, "a vision-language model", (("workload", "frames"),))
    if vision is None:
        yield Finding(("workload", "frames"), f"{job.spec.name} has no vision tower", "frames: 0", (("model", "name"),))
    elif work.max_pixels and (tokens := vision.max_visual_tokens(work.frames, work.max_pixels)) >= work.prompt_tokens:
        what = f"{work.frames} frames of {work.max_pixels} pixels take {tokens} of {work.prompt_tokens} prompt tokens"
        uses = (("workload", "frames"), ("workload", "prompt_tokens"), ("model",))
        yield Finding(("workload", "max_pixels"), what, "fewer frames, smaller ones, or a larger prompt_tokens", uses)


_TAIL: KeyPath = ("workload", "rollout")
_TAIL_KEYS = {"full": (), "partial": ("share",), "oversample": ("factor",)}
_TAIL_EXAMPLES = {"share": "share: 0.8", "factor": "factor: 1.25"}


def _tail(job: Job) -> Iterator[Finding]:
    """Each kind of tail cutting has its own key, and no use for the other's."""
    tail = job.workload.rollout
    for key, example in _TAIL_EXAMPLES.items():
        value, wanted = getattr(tail, key), key in _TAIL_KEYS[tail.kind]
        if wanted and value is None:
            yield Finding((*_TAIL, "kind"), f"kind {tail.kind} needs a `{key}`", example, ((*_TAIL, key),))
        if not wanted and value is not None:
            kind = next(k for k, keys in _TAIL_KEYS.items() if key in keys)
            what = f"{key} {value:g} has no effect with kind {tail.kind}"
            yield Finding((*_TAIL, key), what, f"kind: {kind}", ((*_TAIL, "kind"),))


def _one_way_of_sampling_more(job: Job) -> Iterator[Finding]:
    if job.workload.dynamic_sampling and job.workload.rollout.kind != "full":
        what = f"dynamic_sampling waits for whole rounds, {job.workload.rollout.kind} rollout for no round's end"
        yield Finding((*_TAIL, "kind"), what, "kind: full, or no dynamic_sampling", (("workload", "dynamic_sampling"),))


def _ranks(job: Job) -> dict[str, int]:
    """Copies of each role's model, by what messages call them; none where the rules on degrees tell of them."""
    found = {f"{name}'s {job.data_parallel(name)} data-parallel ranks": job.data_parallel(name) for name in job.roles}
    return {who: count for who, count in found.items() if count}


def _engines_of(job: Job) -> dict[str, int]:
    return {f"the {job.engines} rollout engines": job.engines} if job.engines else {}


def _sampled(job: Job) -> Iterator[Finding]:
    """Prompts beyond those of the step are dealt out evenly too, to engines and to the ranks that prefix them."""
    tail, sampled, prompts = job.workload.rollout, job.sampled, job.workload.prompts
    if tail.kind == "full":
        return
    ways = _engines_of(job) | (_ranks(job) if job.overlapped else {})
    step = math.lcm(*ways.values())
    near = max(sampled // step, prompts // step + 1) * step
    key, value = ("share", prompts / near) if tail.kind == "partial" else ("factor", near / prompts)
    for who, count in ways.items():
        if sampled % count:
            what = f"{sampled} sampled prompts do not divide over {who}"
            hint = f"{key}: {value:.6g}, for {near} of them"
            yield Finding((*_TAIL, key), what, hint, (*_SIZES, ("workload", "prompts"), ("schedule",)))


def _batches(job: Job) -> Iterator[Finding]:
    prompts = job.workload.prompts
    ways = (_engines_of(job) if job.sampled == prompts else {}) | _ranks(job)
    step = math.lcm(*ways.values())
    hint = f"a multiple of {step}, such as {max(step, round(prompts / step) * step)}"
    for who, count in ways.items():
        if prompts < count:
            yield Finding(("workload", "prompts"), f"{prompts} prompts leave some of {who} without work", hint, _SIZES)
        elif prompts % count:
            yield Finding(("workload", "prompts"), f"{prompts} prompts do not divide over {who}", hint, _SIZES)


_SIZES: tuple[KeyPath, ...] = (
    ("roles",),
    ("cluster", "nodes"),
    ("cluster", "gpus_per_node"),
    ("cluster", "rollout_gpus"),
)


# ---- sections that contradict themselves


def _sharing(job: Job) -> Iterator[Finding]:
    kind, share = job.sharing.kind, job.sharing.share
    if kind == "fixed" and share is None:
        what = "kind fixed needs a `share` of the SMs, between 0 and 1"
        yield Finding(("sharing", "kind"), what, "share: 0.6", (("sharing", "share"),))
    if kind != "fixed" and share is not None:
        what = f"share {share:g} has no effect with kind {kind}"
        yield Finding(("sharing", "share"), what, "kind: fixed", (("sharing", "kind"),))


def _chunks(job: Job) -> Iterator[Finding]:
    chunks = job.optimizer.chunks
    if "chunked_optimizer" in job.ablate and isinstance(chunks, int) and chunks > 1:
        what = f"ablate switches chunking off, but optimizer.chunks is {chunks}"
        yield Finding(("optimizer", "chunks"), what, "chunks: auto", (("ablate",),))
