"""Predicted seconds of the work in one iteration: a roofline over the job's model and GPU, with stated efficiencies.

It says which side of an overlap is longer and what a transfer costs; it does not promise seconds. The constants below
are assumptions read off public figures and one H200; what was measured replaces them where a job has a calibration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from rollplex.ir.calibration import Calibration
from rollplex.ir.job import Job
from rollplex.ir.lora import lora_of, served_spec
from rollplex.ir.models import ModelSpec
from rollplex.ir.planned_sharing import DECODE_PARTS
from rollplex.ir.work import Work, trains_vision, turn_work
from rollplex.passes.lengths import Decode, Lengths

COMPUTE_EFFICIENCY = 0.45
"""Share of the dense peak that GEMMs of prefill and training reach; TP's collectives are counted beside them."""
BANDWIDTH_EFFICIENCY = 0.75
"""Share of the HBM rate that decode's reads of weights and KV reach."""
NVLINK_SHARE = 0.4
"""Share of the two-way NVLink figure that a ring of all GPUs of a node carries one way: half of it, less protocol.
Slabs that two H200s write into each other's pages have it too: 358 of 900 GB/s (benchmarks/results/two_h200.md)."""
DECODE_LAYER_OVERHEAD_S = 60e-6
"""Launches and latencies of one layer of one decode step (4.3 ms a step for 36 layers at batch 4 on an H200)."""
ADAPTER_LAUNCH_S = 5e-6
"""One small kernel of a captured graph, of some dozen that make up the layer overhead; assumed, not measured."""
RING_HOP_S = 5e-6
"""One hop of an all-reduce of one decode step's activations, 2 (tp - 1) of them each. Chosen so that rollout at TP 8 is
slower than at TP 4 by about what paper section 4.5 measured (1.17 to 1.31 times); weights and KV alone make it faster.
"""
TOWER_SHARE = 0.46
"""Of the measured rate of linear layers, what a vision tower reaches: its blocks are narrow, and norms, rotations,
windows and pixels from the host lie between its GEMMs (315 of 688 TFLOP/s, benchmarks/results/step_h200.md)."""
EAGER_LAYER_S = 1.2e-3
"""Least time of one layer's forward in an eager trainer, however few tokens there are: 43 ms of 36 layers for one
response or two on an H200 (benchmarks/results/step_h200.md)."""
INTERFERENCE_SHARE = 0.021
"""Decode slowdown under MPS default, as a share of decode (paper section 4.6, PerceptionTest)."""
REMAP_S_PER_GIB = 2.0e-3
"""Pages that go and come back in handles of 256 MiB: create, map, set access, unmap, release take 6.5 ms for 8 GiB, an
import with its map 0.2 ms a handle, and its end as long again; one H200, benchmarks of the driver alone."""
PEER_S_PER_GIB = 1.2e-3
"""Of that an import and its end: what each peer's pages cost again, which a rank writes its slabs into."""
REFRESH_START_S = 5.6
REFRESH_SHARE = 0.095
"""Weights between pools, read off one NCCL checkpoint engine (verl issue 7060): 9.1, 23.2 and 36.9 s for the 16.6, 66.9
and 146.8 GB of a 7 B, 32 B and 72 B model. The line through the outer two is 5.6 s and 4.7 GB/s, of 50 GB/s links."""


@dataclass(frozen=True)
class Costs:
    """Seconds for the pieces of one iteration on one GPU of the job."""

    job: Job

    @cached_property
    def measured(self) -> Calibration | None:
        """Rates that were measured: they come before the assumed ones."""
        return self.job.cluster.calibration

    @cached_property
    def flops_per_s(self) -> float:
        """Achievable FLOP/s of one GPU, on as many tokens as a prompt has."""
        if self.measured:
            return self.measured.gemm_flops_per_s(self.prompt_tokens)
        return self.job.device.tflops_bf16 * 1e12 * COMPUTE_EFFICIENCY

    @cached_property
    def tower_flops_per_s(self) -> float:
        """Achievable FLOP/s of a vision tower."""
        return self.flops_per_s * (TOWER_SHARE if self.measured else 1.0)

    @cached_property
    def hbm_bytes_per_s(self) -> float:
        """Achievable HBM bytes a second of one GPU."""
        if self.measured:
            return self.measured.hbm_gb_s * 1e9
        return self.job.device.bandwidth_tb_s * 1e12 * BANDWIDTH_EFFICIENCY

    def link_s(self, nbytes: float) -> float:
        """Moving bytes between HBM and the pinned pool, one way."""
        return nbytes / (self.job.device.host_link_gb_s * 1e9)

    def remap_s(self, nbytes: float, peers: int) -> float:
        """Letting pages go that another process has imported too, and mapping, exporting and importing new ones.

        So does a rank with as many bytes of each of its peers.
        """
        return nbytes / 2**30 * (REMAP_S_PER_GIB + peers * PEER_S_PER_GIB)

    def exchange_s(self, nbytes: float) -> float:
        """Receiving bytes from GPUs of the same node."""
        return nbytes / (self.job.device.nvlink_gb_s * 1e9 * NVLINK_SHARE)

    def refresh_s(self) -> float:
        """Sending what is new to the rollout pool: model or adapters into each of its nodes, shared out inside."""
        job = self.job
        nbytes = job.spec.rank_parameters(1, "language") + (job.spec.vision_parameters if _sends_tower(job) else 0)
        if adapters := served_spec(job):
            nbytes = adapters.rank_parameters(1, "language")
        if job.pools_share_a_node:
            return self.exchange_s(nbytes * job.itemsize / job.rollout_tp)
        return REFRESH_START_S + nbytes * job.itemsize / (job.cluster.internode_gb_s * 1e9 * REFRESH_SHARE)

    def prefix_s(self, work: Work, prompts: int) -> float:
        """Vision tower and prefill of `prompts` prompts, or of what is new in their trajectories, on one rank."""
        return prompts * (self._prompt_s(work) + self._tower_s(work))

    def _prompt_s(self, work: Work) -> float:
        """Prefill of one prompt, or of what is new in a group's histories on top of those before."""
        whole, new = self.history_tokens(work.turn), self.prompt_tokens if work.turn == 1 else self.new_tokens
        return self._forward_s(work, work.sequences * new, whole - new / 2)

    def _tower_s(self, work: Work) -> float:
        """The vision tower on one prompt, or a group's observations, of which every rank of the group has a replica."""
        if not work.patches:
            return 0.0
        blocks = work.spec.vision.depth if work.spec.vision else 0
        return max(vision_flops(work.spec, self._patches(work)) / self.tower_flops_per_s, blocks * EAGER_LAYER_S)

    def _patches(self, work: Work) -> int:
        """Of a typical prompt, or of what a turn's group sees."""
        median = self.prompt_tokens if work.turn == 1 else self.job.workload.prompt_tokens
        return work.patches * median // self.job.workload.prompt_tokens

    def _forward_s(self, work: Work, tokens: float, context: float) -> float:
        """One forward of the language model: its GEMMs, and two all-reduces a layer (or their halves, gathered)."""
        compute = self._compute_s(work.spec, tokens, context) / work.tp
        reduce = 2 * work.spec.layers * self.all_reduce_s(tokens * work.spec.hidden * work.itemsize, work.tp)
        reduce += work.spec.layers * self.all_to_all_s(work, tokens) * work.cp  # as long on each of the cp ranks
        # Stages and context ranks share both, and the launches.
        return max(compute + reduce, work.spec.layers * EAGER_LAYER_S) * work.tp / ways(work)

    def _compute_s(self, spec: ModelSpec, tokens: float, context: float) -> float:
        """All FLOPs at one rate; where rates were measured, linear layers and attention each at their own."""
        if self.measured is None:
            return forward_flops(spec, tokens, context) / self.flops_per_s
        attention = tokens * attention_flops(spec, context)
        linear = forward_flops(spec, tokens, context) - attention
        rates = self.measured.gemm_flops_per_s(tokens), self.measured.attention_flops_per_s(max(tokens, context))
        return linear / rates[0] + attention / rates[1]

    def all_reduce_s(self, nbytes: float, tp: int) -> float:
        """A ring over the ranks of a tensor-parallel group: 2 (tp - 1) hops, each with a tp-th of the bytes.

        Of the policy's trainer it may have been measured.
        """
        if self.measured and self.measured.exchange and tp == self.measured.shape.train_tp > 1:
            return self.measured.exchange.sum_s(nbytes)
        return 2 * (tp - 1) * RING_HOP_S + self.exchange_s(2 * (tp - 1) / tp * nbytes)

    def all_to_all_s(self, work: Work, tokens: float) -> float:
        """What ranks that share a sequence by heads swap in one layer: q, k, v and the output of their own tokens."""
        if not work.by_heads or work.cp == 1:
            return 0.0
        own = tokens / work.cp * work.swapped_heads * work.spec.head_dim * work.itemsize
        nbytes, cluster = own * (work.cp - 1) / work.cp, self.job.cluster
        if work.cp > cluster.gpus_per_node:  # the GPUs of a node share its network
            return nbytes / (cluster.internode_gb_s * 1e9 / cluster.gpus_per_node)
        return self.exchange_s(nbytes)

    def suffix_s(self, work: Work, prompts: int, step: int | None = None) -> float:
        """One forward over all responses of `prompts` prompts, `step` at a time: of a group, or fewer.

        Behind turn 1 each has a history of its own.
        """
        mean, each = Lengths.of(self.job).mean, 1 if work.turn > 1 else step or work.responses
        one = self._forward_s(work, each * mean, self.history_tokens(work.turn) + mean / 2)
        return prompts * work.responses / each * one

    def whole_s(self, work: Work, prompts: int) -> float:
        """One forward over all responses of `prompts` prompts, each with its own prompt before it."""
        return work.responses * self.prefix_s(work, prompts) + self.suffix_s(work, prompts)

    def score_s(self, work: Work, prompts: int, whole: bool = False, step: int | None = None) -> float:
        """The forward of a frozen role's scoring call."""
        return self.whole_s(work, prompts) if whole else self.suffix_s(work, prompts, step)

    def train_s(self, work: Work, prompts: int, whole: bool = False, step: int | None = None) -> float:
        """Suffix forward and backward, then prefix backward; layer recomputation adds a forward to each.

        A loss sees what is said of a whole group: of one that is taken in several steps, or turns, it is said first.
        A backward is two forwards, one for gradients of inputs and one for those of weights. Frozen base weights have
        none: under LoRA it is one, and the GEMMs of the adapters are added.
        """
        backward = _forwards_of_a_backward(work)
        adapters = prompts * self._adapters_s(work, whole)
        if whole:
            return self.whole_s(work, prompts) * (1 + backward) + adapters
        parts = self.job.workload.turn_count > 1 or (step or work.responses) < work.responses
        suffix = self.suffix_s(work, prompts, step) * (1 + backward + parts)
        return suffix + prompts * sum(self.prefix_backward_s(work)) + adapters

    def prefix_backward_s(self, work: Work) -> tuple[float, float]:
        """Backward of one prompt's prefix: through the language model, then through a tower that is trained."""
        tower = self._tower_s(work) * (3 if work.vision_grad else 0)
        return self._prompt_s(work) * _forwards_of_a_backward(work), tower

    def _adapters_s(self, work: Work, whole: bool) -> float:
        """GEMMs of A and B on the tokens of one prompt group: forward, gradients of inputs and of weights."""
        if work.adapters is None:
            return 0.0
        prompts = work.responses if whole else 1
        tokens = prompts * self.prompt_tokens + work.responses * Lengths.of(self.job).mean
        return 6 * tokens * replace(work.spec, adapters=work.adapters).active_parameters / ways(work) / self.flops_per_s

    def adam_s(self, parameters: int) -> float:
        """Adam on resident state: read and write master, moments, gradient and snapshot once."""
        return parameters * 30 / self.hbm_bytes_per_s

    def decode_s(self, weight_bytes: float, tp: int, prompts: int, turn: int = 1, until: float | None = None) -> float:
        """Standalone decode of one engine's `prompts`, the live batch shrinking, behind the engine's own prefill.

        With `until` only to the time at which responses have so many tokens.
        """
        parts = self.decode_parts(weight_bytes, tp, prompts, turn, until)
        return self.prefill_s(tp, prompts, turn) + sum(seconds for seconds, _ in parts)

    def prefill_s(self, tp: int, prompts: int, turn: int = 1) -> float:
        """Tower and prefill of the rollout engine: `prompts` once for all of a group, or what its histories saw since.

        Responses that go on from the step before are prefilled too, for their KV is of other weights.
        """
        work, decode = turn_work(self.job, self.job.policy, turn), Decode.of(self.job, prompts)
        turns = self.job.workload.turns if turn > 1 else None
        seen = turns.observation_tokens if turns else self.prompt_tokens
        tokens = prompts * (self.job.group if turns else 1) * seen
        seconds = self._compute_s(self.job.spec, seen, self.history_tokens(turn) - seen / 2) * tokens / seen
        seconds += prompts * vision_flops(self.job.spec, self._patches(work)) / self.tower_flops_per_s
        own = forward_flops(self.job.spec, decode.carried_tokens, self.prompt_tokens + decode.ends)
        hidden = tokens * self.job.spec.hidden * self.job.itemsize
        return (seconds + own / self.flops_per_s) / tp + 2 * self.job.spec.layers * self.all_reduce_s(hidden, tp)

    def decode_parts(
        self, weight_bytes: float, tp: int, prompts: int, turn: int = 1, until: float | None = None
    ) -> Iterator[tuple[float, float]]:
        """(seconds, responses that decode when it begins) of decode's parts in the order of time."""
        decode = Decode.of(self.job, prompts)
        width = decode.ends / DECODE_PARTS
        last = decode.ends if until is None else min(until, decode.ends)
        for i in range(DECODE_PARTS):
            if tokens := min(max(last - i * width, 0.0), width):
                step_s = self._decode_step_s(weight_bytes, tp, decode.live((i + 0.5) * width), turn)
                yield tokens * step_s, sum(n for n, _ in decode.live(i * width))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt, as times are predicted for."""
        return self.job.workload.typical_prompt

    @property
    def new_tokens(self) -> float:
        """Expected tokens that a later turn adds to a history: a response, and an observation at its budget."""
        turns = self.job.workload.turns
        return Lengths.of(self.job).mean + (turns.observation_tokens if turns else 0)

    def history_tokens(self, turn: int) -> float:
        """Expected tokens before the response of a turn."""
        return self.prompt_tokens + ((turn - 1) * self.new_tokens if turn > 1 else 0)

    def _decode_step_s(self, weight_bytes: float, tp: int, live: Iterable[tuple[float, float]], turn: int) -> float:
        spec, each, history = self.job.spec, list(live), self.history_tokens(turn)
        kv = sum(n * (history + own) for n, own in each) * spec.kv_bytes_per_token(tp, self.job.itemsize)
        if self.measured:  # with what its ranks exchange
            live_now = sum(n for n, _ in each)
            step_s = self.measured.step_s(live_now, sum(n * (history + own) for n, own in each) / live_now)
            return step_s + self._adapter_launches_s
        hidden = sum(n for n, _ in each) * spec.hidden * self.job.itemsize
        reduce = 2 * spec.layers * self.all_reduce_s(hidden, tp) + self._adapter_launches_s
        return (weight_bytes + kv) / self.hbm_bytes_per_s + spec.layers * DECODE_LAYER_OVERHEAD_S + reduce

    @property
    def _adapter_launches_s(self) -> float:
        """Two small GEMMs a layer and target, of A and of B; their reads are in the bytes of the weights."""
        lora = lora_of(self.job)
        if lora is None or lora.served == "merged":
            return 0.0
        return 2 * len(lora.targets) * self.job.spec.layers * ADAPTER_LAUNCH_S


def _forwards_of_a_backward(work: Work) -> int:
    """Gradients of inputs and, unless they are frozen, of weights; the forward itself where it is recomputed."""
    return (1 if work.adapters else 2) + (1 if work.recompute else 0)


def _sends_tower(job: Job) -> bool:
    """A frozen tower never changes."""
    return job.spec.vision is not None and trains_vision(job, job.policy)


def ways(work: Work) -> float:
    """Ranks that share a sequence's work, less the time a pipeline fills and drains: (steps + stages - 1) / steps.

    Its stages wait for the one with most layers.
    """
    stages = work.spec.layers / work.layers
    return work.tp * stages * work.cp * work.steps / (work.steps + work.pp - 1)


def forward_flops(spec: ModelSpec, tokens: float, context: float) -> float:
    """FLOPs of one language-model forward: two a parameter that a token meets, and attention over `context` tokens."""
    return tokens * (2 * spec.active_parameters + attention_flops(spec, context))


def attention_flops(spec: ModelSpec, context: float) -> float:
    """FLOPs of one token's attention over `context` tokens."""
    return 4 * spec.layers * spec.heads * spec.head_dim * context


def vision_flops(spec: ModelSpec, patches: int) -> float:
    """FLOPs of one forward of the vision tower; window attention is small beside its GEMMs."""
    return 2.0 * spec.vision_parameters * patches if spec.vision else 0.0
