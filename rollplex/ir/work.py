"""The work of a role on one prompt group: what size formulas and cost formulas are evaluated on.

work = one_response(role_work(job, "actor")); engine("megatron").train_activation_bytes(work)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rollplex.ir.lora import trained_spec
from rollplex.ir.shards import Degrees, stage_layers
from rollplex.ir.spec import Adapters, ModelSpec

if TYPE_CHECKING:
    from rollplex.ir.job import Job


@dataclass(frozen=True)
class Work:
    """One role's work on one prompt group, as a rank of its engine sees it.

    Tokens are those of whole sequences; a rank works on `local` ones. `recompute` makes whole layers again in the
    backward, `recompute_attention` the core of attention alone; `unfused` attention keeps its score matrix.
    `steps` are the suffix steps of a whole iteration, which fill a pipeline; its `first` and `last` stage may have
    layers of their own number. Ranks that share a sequence pass keys and values around (ring), or `by_heads` swap
    tokens for heads inside attention (Ulysses). With `adapters` only they are trained. In a later turn the
    group has `sequences` histories, `prompt_tokens` are those that are new in one, behind `before` of the pieces it
    extends; `others` are a rank's tokens in the group's other pieces, whose gradients wait meanwhile. Where a plan has
    a prefix's saved state `dropped`, its backward makes it again. The GPU has so many `sms`; of a `hopper` one cuDNN's
    attention is taken.
    """

    spec: ModelSpec
    tp: int
    itemsize: int
    sequence_parallel: bool
    recompute: bool
    prompt_tokens: int
    patches: int
    responses: int
    response_tokens: int
    vision_grad: bool = False
    pp: int = 1
    first: int | None = None
    last: int | None = None
    cp: int = 1
    ep: int = 1
    recompute_attention: bool = False
    unfused: bool = False
    zero: int = 0
    steps: int = 1
    by_heads: bool = False
    adapters: Adapters | None = None
    turn: int = 1
    sequences: int = 1
    before: int = 0
    others: int = 0
    dropped: bool = False
    on_cpu: bool = False
    sms: int = 132
    hopper: bool = True

    @property
    def context(self) -> int:
        """Tokens of a sequence up to its response."""
        return self.before + self.prompt_tokens

    @property
    def prefix_tokens(self) -> int:
        """Tokens of a rank in one prefix step."""
        return self.sequences * self.local(self.prompt_tokens)

    @property
    def suffix_tokens(self) -> int:
        """Response tokens of the whole group."""
        return self.responses * self.response_tokens

    @property
    def stages(self) -> tuple[int, ...]:
        """Language layers of each pipeline stage."""
        return stage_layers(self.spec.layers, Degrees(pp=self.pp, first=self.first, last=self.last))

    @property
    def layers(self) -> int:
        """Language layers of the fullest pipeline stage."""
        return max(self.stages)

    @property
    def layers_in_flight(self) -> int:
        """Layers of suffix steps whose activations a stage holds at a time: stage s as many steps as follow it (1F1B).

        It is the stage that holds most; of stages alike, the first.
        """
        return max(min(self.pp - stage, self.steps) * layers for stage, layers in enumerate(self.stages))

    def local(self, tokens: int) -> int:
        """Tokens of a rank: a sequence is dealt out in 2 cp equal pieces, two a rank, or `by_heads` in cp of them."""
        if self.by_heads or self.cp == 1:
            return -(-tokens // self.cp)
        return -(-tokens // (2 * self.cp)) * 2

    @property
    def swapped_heads(self) -> int:
        """Heads of q, k, v and output that ranks swap `by_heads`; KV heads are repeated until every rank has one."""
        return 2 * self.spec.heads + 2 * max(self.spec.kv_heads, self.cp)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token in all layers of the fullest stage."""
        return self.spec.kv_bytes_per_token(self.tp, self.itemsize) * self.layers // self.spec.layers


def patches(job: Job, role: str) -> int:
    """Vision patches of one prompt at most: the processor's bound where the job states it, else all tokens."""
    vision, load = job.spec_of(role).vision, job.workload
    if vision is None:
        return 0
    tokens = load.prompt_tokens
    if load.max_pixels is not None:
        tokens = min(tokens, vision.max_visual_tokens(load.frames, load.max_pixels))
    return tokens * vision.merge**2


def role_work(job: Job, role: str) -> Work:
    """The work of a trained or scoring role, all responses of a group at once."""
    engine, spec = job.trainer(role), job.spec_of(role)
    return Work(
        spec=spec,
        tp=engine.tensor_parallel,
        itemsize=job.itemsize,
        sequence_parallel=engine.sequence_parallel,
        recompute=job.roles[role].recompute == "full",
        prompt_tokens=job.workload.prompt_tokens,
        patches=patches(job, role),
        responses=job.group,
        response_tokens=job.workload.response_tokens,
        vision_grad=spec.vision is not None and trains_vision(job, role),
        pp=engine.pipeline_parallel,
        first=engine.num_layers_in_first_pipeline_stage,
        last=engine.num_layers_in_last_pipeline_stage,
        cp=engine.context_parallel,
        ep=engine.expert_parallel,
        recompute_attention=job.roles[role].recompute == "selective",
        unfused=job.roles[role].attention == "unfused",
        zero=job.zero(role),
        adapters=trained_spec(job, role).adapters,
        steps=-(-job.workload.prompts // max(1, job.data_parallel(role))),
        by_heads=job.whole_sequences(role),
        on_cpu=job.on_host,
        sms=job.device.sms,
        hopper=job.device.hopper,
    )


def seen_patches(job: Job, role: str) -> int:
    """Vision patches of one observation at most; none where it is text."""
    vision, turns = job.spec_of(role).vision, job.workload.turns
    if vision is None or turns is None or not turns.frames:
        return 0
    tokens, pixels = turns.observation_tokens, job.workload.max_pixels
    return (tokens if pixels is None else min(tokens, vision.max_visual_tokens(turns.frames, pixels))) * vision.merge**2


def turn_work(job: Job, role: str, turn: int) -> Work:
    """The work of a role on one prompt group in a turn: on its prompt, or on what is new in its histories.

    32B, 3 turns of 256 + 1024: turn 2 has 1280 tokens behind the 8192 of its prompt, in each of 8 trajectories.
    """
    first, load = role_work(job, role), job.workload
    later = replace(
        first,
        prompt_tokens=load.new_tokens,
        patches=job.group * seen_patches(job, role),
        turn=turn,
        sequences=job.group,
        before=load.history_tokens(turn - 1),
    )
    boundary, own = first.prefix_tokens + (load.turn_count - 1) * later.prefix_tokens, first if turn == 1 else later
    return replace(own, others=boundary - own.prefix_tokens)


def trains_vision(job: Job, role: str) -> bool:
    """Whether the role's vision tower receives gradients."""
    return job.roles[role].train is not None and "vision" not in job.roles[role].freeze


def one_response(work: Work, responses: int = 1) -> Work:
    """The same work on fewer responses."""
    return replace(work, responses=responses, steps=work.steps * work.responses // responses)


def whole_call(work: Work) -> Work:
    """The work of a call that is not split: every response is run with its prompt before it."""
    return replace(work, response_tokens=work.prompt_tokens + work.response_tokens)
