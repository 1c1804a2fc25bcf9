"""Roles with a scalar head, a model or weights of their own: what they begin with, what is refused, over two ranks too.

critic   the trunk of run.weights, a drawn head       judge   a model of its own, from its own directory
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from algorithm_runs import ACTOR, REFERENCE, ROLES, SMALLER, Watched, job_of, plan_of
from processes import children
from runtime_tiny import luck
from safetensors.torch import save_file
from torch import Tensor

from rollplex.backends.collectives import Groups
from rollplex.backends.data.rollout import Rollout
from rollplex.backends.hf.fit import check_fit
from rollplex.backends.training.loss import Scores, StepLoss
from rollplex.backends.training.placement import check_weights
from rollplex.ir.errors import JobError
from rollplex.ir.job import Job
from rollplex.ir.placement import Seat
from rollplex.ir.tensors import model_tensors
from rollplex.runtime.run import run_plan

torch.set_num_threads(1)
LABELS = {"actor": "", "critic": "critic_"}


def stored(job: Job, role: str, without: str = "") -> str:
    """A directory with random weights of a role's model."""
    folder, random = Path(mkdtemp(prefix="rollplex-test-")), torch.Generator().manual_seed(3)
    tensors = model_tensors(job.spec_of(role))
    made = {t.name: torch.rand(t.shape, generator=random) for t in tensors if not (without and t.name == without)}
    save_file(made, folder / "model.safetensors")
    return str(folder)


def plus(roles: Mapping[str, Any], role: str, **keys: Any) -> dict[str, Any]:
    return {**roles, role: {**roles[role], **keys}}


# ---- what they begin with


def test_a_reward_model_has_the_weights_of_its_own_directory() -> None:
    job = job_of("grpo_reward_model", roles=plus(ROLES["grpo_reward_model"], "judge", head="scalar"))
    own = stored(job, "judge")
    watched = Watched(plan_of("grpo_reward_model", roles=plus(ROLES["grpo_reward_model"], "judge", weights=own)))
    weights = watched.weights("judge")
    random = torch.Generator().manual_seed(3)
    assert all(torch.equal(weights[t.name], torch.rand(t.shape, generator=random).double()) for t in tensors_of(job))
    assert weights["score.weight"].shape == (1, 32)
    assert len(watched.weights("actor")) > len(weights)  # the judge has one layer, the policy two
    watched.run.close()


def tensors_of(job: Job) -> Iterator[Any]:
    yield from model_tensors(job.spec_of("judge"))


def test_a_critic_begins_with_the_trunk_of_the_run_and_a_head_of_its_own() -> None:
    trunk = stored(job_of("grpo"), "actor")
    watched = Watched(plan_of("ppo", run={"weights": trunk}))
    actor, critic = watched.weights("actor"), watched.weights("critic")
    assert critic.keys() - actor.keys() == {"score.weight"}
    assert actor.keys() - critic.keys() == {"lm_head.weight"}
    assert all(torch.equal(w, actor[n]) for n, w in critic.items() if n != "score.weight")
    assert 0 < critic["score.weight"].std().item() < 0.05  # drawn with deviation 0.02
    watched.run.close()


# ---- what is refused


def test_a_frozen_reward_model_without_a_head_is_refused_and_told_where_to_name_one() -> None:
    trunk = stored(job_of("grpo"), "actor")
    roles = {**ACTOR, **REFERENCE, "judge": {"score": {"engine": "host"}, "head": "scalar"}}
    with pytest.raises(JobError, match=r"no weight score.weight\n    try: .* directory: roles.judge.weights"):
        check_weights(job_of("grpo_reward_model", roles=roles, run={"weights": trunk}))


def test_weights_of_another_model_are_refused_role_by_role() -> None:
    judge = plus(ROLES["grpo_reward_model"], "judge", head="scalar")
    other = stored(job_of("grpo"), "actor")
    with pytest.raises(JobError) as caught:
        check_weights(job_of("grpo_reward_model", roles=plus(judge, "judge", weights=other)))
    message = str(caught.value)
    assert "no weight score.weight" in message
    assert "mlp.gate_proj.weight is [48, 32], the model needs [40, 32]" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"video_token_id": 5}, "video_token_id is 5, the policy's 263"),
        ({"vocab_size": 200}, "it has 200 tokens, the policy samples from 264"),
        ({"vision_config": {**SMALLER["vision_config"], "patch_size": 7}}, "patch_size is 7, the policy's 14"),
        ({"model_type": "llama"}, "the host backend runs model_type qwen2_5_vl, not 'llama'"),
    ],
)
def test_a_model_that_reads_something_else_than_the_policy_is_refused(change: dict[str, Any], message: str) -> None:
    roles = plus(ROLES["grpo_reward_model"], "judge", model={"name": "other", "config": {**SMALLER, **change}})
    with pytest.raises(JobError, match=message):
        check_fit(job_of("grpo_reward_model", roles=roles))


def test_a_role_whose_model_is_only_a_name_is_refused() -> None:
    roles = plus(ROLES["grpo_reward_model"], "judge", model={"name": "Qwen2.5-VL-7B"})
    with pytest.raises(JobError, match=r"roles.judge.model.name: the model Qwen2.5-VL-7B is known by its sizes only"):
        check_fit(job_of("grpo_reward_model", roles=roles))


# ---- several ranks


def in_ranks(work: Callable[[Groups, int], Tensor]) -> list[Tensor]:
    """Two ranks of a dp group in threads."""
    barrier, parts, found = threading.Barrier(2, timeout=20), dict[int, Tensor](), dict[int, Tensor]()

    class Pair(Groups):
        def all_gather(self, name: str, values: Tensor) -> Tensor:
            assert name == "dp"
            parts[self.rank] = values
            barrier.wait()
            return torch.cat([parts[0], parts[1]], dim=-1)

    def one(rank: int) -> None:
        found[rank] = work(Pair(rank), rank)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[0], found[1]]


def test_whitening_over_the_batch_takes_the_prompts_of_all_ranks() -> None:
    """REINFORCE++ on four prompts: two ranks of two prompts find the gradients of one rank of four."""
    plan, random = plan_of("reinforce_pp"), torch.Generator().manual_seed(0)
    shape = (4, 3, 10)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64)

    lengths = torch.randint(2, 11, shape[:2], generator=random)
    tokens = torch.zeros(shape, dtype=torch.int64)
    rollout = Rollout(tokens, lengths, draw(*shape), torch.arange(4), torch.ones(shape, dtype=torch.int32))
    ref, score = draw(*shape), draw(4, 3)
    logp = rollout.logprobs + 0.1 * draw(*shape)
    (node,) = plan.losses["actor"].forward
    ref_node = next(n for n in plan.losses["actor"].wide_inputs if n not in ("rollout", "score"))

    def gradients(ranks: Groups, own: range) -> Tensor:
        scores = Scores(plan, Seat(0, own.start // len(own), 0, own, own), ranks)
        loss = StepLoss(plan.losses["actor"], scores)
        for m, prompt in enumerate(own):
            scores.score(ref_node, m, ref[prompt : prompt + 1])
        found = [logp[p : p + 1].clone().requires_grad_() for p in own]
        for m, x in enumerate(found):
            values = {"rollout": rollout, "score": score, ref_node: scores.scored(ref_node)}
            loss.backward({node: x}, m, values)
        return torch.cat([x.grad for x in found if x.grad is not None])

    one = gradients(Groups(), range(4))
    two = in_ranks(lambda ranks, rank: gradients(ranks, range(2 * rank, 2 * rank + 2)))
    assert one.abs().max() > 1e-3
    assert torch.equal(torch.cat(two), one)


def test_ppo_over_processes_on_two_gpus_takes_the_steps_of_one_in_threads(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"workload": {"prompts": 4, "group": 2, "response_tokens": 4}}
    watched, one = Watched(plan_of("ppo", **changes), ends=None), []
    for k in range(2):
        watched.step(k)
        row = {f"{label}loss": watched.loss(role) for role, label in LABELS.items()}
        one.append(row | {f"{label}grad_norm": watched.norm(role) for role, label in LABELS.items()})
    watched.run.close()
    plan = plan_of("ppo", **changes, cluster={"gpus_per_node": 2})
    two = run_plan(plan, hosts={"reward": luck}, out_dir=tmp_path / "r")
    for ours, theirs in zip(two.report.metrics, one, strict=True):
        assert {n: ours[n] for n in theirs} == pytest.approx(theirs, abs=1e-10)
    assert two.report.memory_as_planned
    assert {"critic.snapshot", "critic.master", "critic.exp_avg", "actor.master"} < two.digests.keys()
    assert children() == []
