"""Which degrees of parallelism an engine can have: rules on tensor, pipeline, context, expert and data parallelism.

job.yaml:11: tensor_parallel 8 does not divide the 28 attention heads (Qwen2.5-VL-7B); by heads alone 1, 2, 4 would do
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rollplex.ir.findings import Finding, KeyPath
from rollplex.ir.job_schema import Train
from rollplex.ir.shards import stage_layers

if TYPE_CHECKING:
    from rollplex.ir.job import Job
    from rollplex.ir.job_schema import Parallel

_STAGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_GPUS: tuple[KeyPath, ...] = (("cluster", "nodes"), ("cluster", "gpus_per_node"), ("cluster", "rollout_gpus"))


def degrees(job: Job, path: KeyPath, section: Parallel) -> Iterator[Finding]:
    """Everything wrong with the degrees of one engine section."""
    yield from _tensor_parallel(job, (*path, "tensor_parallel"), section.tensor_parallel)
    if not isinstance(section, Train):
        return
    yield from _stages(job, path, section)
    yield from _experts(job, path, section)
    yield from _data_parallel(job, path, section)
    yield from _vocabulary(job, path, section)
    yield from _host(job, path, section)
    yield from _megatron_on_cpu(job, path, section)
    yield from _whole_sequences(job, path, section)


def parallel_notes(job: Job, path: KeyPath, section: Parallel) -> Iterator[str]:
    """What is legal but worth knowing."""
    where, tp, per_node = ".".join(map(str, path)), section.tensor_parallel, job.cluster.gpus_per_node
    spec = job.spec_of(str(path[1]))
    if tp > spec.kv_heads:
        yield f"{where}: each of the {spec.kv_heads} KV heads is held {tp // spec.kv_heads} times"
    if tp > per_node:
        yield f"{where}: tensor_parallel {tp} crosses nodes of {per_node} GPUs; predicted times leave its network out"
    if isinstance(section, Train) and section.pipeline_parallel > 1:
        sizes = stage_layers(spec.layers, job.degrees(str(path[1])))
        uneven = f" of {', '.join(map(str, sizes))} layers" if len(set(sizes)) > 1 else ""
        yield (
            f"{where}: sizes are those of the pipeline stage{uneven} that holds most of each object: the first has "
            f"embedding, tower and {section.pipeline_parallel} suffix steps in flight, the last has the head"
        )
    if spec.moe and path[2] == "train":
        yield f"{where}: experts are taken as evenly loaded"


def _tensor_parallel(job: Job, path: KeyPath, tp: int) -> Iterator[Finding]:
    spec, per_node = job.spec_of(str(path[1])), job.cluster.gpus_per_node
    gpus = job.rollout_gpus if path[2] == "rollout" else job.train_gpus
    legal = [t for t in spec.legal_tp() if per_node % t == 0 or (t % per_node == 0 and gpus % t == 0)]
    hint = "tensor_parallel " + " or ".join(map(str, legal))
    for obstacle in spec.tp_obstacles(tp):
        what = f"tensor_parallel {tp} does not divide {obstacle} ({spec.name})"
        if "attention heads" in obstacle:
            what += "; by heads alone " + ", ".join(map(str, spec.tp_by_heads())) + " would do"
        yield Finding(path, what, hint, (("model",),))
    if per_node % tp and tp % per_node:
        what = f"tensor_parallel {tp} must divide the {per_node} GPUs of a node, or take whole nodes"
        yield Finding(path, what, hint, (("cluster", "gpus_per_node"),))
    elif tp > per_node and gpus % tp and not job.disaggregated:
        yield Finding(path, f"tensor_parallel {tp} does not divide the {gpus} GPUs of the cluster", hint, _GPUS)


def _stages(job: Job, path: KeyPath, section: Train) -> Iterator[Finding]:
    spec, pp = job.spec_of(str(path[1])), section.pipeline_parallel
    layers, stated = spec.layers, [key for key in _STAGES if getattr(section, key) is not None]
    if stated:
        yield from _stated_stages(job, path, section, stated)
    elif layers % pp:
        legal = [n for n in range(1, layers + 1) if layers % n == 0 and n <= job.train_gpus]
        what = f"pipeline_parallel {pp} does not divide the {layers} layers ({spec.name})"
        hint = "pipeline_parallel " + " or ".join(map(str, legal))
        if pp <= layers:
            hint += f", or {_STAGES[0]} {_first_stage(layers, pp - 1)}"
        yield Finding((*path, "pipeline_parallel"), what, hint, (("model",),))


def _stated_stages(job: Job, path: KeyPath, section: Train, stated: list[str]) -> Iterator[Finding]:
    """The stages without a number of their own share what is left evenly, and each has a layer at least."""
    spec, pp, key = job.spec_of(str(path[1])), section.pipeline_parallel, (*path, stated[0])
    numbers = {name: getattr(section, name) for name in stated}
    told = " and ".join(f"{name} {n}" for name, n in numbers.items())
    left, stages = spec.layers - sum(numbers.values()), pp - len(stated)
    uses = (*((*path, name) for name in stated[1:]), (*path, "pipeline_parallel"), ("model",))
    if pp == 1:
        yield Finding(key, f"{told}, but there is one stage", "leave it out, or pipeline_parallel 2", uses)
    elif left < stages:
        what = f"{told} of {spec.layers} layers ({spec.name}) leave no layer for each other stage"
        yield Finding(key, what, "fewer", uses)
    elif left and not stages:
        what = f"{told} of {spec.layers} layers ({spec.name}) leave {left} that no stage has"
        yield Finding(key, what, f"{stated[0]} {numbers[stated[0]] + left}", uses)
    elif stages and left % stages:
        others = sum(numbers.values()) - numbers[stated[0]]
        what = f"{told} of {spec.layers} layers ({spec.name}) leave {left}, which {stages} stages do not share evenly"
        yield Finding(key, what, f"{stated[0]} {_first_stage(spec.layers - others, stages)}", uses)


def _first_stage(layers: int, others: int) -> int:
    """Layers for one stage that leave the others an even share: rather fewer, it has embedding or head too."""
    return max(layers - others * -(-layers // (others + 1)), 0) or layers - others * (layers // (others + 1))


def _experts(job: Job, path: KeyPath, section: Train) -> Iterator[Finding]:
    spec, ep, key = job.spec_of(str(path[1])), section.expert_parallel, (*path, "expert_parallel")
    moe = spec.moe
    replicas = job.train_gpus // (section.tensor_parallel * section.pipeline_parallel)
    if ep == 1:
        return
    if moe is None:
        yield Finding(key, f"expert_parallel {ep}, but {spec.name} has no experts", "1", (("model",),))
        return
    hint = f"a divisor of {math.gcd(moe.experts, max(replicas, 1))}"
    if moe.experts % ep:
        yield Finding(key, f"expert_parallel {ep} does not divide the {moe.experts} experts", hint, (("model",),))
    if replicas % ep:
        what = f"expert_parallel {ep} does not divide the {replicas} data x context parallel ranks"
        yield Finding(key, what, hint, ((*path, "tensor_parallel"), (*path, "pipeline_parallel"), *_GPUS))


def _data_parallel(job: Job, path: KeyPath, section: Train) -> Iterator[Finding]:
    stated, copy = section.data_parallel, section.gpus_a_copy
    names = ("tensor_parallel", "pipeline_parallel", "context_parallel")
    product = " x ".join(f"{n} {getattr(section, n)}" for n in names if n == names[0] or getattr(section, n) > 1)
    uses = (*((*path, n) for n in names), *_GPUS)
    if stated is not None and job.train_gpus > 0 and stated * copy != job.train_gpus:
        who = "training pool" if job.disaggregated else "cluster"
        what = f"data_parallel {stated} x {product} is {stated * copy}, but the {who} has {job.train_gpus} GPUs"
        hint = f"data_parallel {job.train_gpus // copy}, or leave it out" if job.train_gpus % copy == 0 else ""
        yield Finding((*path, "data_parallel"), what, hint, uses)
    elif job.train_gpus % copy and copy > section.tensor_parallel:
        key = next(n for n in reversed(names) if getattr(section, n) > 1)
        yield Finding(
            (*path, key), f"{product} is {copy} GPUs a copy, which do not divide the {job.train_gpus}", "", uses
        )


def _vocabulary(job: Job, path: KeyPath, section: Train) -> Iterator[Finding]:
    """Engines that share embedding and head must agree on their rows (Megatron pads to its own multiple)."""
    multiple, spec = section.make_vocab_size_divisible_by, job.spec_of(str(path[1]))
    if multiple is None:
        return
    rows, served = _padded(spec.vocab, multiple * section.tensor_parallel), spec.padded_vocab()
    if rows != served:
        legal = [d for d in (2**n for n in range(11)) if _padded(spec.vocab, d * section.tensor_parallel) == served]
        what = f"make_vocab_size_divisible_by {multiple} pads {spec.vocab} rows to {rows}, vLLM to {served}"
        hint = " or ".join(map(str, [*legal, "leave it out"]))
        yield Finding((*path, "make_vocab_size_divisible_by"), what, hint, ((*path, "tensor_parallel"), ("model",)))


def _padded(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple


def _host(job: Job, path: KeyPath, section: Train) -> Iterator[Finding]:
    """Every rank of the host engine trains a whole model."""
    if section.engine != "host":
        return
    for key in ("pipeline_parallel", *_STAGES, "context_parallel", "expert_parallel"):
        if getattr(section, key) != type(section).model_fields[key].default:
            yield Finding((*path, key), f"engine host has no {key}: it trains whole models", "leave it out")
    role = job.roles[str(path[1])]
    for key, value, hint in (("recompute", "selective", "none or full"), ("attention", "unfused", "flash")):
        if getattr(role, key) == value:
            yield Finding(("roles", path[1], key), f"engine host has no {key} {value}", hint, ((*path, "engine"),))


def _megatron_on_cpu(job: Job, path: KeyPath, section: Train) -> Iterator[Finding]:
    """What the megatron backend does not run yet as CPU processes."""
    if section.engine != "megatron" or not job.on_host:
        return
    for key in ("pipeline_parallel", "context_parallel", "expert_parallel"):
        if getattr(section, key) != type(section).model_fields[key].default:
            yield Finding((*path, key), f"engine megatron has no {key} on cpu", "leave it out", (("cluster", "gpu"),))
    kv_heads = job.spec_of(str(path[1])).kv_heads
    if section.tensor_parallel > kv_heads:
        what = f"engine megatron has no repeated KV heads on cpu: {section.tensor_parallel} ranks, {kv_heads} KV heads"
        yield Finding((*path, "tensor_parallel"), what, f"at most {kv_heads}", (("model",), ("cluster", "gpu")))
    role = job.roles[str(path[1])]
    for key, value, hint in (("recompute", "selective", "none or full"), ("attention", "unfused", "flash")):
        if getattr(role, key) == value:
            what = f"engine megatron has no {key} {value} on cpu"
            yield Finding(("roles", path[1], key), what, hint, ((*path, "engine"),))


FSDP = "fsdp"
_ONLY_WHOLE = ("zero", "microbatch", "offload_parameters", "offload_optimizer")
_NOT_WHOLE = ("tensor_parallel", "pipeline_parallel", *_STAGES, "expert_parallel", "distributed_optimizer")


def _whole_sequences(job: Job, path: KeyPath, section: Train) -> Iterator[Finding]:
    """FSDP's keys are for FSDP; it cuts nothing but states and, by heads, sequences (Ulysses), and overlaps nothing."""
    whole = job.whole_sequences(str(path[1]))
    for key in _NOT_WHOLE if whole else _ONLY_WHOLE:
        if getattr(section, key) != type(section).model_fields[key].default:
            hint = "leave it out" if whole else f"leave it out, or engine: {FSDP}"
            yield Finding((*path, key), f"engine {section.engine} has no {key}", hint, ((*path, "engine"),))
    if not whole:
        return
    others = [name for name, role in job.roles.items() if role.train and not job.whole_sequences(name)]
    if path[2] == "train" and others:
        what = f"engine {section.engine} of `{path[1]}` runs whole sequences, that of `{others[0]}` does not"
        yield Finding((*path, "engine"), what, "one kind of trainer a job", (("roles", others[0]),))
    if job.schedule != "serial":
        what = f"engine {section.engine} runs whole sequences after the rollout: nothing of it can overlap"
        yield Finding((*path, "engine"), what, "schedule: serial", (("schedule",),))
    if job.roles[str(path[1])].recompute == "selective":
        what = f"engine {section.engine} recomputes whole layers or nothing"
        yield Finding(("roles", path[1], "recompute"), what, "full", ((*path, "engine"),))
    yield from _ulysses(job, path, section)


def _ulysses(job: Job, path: KeyPath, section: Train) -> Iterator[Finding]:
    """Sequence parallelism by heads: each rank takes some heads of the whole sequence inside attention."""
    spec, sp = job.spec_of(str(path[1])), section.context_parallel
    if spec.heads % sp or (spec.kv_heads % sp and sp % spec.kv_heads):
        heads = f"{spec.heads} attention and {spec.kv_heads} KV heads"
        legal = [n for n in range(1, spec.heads + 1) if not spec.heads % n]
        legal = [n for n in legal if not spec.kv_heads % n or not n % spec.kv_heads]
        what = f"context_parallel {sp} cannot deal out the {heads} ({spec.name})"
        hint = "context_parallel " + " or ".join(map(str, legal))
        yield Finding((*path, "context_parallel"), what, hint, (("model",), (*path, "engine")))
