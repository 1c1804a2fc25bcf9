"""The package does what it says once it is installed beside Rollplex: pip install -e . && pytest"""

from __future__ import annotations

from pathlib import Path

import torch
from rollplex_example.shared_tokens import Savings, SharedTokens

from rollplex import api
from rollplex.ir.records import evaluate
from rollplex.passes.pipeline import PassReport

JOB = Path(__file__).parent.parent / "job.yaml"


def test_the_pass_stands_after_share_prefix() -> None:
    """Found by its entry point, with the package it came from."""
    rows = api.pass_rows()
    row = next(r for r in rows if r.name == SharedTokens.name)
    assert rows[rows.index(row) - 1].name == "share-prefix"
    assert row.package == "rollplex-example"


def test_the_saving_is_seven_of_eight_prefixes() -> None:
    """64 prompts of 4096 tokens, read by 8 responses each: 7 reads in 8 cost nothing."""
    seen: list[PassReport] = []
    api.compile_files("dr_grpo", JOB, on_pass=seen.append)
    (actor,) = next(r.module[Savings] for r in seen if r.name == "shared-tokens").roles
    assert (actor.role, actor.tokens) == ("actor", 64 * 7 * 4096)
    assert str(actor).endswith("1.84 M tokens a step are not computed again")


def test_the_loss_is_the_papers() -> None:
    """Centred scores, tokens summed over a constant budget, mean over responses; against plain torch."""
    plan = api.compile_files("dr_grpo", JOB, ["workload.group=3", "workload.prompts=4", "algorithm.budget=5"]).plan
    assert plan.feasible
    torch.manual_seed(0)
    logp, old = torch.randn(2, 4, 3, 5, dtype=torch.float64) / 4
    score, mask = torch.randn(4, 3, dtype=torch.float64), torch.rand(4, 3, 5) < 0.7
    ratio, advantage = (logp - old).exp(), (score - score.mean(1, keepdim=True))[:, :, None]
    clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    given = {"logp": logp, "score": score, "rollout": {"mask": mask, "logprobs": old}}
    found = evaluate(plan.graph, given, ["loss"])["loss"]
    torch.testing.assert_close(found, -(clipped * mask).sum(-1).div(5).mean())
