"""The loss of every example, and its gradient, equal the formula of its paper written out on plain tensors.

Each is computed twice: from the graph over the whole batch, and from the plan's data, prompt group by prompt group, the
prompts spread over two ranks that see only their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from algorithms import EXAMPLES, step_values, typed
from torch import Tensor

from rollplex import at_end, gae, sequence_mean, sequence_sum, whiten
from rollplex.ir.grouploss import group_loss, row_values, wide_values
from rollplex.ir.loading import load_algorithm
from rollplex.ir.loss import split_loss
from rollplex.ir.plan import LossPlan
from rollplex.ir.records import evaluate, to_records

torch.set_num_threads(1)
P, N, T = 4, 8, 7


def env() -> dict[str, Any]:
    """Two groups have equal answers, one of each kind; a response of each length there is."""
    random = torch.Generator().manual_seed(7)
    values = step_values(P, N, T, seed=3)
    values["values"] = torch.randn(P, N, T, generator=random, dtype=torch.float64)
    correct = torch.randint(0, 2, (P, N), generator=random).double()
    correct[1], correct[2], correct[0, :2] = 0.0, 1.0, torch.tensor([0.0, 1.0])
    return {**values, "correct": correct}


# ---- the formulas, in loops over prompts p, responses i and tokens t


def tokens(e: dict[str, Any]) -> list[tuple[int, int, int]]:
    lengths = e["rollout"]["lengths"]
    return [(p, i, t) for p in range(P) for i in range(N) for t in range(int(lengths[p, i]))]


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return torch.min(ratio * advantage, torch.clip(ratio, 1 - low, 1 + high) * advantage)


def group_advantage(score: Tensor, p: int, i: int) -> Tensor:
    return (score[p, i] - score[p].mean()) / (score[p].std() + 1e-6)


def grpo(e: dict[str, Any], score: str = "score") -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for p, i, t in tokens(e):
        ratio = (e["logp"][p, i, t] - e["rollout"]["logprobs"][p, i, t]).exp()
        delta = e["ref_logp"][p, i, t] - e["logp"][p, i, t]
        total = total - clipped(ratio, group_advantage(e[score], p, i), 0.2, 0.2) + 0.04 * (delta.exp() - delta - 1)
    return total / len(tokens(e))


def rloo(e: dict[str, Any]) -> Tensor:
    """arXiv 2402.14740: (R_i - mean of the other R_j) log pi(y_i | x), R less the KL of the whole response."""
    total = torch.zeros((), dtype=torch.float64)
    for p in range(P):
        rewards, logps = [], []
        for i in range(N):
            length = int(e["rollout"]["lengths"][p, i])
            kl = (e["rollout"]["logprobs"][p, i, :length] - e["ref_logp"][p, i, :length]).sum()
            rewards.append(e["score"][p, i] - 0.03 * kl)
            logps.append(e["logp"][p, i, :length].sum())
        for i in range(N):
            others = [rewards[j] for j in range(N) if j != i]
            total = total - (rewards[i] - torch.stack(others).mean()) * logps[i]
    return total / (P * N)


def reinforce_pp(e: dict[str, Any]) -> Tensor:
    """arXiv 2501.03262: r - beta sum_{s >= t} KL_s, normalised over all tokens, in PPO's clipped loss."""
    where, advantages = tokens(e), []
    for p, i, t in where:
        behind = slice(t, int(e["rollout"]["lengths"][p, i]))
        kl = (e["rollout"]["logprobs"][p, i, behind] - e["ref_logp"][p, i, behind]).sum()
        advantages.append(e["score"][p, i] - 0.01 * kl)
    a = torch.stack(advantages)
    a = (a - a.mean()) / (a.var(correction=0) + 1e-8).sqrt()
    total = torch.zeros((), dtype=torch.float64)
    for (p, i, t), advantage in zip(where, a, strict=True):
        ratio = (e["logp"][p, i, t] - e["rollout"]["logprobs"][p, i, t]).exp()
        total = total - clipped(ratio, advantage, 0.2, 0.2)
    return total / len(where)


def dapo(e: dict[str, Any]) -> Tensor:
    """arXiv 2503.14476, equations 8 to 13, with L_max 6 and L_cache 3."""
    longest, cache = 6, 3
    shaped = e["correct"].clone()
    for p in range(P):
        for i in range(N):
            length = int(e["rollout"]["lengths"][p, i])
            if length > longest:
                shaped[p, i] -= 1
            elif length > longest - cache:
                # lengths are whole numbers, whose quotient torch keeps in float32
                shaped[p, i] += torch.tensor(longest - cache - length) / cache
    total, count = torch.zeros((), dtype=torch.float64), 0
    for p, i, t in tokens(e):
        if not 0 < e["correct"][p].sum() < N:
            continue
        ratio = (e["logp"][p, i, t] - e["rollout"]["logprobs"][p, i, t]).exp()
        total, count = total - clipped(ratio, group_advantage(shaped, p, i), 0.2, 0.28), count + 1
    return total / count


def gspo(e: dict[str, Any]) -> Tensor:
    """arXiv 2507.18071, equations 5 to 7."""
    total = torch.zeros((), dtype=torch.float64)
    for p in range(P):
        for i in range(N):
            length = int(e["rollout"]["lengths"][p, i])
            likelihood = (e["logp"][p, i, :length].sum() - e["rollout"]["logprobs"][p, i, :length].sum()).exp()
            total = total - clipped(likelihood ** (1 / length), group_advantage(e["score"], p, i), 3e-4, 4e-4)
    return total / (P * N)


def ppo_advantages(e: dict[str, Any], gamma: float = 1.0, lam: float = 0.95) -> dict[tuple[int, int, int], Tensor]:
    """arXiv 1506.02438, equation 16, as the sum that defines it."""
    found = {}
    for p in range(P):
        for i in range(N):
            length = int(e["rollout"]["lengths"][p, i])
            v = [*e["values"][p, i, :length].detach(), torch.zeros((), dtype=torch.float64)]
            r = [-0.05 * (e["rollout"]["logprobs"][p, i, t] - e["ref_logp"][p, i, t]) for t in range(length)]
            r[-1] = r[-1] + e["score"][p, i]
            delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(length)]
            for t in range(length):
                found[p, i, t] = sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, length))
    return found


def ppo_actor(e: dict[str, Any]) -> Tensor:
    """arXiv 1707.06347, equation 7."""
    total = torch.zeros((), dtype=torch.float64)
    for (p, i, t), advantage in ppo_advantages(e).items():
        ratio = (e["logp"][p, i, t] - e["rollout"]["logprobs"][p, i, t]).exp()
        total = total - clipped(ratio, advantage, 0.2, 0.2)
    return total / len(tokens(e))


def ppo_critic(e: dict[str, Any]) -> Tensor:
    """arXiv 1707.06347, equation 9: the squared error against A + V_old."""
    total = torch.zeros((), dtype=torch.float64)
    for (p, i, t), advantage in ppo_advantages(e).items():
        target = advantage + e["values"][p, i, t].detach()
        total = total + 0.5 * (e["values"][p, i, t] - target) ** 2
    return total / len(tokens(e))


Formula = Callable[[dict[str, Any]], Tensor]
# Example, role, the value of its forward, the formula, parameters other than n.
CASES: list[tuple[str, str, str, Formula, dict[str, Any]]] = [
    ("grpo", "actor", "logp", grpo, {}),
    ("grpo_reward_model", "actor", "logp", grpo, {}),
    ("rloo", "actor", "logp", rloo, {}),
    ("reinforce_pp", "actor", "logp", reinforce_pp, {}),
    ("dapo", "actor", "logp", dapo, {"longest": 6, "cache": 3}),
    ("gspo", "actor", "logp", gspo, {}),
    ("ppo", "actor", "logp", ppo_actor, {}),
    ("ppo", "critic", "values", ppo_critic, {}),
]
IDS = [f"{name} {role}" for name, role, *_ in CASES]


def expected(formula: Formula, forward: str) -> tuple[Tensor, Tensor]:
    e = env()
    e[forward] = e[forward].clone().requires_grad_()
    loss = formula(e)
    loss.backward()
    return loss.detach(), e[forward].grad


@pytest.mark.parametrize(("name", "role", "forward", "formula", "params"), CASES, ids=IDS)
def test_the_graph_is_the_formula(name: str, role: str, forward: str, formula: Formula, params: dict[str, Any]) -> None:
    """All prompts at once: the value, and the gradient of the role's own forward."""
    graph = typed(load_algorithm(EXAMPLES / f"{name}.py"), {"n": N, **params}).graph
    e = env()
    e[forward] = e[forward].clone().requires_grad_()
    wanted = split_loss(graph, role).loss
    loss = evaluate(to_records(graph), e, [wanted])[wanted]
    loss.backward()
    value, gradient = expected(formula, forward)
    assert gradient.abs().max() > 0
    assert loss.item() == pytest.approx(value.item(), abs=1e-12)
    assert (e[forward].grad - gradient).abs().max() < 1e-12


@pytest.mark.parametrize(("name", "role", "forward", "formula", "params"), CASES, ids=IDS)
def test_the_plan_is_the_formula(name: str, role: str, forward: str, formula: Formula, params: dict[str, Any]) -> None:
    """Prompt group by prompt group, on two ranks, from the plan's JSON."""
    graph = typed(load_algorithm(EXAMPLES / f"{name}.py"), {"n": N, **params}).graph
    plan = LossPlan.model_validate_json(split_loss(graph, role).model_dump_json())
    e, total = env(), 0.0
    gradient = torch.zeros_like(e[forward])
    wide = wide_values(plan, {given: e[given] for given in plan.wide_inputs})
    for mine in torch.arange(P).chunk(2):
        local = {k: v[mine] for k, v in e.items() if k not in ("rollout", forward)}
        local["rollout"] = {k: v[mine] for k, v in e["rollout"].items()}
        rows = row_values(plan, local, wide)
        for group, prompt in enumerate(mine.tolist()):
            own = e[forward][prompt : prompt + 1].clone().requires_grad_()
            loss = group_loss(plan, rows, {forward: own}, group)
            loss.backward()
            total, gradient[prompt] = total + loss.item(), own.grad[0]
    value, right = expected(formula, forward)
    assert total == pytest.approx(value.item(), abs=1e-12)
    assert (gradient - right).abs().max() < 1e-12


# ---- the ops


def test_sequence_sums_and_means_leave_padding_out() -> None:
    """Padding may hold anything, nan included; a response without tokens has mean 0."""
    x = torch.tensor([[[1.0, 3.0, float("nan")], [5.0, float("inf"), 2.0]]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[[True, True, False], [False, False, False]]])
    assert sequence_sum(x, mask).tolist() == [[4.0, 0.0]]
    assert sequence_mean(x, mask).tolist() == [[2.0, 0.0]]
    sequence_mean(x, mask).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]]


def test_a_score_is_put_on_the_last_token() -> None:
    mask = torch.tensor([[[True, True, False], [True, False, False], [True, True, True]]])
    score = torch.tensor([[2.0, 3.0, 4.0]])
    assert at_end(score, mask).tolist() == [[[0, 2, 0], [3, 0, 0], [0, 0, 4]]]
    assert at_end(score[..., None], mask).equal(at_end(score, mask))


def test_gae_takes_scores_or_rewards_and_passes_masked_positions_over() -> None:
    """A score of 1, values 0: gamma = lam = 0.5 halve it twice a step; a tool's tokens in between do not count."""
    mask = torch.tensor([[[True, False, True, True, False]]])
    zeros, score = torch.zeros(1, 1, 5), torch.ones(1, 1)
    assert gae(score, zeros, mask, 0.5, 0.5).tolist() == [[[1 / 16, 0, 1 / 4, 1, 0]]]
    assert gae(at_end(score, mask), zeros, mask, 0.5, 0.5).equal(gae(score, zeros, mask, 0.5, 0.5))
    values = torch.randn(1, 1, 5, requires_grad=True)
    assert not gae(score, values, mask).requires_grad


def test_whitened_values_have_mean_zero_and_variance_one() -> None:
    x, mask = torch.randn(3, 4, 5, dtype=torch.float64), torch.rand(3, 4, 5) > 0.4
    found = whiten(x, mask)[mask]
    assert found.mean().item() == pytest.approx(0, abs=1e-12)
    assert found.var(correction=0).item() == pytest.approx(1, abs=1e-6)
