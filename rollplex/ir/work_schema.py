"""The work of a step: prompts, responses, budgets, and when the sampling of a step ends."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollplex.ir.job_schema import Count, Section, Share


class DynamicSampling(Section):
    """Groups whose scores are all equal teach nothing: other prompts are sampled in their place (DAPO, section 3.2)."""

    rounds: int = Field(
        examples=[3], ge=2, le=100, description="most rounds of sampling in one step, the first included"
    )
    kept: float = Field(
        default=0.5, gt=0, le=1, allow_inf_nan=False, description="groups of a round that teach something, for times"
    )


class TailCut(Section):
    """Whether decode waits for its longest responses (paper section 4.7; APRIL and RollPacker cut that tail)."""

    kind: Literal["full", "partial", "oversample"] = Field(
        default="full",
        description="full: wait for all; partial: the unfinished go on in the next step; "
        "oversample: more prompts are sampled, the first to complete are taken, the rest is discarded",
    )
    share: Share | None = Field(
        default=None, description="partial: part of the prompt groups in flight that a step completes"
    )
    factor: Annotated[float, Field(gt=1, le=16, allow_inf_nan=False)] | None = Field(
        default=None, description="oversample: prompts sampled for each that the step takes"
    )


class Workload(Section):
    """One step's work; the token budgets are upper bounds that the plan must hold."""

    prompts: Count = Field(examples=[32], description="prompts of one step, over all GPUs")
    group: Count = Field(default=8, description="responses sampled for each prompt")
    prompt_tokens: int = Field(
        examples=[8192], ge=2, le=10**9, description="most tokens of a prompt, visual tokens included"
    )
    response_tokens: Count = Field(examples=[2048], description="most tokens of a response")
    prompt_median: Count | None = Field(default=None, description="median tokens of a prompt, for predicted times")
    response_median: Count | None = Field(default=None, description="median tokens of a response, for predicted times")
    rollout: TailCut = Field(default_factory=TailCut, description="when decode ends")
    frames: int = Field(default=0, ge=0, le=10**6, description="frames sampled from a video; 0 for text")
    max_pixels: Count | None = Field(
        default=None, description="most pixels of one frame; null leaves it to prompt_tokens"
    )
    dynamic_sampling: DynamicSampling | None = Field(
        default=None, description="groups with equal scores are sampled again; null samples every prompt once"
    )
