"""One step through plan, executor and engines is the step of the textbook: a whole-sequence pass and torch's AdamW.

            ours                                              independent
gradient    prefix | suffix, by group, saved on the host      transformers' own forward on prompt + response, one loss
update      chunks through a workspace                        torch.optim.AdamW, clip_grad_norm_
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runtime_threads import TRAIN, InThreads
from runtime_tiny import luck, tight_plan, tiny_plan
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from rollplex.backends.data.batch import PromptBatch
from rollplex.backends.data.prompts import Prompt
from rollplex.backends.data.rollout import Rollout
from rollplex.backends.hf.precision import keep_double
from rollplex.backends.training.placement import DTYPES, config_of, split, trained_tensors, views
from rollplex.ir.ops import group_normalize
from rollplex.ir.plan import Plan
from rollplex.ir.spec import Part
from rollplex.ir.steps import Run, Step
from rollplex.runtime.protocol import ProcessId

torch.set_num_threads(1)
BASE: dict[str, Any] = {
    "model": {"dtype": "float64"},
    "cluster": {"capacity_gib": "32 MiB"},
    "optimizer": {"lr": 1e-2, "weight_decay": 0.1, "clip_norm": 0.5},
}


def roles(saved: str, recompute: str, freeze: tuple[str, ...] = ()) -> dict[str, Any]:
    rollout = {"engine": "host", "kv_cache_gib": "512 KiB", "runtime_gib": "256 KiB"}
    actor = {"train": {"engine": "host"}, "rollout": rollout, "prefix_saved": saved, "recompute": recompute}
    return {"actor": {**actor, "freeze": list(freeze)}, "reference": {"score": {"engine": "host"}}}


UNDECAYED = {"weight_decay": 0.1, "no_decay": ["*.bias", "*norm*", "*.merger.ln_q.*"]}
ADAM = "decay joins the gradient"
ONE_AT_A_TIME = "one response at a time, state streamed"
CASES: dict[str, dict[str, Any]] = {
    "saved on the host": {"roles": roles("host", "none")},
    "saved on the host, layers recomputed": {"roles": roles("host", "full")},
    "saved in HBM": {"roles": roles("hbm", "none")},
    "dropped and recomputed": {"roles": roles("dropped", "full")},
    "some of the sampled prompts": {
        "roles": roles("host", "none"),
        "workload": {"prompts": 2, "rollout": {"kind": "oversample", "factor": 2}},
    },
    "frozen tower": {"roles": roles("host", "none", ("vision",))},
    ONE_AT_A_TIME: {"roles": roles("host", "full"), "optimizer": {**BASE["optimizer"], **UNDECAYED}},
    ADAM: {"roles": roles("hbm", "full"), "optimizer": {**BASE["optimizer"], **UNDECAYED, "kind": "adam"}},
}


def plan_of(name: str) -> Plan:
    changes = {**BASE, **CASES[name]}
    return tight_plan(responses=1, **changes) if name == ONE_AT_A_TIME else tiny_plan(**changes)


def read_by_rollout(run: InThreads) -> dict[str, Tensor]:
    """Every weight over the pages that the rollout rank has imported."""
    names: dict[Part, str] = {"language": "actor.snapshot", "vision": "actor.vision"}
    return views(
        {part: run.rollout.objects.pages(n, DTYPES[run.job.model.dtype]) for part, n in names.items()},
        run.job,
        "actor",
    )


class Recorded:
    """What a test needs of one step: the gradient before the update, and the values that led to it."""

    def __init__(self, plan: Plan) -> None:
        self.gradient: Tensor | None = None
        self.values: dict[str, Any] = {}
        self.run = InThreads(plan, {"reward": luck}, self._look)
        self.before = {name: w.clone() for name, w in self.run.train.trained()["actor"].weights.items()}
        self.whole = {name: w.clone() for name, w in read_by_rollout(self.run).items()}
        self.run.step(0)
        self.after = {name: w.clone() for name, w in self.run.train.trained()["actor"].weights.items()}
        self.run.close()

    def _look(self, process: ProcessId, step: Step) -> None:
        if process == TRAIN and isinstance(step, Run) and step.task == "grad_norm":
            self.gradient = self.run.train._state("actor", "gradients").clone()
            self.values = dict(self.run.states[TRAIN].values)

    def gradients(self) -> dict[str, Tensor]:
        """Of the loss: groups add up undivided, and the update divides by the response tokens of the step."""
        assert self.gradient is not None
        tokens = int(self.values["rollout"].lengths.sum())
        return split(self.gradient / tokens, trained_tensors(self.run.job, "actor"))


def oracle(recorded: Recorded) -> Any:
    """Transformers' model, as anyone would build it, with the weights of theta_k."""
    config = Qwen2_5_VLConfig.from_dict(config_of(recorded.run.job))
    model: Any = Qwen2_5_VLForConditionalGeneration(config).double().train()
    keep_double(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(recorded.whole[name])
            parameter.requires_grad_(name in recorded.before)
    return model


def logprobs(model: Any, prompt: Prompt, response: Tensor) -> Tensor:
    """log p of a response's tokens from one pass over prompt and response."""
    assert prompt.pixel_values is not None
    ids = torch.cat([prompt.input_ids, response])
    more = torch.arange(prompt.next_position, prompt.next_position + len(response)).expand(3, -1)
    positions = torch.cat([prompt.position_ids, more], dim=1)[:, None]
    logits = model(
        input_ids=ids[None], position_ids=positions, use_cache=False,
        pixel_values_videos=prompt.pixel_values.double(), video_grid_thw=prompt.grid_thw,
    ).logits[0]  # fmt: skip
    rows = logits[len(prompt.input_ids) - 1 : -1].log_softmax(-1)
    return rows.gather(-1, response[:, None])[:, 0]


def textbook_loss(model: Any, prompts: PromptBatch, rollout: Rollout, score: Tensor) -> Tensor:
    """GRPO (examples/grpo.py) with the reference equal to theta_0, token by token, in plain Python."""
    advantage, terms = group_normalize(score, score.shape[1]), []
    for p, prompt in enumerate(prompts):
        for r, response in enumerate(rollout.responses(p)):
            logp = logprobs(model, prompt, response)
            ratio = torch.exp(logp - rollout.logprobs[p, r, : len(response)])
            policy = torch.minimum(ratio * advantage[p, r], ratio.clamp(0.8, 1.2) * advantage[p, r])
            delta = logp.detach() - logp
            terms.append(-policy + 0.04 * (torch.exp(delta) - delta - 1))
    return torch.cat(terms).mean()


@pytest.mark.parametrize("name", CASES)
def test_gradient_and_update_are_those_of_a_whole_sequence_pass_and_of_torch(name: str) -> None:
    recorded = Recorded(plan_of(name))
    values = recorded.values
    model = oracle(recorded)
    taken = values["prompts"].take(values["rollout"].taken)
    loss = textbook_loss(model, taken, values["rollout"], values["score"])
    loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = recorded.gradients()
    assert found.keys() == trained.keys()
    assert max((found[n] - p.grad).abs().max().item() for n, p in trained.items()) < 1e-10
    assert all(p.grad.abs().max().item() > 1e-6 for p in trained.values())

    options = recorded.run.job.optimizer
    left = {n for n in trained if options.no_decay and (n.endswith(".bias") or "norm" in n or "ln_q" in n)}
    groups = [
        {"params": [p for n, p in trained.items() if n not in left], "weight_decay": 0.1},
        {"params": [p for n, p in trained.items() if n in left], "weight_decay": 0.0},
    ]
    adam = (torch.optim.Adam if name == ADAM else torch.optim.AdamW)([g for g in groups if g["params"]], lr=options.lr)
    clip_grad_norm_(trained.values(), options.clip_norm or 0.0)
    adam.step()
    assert max((recorded.after[n] - p).abs().max().item() for n, p in trained.items()) < 1e-8


def test_the_cases_are_what_their_names_say() -> None:
    plans = {name: plan_of(name) for name in CASES}
    sizes = {name: plan.summary.chunks.microbatch.suffix_responses for name, plan in plans.items()}
    assert sizes == {name: 1 if name == ONE_AT_A_TIME else 2 for name in CASES}
    places = {n: set(p.object("actor.prefix_saved").residency.values()) - {"-"} for n, p in plans.items()}
    assert places["saved in HBM"] == {"hbm"}
    assert places["dropped and recomputed"] == {"dropped"}
    assert places["saved on the host"] == places["frozen tower"] == places[ONE_AT_A_TIME] == {"host"}


def test_what_the_trainer_writes_is_what_rollout_reads_and_there_is_no_second_copy() -> None:
    run = InThreads(tiny_plan(), {"reward": luck})
    written, read = run.train._replicas["actor"].weights, read_by_rollout(run)
    assert written.keys() == read.keys()
    for name, weight in written.items():
        weight.view(-1)[-1] = 0.625
        assert read[name].view(-1)[-1] == 0.625
        assert read[name].data_ptr() != weight.data_ptr()
    assert run.train.objects.inodes() == run.rollout.objects.inodes()
    assert {entry.object for entry in run.device.live() if entry.process == "rollout 0"} == set()
    run.close()
