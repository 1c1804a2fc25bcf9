"""The work of a step: prompts, responses, budgets, and when the sampling of a step ends."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollplex.ir.job_schema import Count, Section, Share

WIDEST = 0.6
"""Most spread of log lengths: the longest of 256 responses has 5.6 times the median. Assumed, not measured."""


class DynamicSampling(Section):
    """Groups that the loss's mask leaves out teach nothing: other prompts are sampled in their place (DAPO, 3.2)."""

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


class Turns(Section):
    """A trajectory of several turns: after each response but the last an environment adds an observation."""

    count: int = Field(examples=[3], ge=2, le=64, description="responses of a trajectory, each of response_tokens")
    observation_tokens: Count = Field(
        examples=[1024], description="most tokens of an observation, visual tokens included"
    )
    frames: int = Field(default=0, ge=0, le=10**6, description="images or frames of one observation; 0 for text")
    environment_s: Annotated[float, Field(ge=0, le=10**6, allow_inf_nan=False)] = Field(
        default=0.0, description="seconds from a turn's last response to the observations, for times"
    )


class Workload(Section):
    """One step's work; the token budgets are upper bounds that the plan must hold."""

    prompts: Count = Field(examples=[32], description="prompts of one step, over all GPUs")
    group: Count = Field(default=8, description="responses sampled for each prompt")
    prompt_tokens: int = Field(
        examples=[8192], ge=2, le=10**9, description="most tokens of a prompt, visual tokens included"
    )
    response_tokens: Count = Field(examples=[2048], description="most tokens of a response, in every turn")
    prompt_median: Count | None = Field(default=None, description="median tokens of a prompt, for predicted times")
    response_median: Count | None = Field(default=None, description="median tokens of a response, for predicted times")
    rollout: TailCut = Field(default_factory=TailCut, description="when decode ends")
    frames: int = Field(default=0, ge=0, le=10**6, description="frames sampled from a video; 0 for text")
    max_pixels: Count | None = Field(
        default=None, description="most pixels of one frame; null leaves it to prompt_tokens"
    )
    turns: Turns | None = Field(default=None, description="multi-turn rollout; null for one response a trajectory")
    dynamic_sampling: DynamicSampling | None = Field(
        default=None, description="groups that teach nothing are sampled again; null samples every prompt once"
    )

    # ---- trajectories

    @property
    def turn_count(self) -> int:
        """Responses of a trajectory."""
        return self.turns.count if self.turns else 1

    @property
    def typical_prompt(self) -> int:
        """Tokens of a prompt, as times are predicted for: the median where it is named, else the budget."""
        return self.prompt_median or self.prompt_tokens

    @property
    def new_tokens(self) -> int:
        """Most tokens that a later turn's history has beyond the one before: a response and an observation."""
        return self.response_tokens + (self.turns.observation_tokens if self.turns else 0)

    def history_tokens(self, turn: int) -> int:
        """Most tokens before the response of a turn, the first of which is turn 1."""
        return self.prompt_tokens + (turn - 1) * self.new_tokens

    @property
    def trajectory_tokens(self) -> int:
        """Most tokens of a prompt with all its turns."""
        return self.history_tokens(self.turn_count) + self.response_tokens

    @property
    def environment_s(self) -> float:
        """Seconds of a step in which the environment makes observations and no response is decoded."""
        return self.turns.environment_s * (self.turns.count - 1) if self.turns else 0.0
