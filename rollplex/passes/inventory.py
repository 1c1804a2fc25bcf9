"""What an iteration holds, object by object: the rows behind the paper's Table 1 and Table 3, sized from the job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rollplex.backends.facts import EngineFacts, Work, load_facts
from rollplex.ir.job import Job
from rollplex.ir.module import Module
from rollplex.ir.plan import Residency
from rollplex.passes.layout import Layout
from rollplex.passes.schedule import Call, Kind, Schedule
from rollplex.passes.state import HeldSizes, SizeChoice, StateObject, Use
from rollplex.passes.work import (
    communicators,
    one_response,
    process_bytes,
    role_work,
    shared_tower,
    trained_parameters,
    trains_vision,
)

ADAM_TEMPORARIES = 2
"""Elements that torch's Adam allocates for each it updates: numerator and denominator of the step."""
MIN_CHUNKS = 64
"""Unless the job states a number, residency reserves an optimizer workspace this fine; chunk-sizes enlarges it."""


def pages(nbytes: int, page_bytes: int) -> int:
    """Bytes rounded up to whole pages."""
    return -(-nbytes // page_bytes) * page_bytes


def state_itemsize(job: Job) -> int:
    """Bytes of one element of gradient, master weight or moment: FP32, or the model's dtype if that is wider."""
    return max(4, job.itemsize)


def chunk_bytes_per_element(job: Job) -> int:
    """Master, two moments and gradient of one parameter in flight."""
    return 4 * state_itemsize(job)


def workspace_bytes_per_element(job: Job, streamed: bool) -> int:
    """What one parameter of a chunk takes in flight: its streamed state, and what torch's Adam allocates."""
    fused = load_facts(job.trainer(job.policy).engine).overlaps_update
    temporaries = 0 if fused and streamed else ADAM_TEMPORARIES * state_itemsize(job)
    return temporaries + (chunk_bytes_per_element(job) if streamed else 0)


def reserved_elements(job: Job, parameters: int, held: int | None = None) -> int:
    """Parameters of the chunk that residency makes room for: an ablation's, or by the number the job states."""
    stated = job.optimizer.chunks
    return held or -(-parameters // (MIN_CHUNKS if stated == "auto" else int(stated)))


def chunks_in_flight(job: Job) -> int:
    """Optimizer chunks whose load, update and return overlap: one where the engine takes them one after the other."""
    return job.optimizer.in_flight if load_facts(job.trainer(job.policy).engine).overlaps_update else 1


@dataclass(frozen=True)
class Inventory:
    """Makes the objects of one job under one schedule."""

    job: Job
    schedule: Schedule
    case3_bytes: int
    held_elements: int | None = None

    @classmethod
    def of(cls, module: Module) -> Inventory:
        """The inventory of a module that knows its schedule and layout."""
        held = module[HeldSizes].chunk_elements
        return cls(module.job, module[Schedule], module[Layout].summary.case3_buffer_bytes, held)

    # ---- switches

    @property
    def naive(self) -> bool:
        """Overlap with nothing released, shared, streamed or recomputed (paper section 2.4.1)."""
        return self.schedule.kind == "naive"

    def off(self, mechanism: str) -> bool:
        """Whether a mechanism of section 3 is switched off."""
        return self.naive or mechanism in self.job.ablate

    @property
    def apart(self) -> bool:
        """Whether rollout has GPUs of its own."""
        return self.schedule.kind == "disaggregated"

    @property
    def shared(self) -> bool:
        """Whether both engines read one copy of the policy's weights."""
        return not (self.apart or self.off("weight_sharing"))

    # ---- all of it

    def objects(self) -> tuple[StateObject, ...]:
        """Every object, in the order they are printed; bytes rounded up to pages."""
        page = self.job.device.page_bytes
        return tuple(replace(o, nbytes=pages(o.nbytes, page)) for o in self._all() if o.nbytes > 0)

    def _all(self) -> Iterator[StateObject]:
        yield from self._contexts()
        yield from self._weights()
        yield from self._rollout()
        for call in self.schedule.calls:
            if call.op == "prefix":
                yield self._boundary(call)
        yield from self._frozen_weights()
        yield from self._activations()
        yield from self._update()

    def choices(self) -> tuple[SizeChoice, ...]:
        """Sizes of the suffix workspaces for every number of responses that divides the group."""
        n, page = self.job.group, self.job.device.page_bytes
        divisors = [m for m in range(1, n + 1) if n % m == 0]
        rows = ((m, {o.name: pages(o.nbytes, page) for o in self._suffix_workspaces(m)}) for m in divisors)
        return tuple(SizeChoice(m, sizes) for m, sizes in rows)

    # ---- helpers

    def _windows(self, *kinds: Kind) -> tuple[str, ...]:
        return self.schedule.names(*kinds)

    def _uses(self, windows: Iterable[str], how: Use = "hbm") -> dict[str, Use]:
        return {w.name: how for w in self.schedule.windows if w.name in set(windows)}

    def _role_windows(self, role: str, *kinds: Kind) -> tuple[str, ...]:
        return tuple(w.name for w in self.schedule.windows if w.role == role and w.kind in kinds)

    def _facts(self, role: str) -> EngineFacts:
        return load_facts(self.job.trainer(role).engine)

    def _frozen(self) -> list[str]:
        return sorted({c.role for c in self.schedule.calls if c.op in ("prefix", "suffix") and not c.trained})

    # ---- processes

    def _contexts(self) -> Iterator[StateObject]:
        """What each process takes of its GPU before it allocates anything: no plan moves or releases it."""
        for process, title in (("train", "training"), ("rollout", "rollout")):
            groups = communicators(self.job, process, shared=self.shared)
            over = f", NCCL over {', '.join(groups)}" if groups else ""
            yield StateObject(
                f"{process}.context", f"{title} CUDA context{', NCCL' if groups else ''}", "permanent", "",
                process_bytes(self.job, groups), {}, process=process, always=True,
                why=f"of the process itself: CUDA context{over}",
            )  # fmt: skip

    # ---- weights of the policy

    def _weights(self) -> Iterator[StateObject]:
        job, role = self.job, self.job.policy
        shared = self.shared
        decode = self.schedule.decode_windows if shared else ()
        reading = (*decode, *self._role_windows(role, "prefix", "train"), *self._windows("update", "publish"))
        tp = job.rollout_tp if shared else job.train_tp
        dtype = "BF16" if job.model.dtype == "bfloat16" else job.model.dtype
        readers = ("rollout",) if shared else ()
        yield StateObject(
            f"{role}.snapshot", f"{role} {dtype} {'snapshot' if shared else 'weights'}", "regenerable", role,
            job.spec.rank_parameters(tp, "language") * job.itemsize, self._uses(reading),
            readers=readers, always=True,
            why=f"{'one copy for both engines, ' if shared else ''}rewritten chunk by chunk in P3",
        )  # fmt: skip
        vision = job.spec.vision_parameters * job.itemsize
        yield StateObject(
            f"{role}.vision", f"{role} vision tower", "regenerable", role, vision,
            self._uses((*decode, *self._seeing())),
            readers=readers, always=True, why="replicated on every rank",
        )  # fmt: skip
        if shared:
            yield StateObject(
                f"{role}.case3", f"{role} case-3 buffer", "regenerable", role, self.case3_bytes,
                self._uses((*self.schedule.decode_windows, *self._windows("publish"))),
                readers=readers, always=True, why="tensors whose row order the engines cannot share",
            )  # fmt: skip
            return
        copy = job.spec.rank_parameters(job.rollout_tp, "language") * job.itemsize
        for name, nbytes in (("weights", copy), ("vision", vision)):
            sent = name == "weights" or trains_vision(job, role)
            yield StateObject(
                f"rollout.{name}", f"rollout {dtype} weights" if name == "weights" else "rollout vision tower",
                "regenerable", role, nbytes,
                self._uses((*self.schedule.decode_windows, *(self._windows("publish") if sent else ()))),
                process="rollout", always=True,
                why="the rollout pool's own copy" if self.apart else "a second copy: weight sharing is off",
            )  # fmt: skip

    def _seeing(self) -> tuple[str, ...]:
        """Windows in which a trainer runs the policy's tower: a frozen one serves the reference's prefix too."""
        job, role = self.job, self.job.policy
        if trains_vision(job, role):
            return (*self._role_windows(role, "prefix", "train"), *self._windows("update"))
        return self._windows("prefix") if not self.naive else self._role_windows(role, "prefix")

    # ---- rollout engine

    def _rollout(self) -> Iterator[StateObject]:
        rollout = self.job.roles[self.job.policy].rollout
        assert rollout is not None
        decode = self.schedule.decode_windows
        kept = self.apart or self.off("rollout_release")
        why = "resident: nobody else has these GPUs" if self.apart else "resident: release is off"
        for name, title, nbytes in (
            ("kv", "rollout KV cache", rollout.kv_cache_bytes),
            ("runtime", "rollout runtime buffers", rollout.runtime_bytes),
        ):
            yield StateObject(
                f"rollout.{name}", title, "phase-local", self.job.policy, nbytes, self._uses(decode),
                produced=decode[0], process="rollout", always=kept,
                why=why if kept else "released when generation ends",
            )  # fmt: skip

    # ---- boundaries

    def _boundary(self, call: Call) -> StateObject:
        job, work = self.job, role_work(self.job, call.role)
        token = job.spec.kv_bytes_per_token(work.tp, job.itemsize)
        windows = self._role_windows(call.role, "prefix", "train" if call.trained else "score")
        return StateObject(
            f"{call.role}.boundary", f"{call.role} boundary KV", "boundary", call.role,
            job.prompts_per_rank * job.workload.prompt_tokens * token, self._uses(windows), produced=windows[0],
            slots=job.prompts_per_rank, attached=call.trained, always=self.naive,
            why="kept in HBM until its suffix has used it",
        )  # fmt: skip

    # ---- frozen roles

    def _frozen_weights(self) -> Iterator[StateObject]:
        job = self.job
        for role in self._frozen():
            tp, dtype = job.trainer(role).tensor_parallel, "BF16" if job.model.dtype == "bfloat16" else job.model.dtype
            options: frozenset[Residency] = frozenset({"hbm", "host"})
            both = self._role_windows(role, "prefix", "score")
            yield StateObject(
                f"{role}.weights", f"{role} {dtype} weights", "regenerable", role,
                job.spec.rank_parameters(tp, "language") * job.itemsize, self._uses(both), host_backed=True,
                always=self.naive, options=options, why="frozen: its host copy stays valid",
            )  # fmt: skip
            if job.spec.vision and (self.naive or not shared_tower(job)):
                yield StateObject(
                    f"{role}.vision", f"{role} vision tower", "regenerable", role,
                    job.spec.vision_parameters * job.itemsize, self._uses(self._role_windows(role, "prefix")),
                    host_backed=True, always=self.naive, options=options, why="frozen: its host copy stays valid",
                )  # fmt: skip

    # ---- activations

    def _activations(self) -> Iterator[StateObject]:
        job, role = self.job, self.job.policy
        work, facts = role_work(job, role), self._facts(role)
        if self.naive:
            yield StateObject(
                "train.activations", "activations, one microbatch", "phase-local", role,
                facts.full_activation_bytes(one_response(work)), self._uses(self._windows("train")),
                produced=self._windows("train")[0], always=True, workspace=True,
            )  # fmt: skip
            return
        yield self._prefix_saved(work, facts)
        for call in (c for c in self.schedule.calls if c.op == "prefix"):
            nbytes = self._facts(call.role).prefix_workspace_bytes(role_work(job, call.role), call.trained)
            windows = self._role_windows(call.role, "prefix")
            yield self._workspace(f"{call.role}.prefix_workspace", f"{call.role} prefix workspace", nbytes, windows)
        yield from self._suffix_workspaces(1)

    def _prefix_saved(self, work: Work, facts: EngineFacts) -> StateObject:
        job, role = self.job, self.job.policy
        windows = self._role_windows(role, "prefix", "train")
        wanted = job.roles[role].prefix_saved
        places: tuple[Residency, ...] = ("hbm", "host", "dropped")
        if self.off("state_offload"):
            places = ("hbm",)
        options: frozenset[Residency] = frozenset(p for p in places if wanted in ("auto", p))
        return StateObject(
            f"{role}.prefix_saved", f"{role} prefix saved state", "phase-local", role,
            job.prompts_per_rank * facts.prefix_saved_bytes(work), self._uses(windows, "stream"), produced=windows[0],
            slots=job.prompts_per_rank, attached=True, recomputable=True, options=options,
            why="needed again by the prefix backward",
        )  # fmt: skip

    def _suffix_workspaces(self, responses: int) -> Iterator[StateObject]:
        if self.naive:
            return
        for role in self._frozen():
            work = one_response(role_work(self.job, role), responses)
            nbytes, windows = self._facts(role).score_workspace_bytes(work), self._role_windows(role, "score")
            yield self._workspace(f"{role}.score_workspace", f"{role} scoring workspace", nbytes, windows)
        role = self.job.policy
        work = one_response(role_work(self.job, role), responses)
        nbytes = self._facts(role).train_activation_bytes(work)
        yield self._workspace("train.activations", "training activations", nbytes, self._windows("train"))

    def _workspace(self, name: str, title: str, nbytes: int, windows: tuple[str, ...]) -> StateObject:
        return StateObject(
            name, title, "phase-local", self.job.policy, nbytes, self._uses(windows), produced=windows[0],
            workspace=True, why="temporaries, released with the window",
        )  # fmt: skip

    # ---- update

    def _update(self) -> Iterator[StateObject]:
        job, role = self.job, self.job.policy
        parameters, size = trained_parameters(job, role), state_itemsize(job)
        update, train = self._windows("update"), self._windows("train")
        kept, whole = self.off("state_offload"), self.off("chunked_optimizer")
        options: frozenset[Residency] = frozenset({"hbm"} if kept else {"hbm", "host"})
        uses = self._uses(update, "hbm" if whole else "stream")
        yield StateObject(
            f"{role}.gradients", f"{role} FP{8 * size} gradients", "phase-local", role, parameters * size,
            {**self._uses(train), **uses}, produced=train[0], always=self.naive, options=options,
            why="accumulated over prompt groups, consumed chunk by chunk",
        )  # fmt: skip
        for name, title, copies in (("master", "master weights", 1), ("moments", "Adam moments", 2)):
            yield StateObject(
                f"{role}.{name}", f"{role} FP{8 * size} {title}", "permanent", role, copies * parameters * size, uses,
                always=self.naive, options=options, why="streamed through the update, never discarded",
            )  # fmt: skip
        if not (self.naive or whole):
            element = workspace_bytes_per_element(job, streamed=True)
            nbytes = chunks_in_flight(job) * reserved_elements(job, parameters, self.held_elements) * element
            workspace = self._workspace("optimizer.workspace", "optimizer chunks in flight", nbytes, update)
            yield workspace
