"""Turn by turn on boundaries that extend each other, the loss and its gradient are those of whole trajectories.

    prompt | response 1 | observation | response 2 | observation | response 3        one sequence a trajectory
    ------------------  piece 1 (of the prompt, shared), piece 2, piece 3: keys and values, cut as leaves of autograd
                 suffix of turn t: last token of history t and response t, on pieces 1 .. t
Suffixes run backward into the leaves, then pieces backward from the last to the first; all of it in float64 and torch.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from algorithms import EXAMPLES, typed
from test_algorithm_maths import clipped, group_advantage
from torch import Tensor, nn

from rollplex.ir.grouploss import group_loss, row_values, wide_values
from rollplex.ir.loading import load_algorithm
from rollplex.ir.loss import split_loss
from rollplex.ir.plan import LossPlan
from rollplex.ir.records import evaluate, to_records

torch.set_num_threads(1)
P, N, TURNS = 2, 3, 3
PROMPT, RESPONSE, SEEN = 6, 4, 3
LAYERS, HEADS, WIDTH, VOCAB = 2, 2, 16, 19
JOB = (f"workload.group={N}", f"workload.turns.count={TURNS}", "workload.turns.observation_tokens=3")
Boundary = list[tuple[Tensor, Tensor]]


class Tiny(nn.Module):
    """A causal transformer: learned positions, two layers, keys and values of earlier tokens given."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.mlp = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, start: int, before: Boundary) -> tuple[Tensor, Boundary]:
        """Log-probabilities [rows, t, vocab] of `ids` [rows, t] at places from `start`, and their keys and values."""
        x = self.tokens(ids) + self.places(torch.arange(start, start + ids.shape[1]))
        made: Boundary = []
        for layer in range(LAYERS):
            q, k, v = (self._heads(y) for y in self.qkv[layer](nn.functional.layer_norm(x, (WIDTH,))).chunk(3, -1))
            made.append((k, v))
            if before:
                old_k, old_v = (old.expand(len(ids), -1, -1, -1) for old in before[layer])
                k, v = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)
            x = x + self.out[layer](self._attend(q, k, v))
            x = x + self.mlp[layer](torch.tanh(nn.functional.layer_norm(x, (WIDTH,))))
        return self.head(x).log_softmax(-1), made

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t, s = q.shape[2], k.shape[2]
        seen = torch.ones(t, s, dtype=torch.bool).tril(s - t)
        found = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf")).softmax(-1) @ v
        return found.transpose(1, 2).flatten(-2)


def model() -> Tiny:
    torch.manual_seed(11)
    return Tiny().double()


def ids(*shape: int, seed: int) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


PROMPTS, RESPONSES, OBSERVED = (
    ids(P, PROMPT, seed=1),
    ids(TURNS, P, N, RESPONSE, seed=2),
    ids(TURNS, P, N, SEEN, seed=3),
)


def history(turn: int, prompt: int) -> Tensor:
    """Token ids [group, tokens] before the response of a turn, counted from 0."""
    parts = [PROMPTS[prompt].expand(N, -1)]
    for t in range(turn):
        parts += [RESPONSES[t, prompt], OBSERVED[t, prompt]]
    return torch.cat(parts, 1)


def values() -> dict[str, Any]:
    """What hosts and samplers give: a score a trajectory, responses of different lengths, one trajectory that ended."""
    random = torch.Generator().manual_seed(5)
    found: dict[str, Any] = {"host": torch.randn(P, N, generator=random, dtype=torch.float64)}
    for t, (rollout, reference) in enumerate(zip(names("rollout"), names("ref_logp"), strict=True)):
        lengths = torch.randint(1, RESPONSE + 1, (P, N), generator=random)
        lengths[0, 0] = lengths[0, 0] if t < TURNS - 1 else 0
        old = -torch.randn(P, N, RESPONSE, generator=random, dtype=torch.float64).abs()
        mask = torch.arange(RESPONSE) < lengths[..., None]
        found[rollout] = {"tokens": RESPONSES[t], "mask": mask, "lengths": lengths, "logprobs": old}
        found[reference] = old - 0.1
    return found


def names(value: str) -> list[str]:
    return [value if t == 0 else f"{value}_{t}" for t in range(TURNS)]


def formula(e: dict[str, Any]) -> Tensor:
    """GRPO's terms of every response token of every turn, in loops: one token, one vote."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for rollout, reference, logp in zip(names("rollout"), names("ref_logp"), names("logp"), strict=True):
        for p, i, t in e[rollout]["mask"].nonzero().tolist():
            ratio = (e[logp][p, i, t] - e[rollout]["logprobs"][p, i, t]).exp()
            delta = e[reference][p, i, t] - e[logp][p, i, t]
            advantage = group_advantage(e["host"], p, i)
            total = total - clipped(ratio, advantage, 0.2, 0.2) + 0.04 * (delta.exp() - delta - 1)
            count += 1
    return total / count


def whole_logprobs(m: Tiny) -> dict[str, Tensor]:
    """Of every turn [prompt, group, response], from one forward over each whole trajectory."""
    found: dict[str, list[Tensor]] = {name: [] for name in names("logp")}
    for p in range(P):
        sequence = torch.cat([history(TURNS - 1, p), RESPONSES[TURNS - 1, p]], 1)
        logp, _ = m(sequence, 0, [])
        for t, name in enumerate(names("logp")):
            start = history(t, p).shape[1] - 1
            found[name].append(logp[:, start : start + RESPONSE].gather(-1, RESPONSES[t, p][..., None])[..., 0])
    return {name: torch.stack(rows) for name, rows in found.items()}


def leaf(boundary: Boundary) -> Boundary:
    return [(k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in boundary]


def joined(pieces: list[Boundary]) -> Boundary:
    """The keys and values of several pieces, each layer's one behind the other."""
    return [
        tuple(torch.cat([piece[layer][i].expand(N, -1, -1, -1) for piece in pieces], 2) for i in (0, 1))
        for layer in range(LAYERS if pieces else 0)
    ]  # type: ignore[misc]


class Group:
    """One prompt group as a plan runs it: prefixes turn by turn, then suffixes, then prefix backwards in reverse."""

    def __init__(self, m: Tiny, prompt: int) -> None:
        self.m, self.prompt = m, prompt
        self.made: list[Boundary] = []
        self.leaves: list[Boundary] = []
        self.inputs: list[list[Boundary]] = []

    def prefix(self, turn: int) -> None:
        """A piece: the prompt but its last token once, then what is new in every history, on leaves of those before."""
        done = 0 if turn == 0 else history(turn - 1, self.prompt).shape[1] - 1
        new = history(turn, self.prompt)[:, done:-1] if turn else PROMPTS[self.prompt][None, :-1]
        _, made = self.m(new, done, joined(self.leaves))
        self.made.append(made)
        self.leaves.append(leaf(made))

    def suffix(self, turn: int) -> Tensor:
        """Log-probabilities [1, group, response] of a turn, on its piece and all before."""
        start = history(turn, self.prompt).shape[1] - 1
        given = torch.cat([history(turn, self.prompt)[:, -1:], RESPONSES[turn, self.prompt][:, :-1]], 1)
        logp, _ = self.m(given, start, joined(self.leaves[: turn + 1]))
        return logp.gather(-1, RESPONSES[turn, self.prompt][..., None])[..., 0][None]

    def prefix_backward(self, turn: int) -> None:
        """The gradient of a piece goes back into the weights, and into the leaves of the pieces that it extends."""
        pairs = [(y, x.grad) for y, x in zip(chain(*self.made[turn]), chain(*self.leaves[turn]), strict=True)]
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])


def gradient(m: Tiny) -> Tensor:
    return torch.cat([w.grad.flatten() for w in m.parameters()])  # type: ignore[union-attr]


def graph() -> Any:
    return typed(load_algorithm(EXAMPLES / "embodied.py"), {"n": N, "turns": TURNS}, *JOB).graph


def test_the_graph_is_the_formula_over_whole_trajectories() -> None:
    """Value and gradient of the weights: the traced loss, and loops over tokens."""
    found, traced = [], graph()
    wanted_node = split_loss(traced).loss
    for loss in (formula, lambda e: evaluate(to_records(traced), e, [wanted_node])[wanted_node]):
        m = model()
        value = loss({**values(), **whole_logprobs(m)})
        value.backward()
        found.append((value.item(), gradient(m)))
    (wanted, right), (made, ours) = found
    assert made == pytest.approx(wanted, abs=1e-12)
    assert right.abs().max() > 1e-3
    assert (ours - right).abs().max() < 1e-10


@pytest.mark.parametrize("cut", [False, True], ids=["joined", "one turn at a time"])
def test_cut_boundaries_give_the_gradient_of_whole_trajectories(cut: bool) -> None:
    """Group by group, from the plan's JSON; `one turn at a time`: each suffix runs its backward by itself."""
    m, e = model(), values()
    formula({**e, **whole_logprobs(m)}).backward()
    right = gradient(m)
    m.zero_grad()
    plan = LossPlan.model_validate_json(split_loss(graph()).model_dump_json())
    assert plan.forward == tuple(names("logp"))
    rows = row_values(plan, e, wide_values(plan, {given: e[given] for given in plan.wide_inputs}))
    total = 0.0
    for p in range(P):
        group = Group(m, p)
        for t in range(TURNS):
            group.prefix(t)
        total += suffixes(group, plan, rows, p, cut)
        for t in reversed(range(TURNS)):
            group.prefix_backward(t)
    assert total == pytest.approx(formula({**e, **whole_logprobs(m)}).item(), abs=1e-12)
    assert (gradient(m) - right).abs().max() < 1e-10


def suffixes(group: Group, plan: LossPlan, rows: Any, p: int, cut: bool) -> float:
    """The loss of a group and its backward into weights and leaves: of all turns at once, or turn by turn."""
    if not cut:
        loss = group_loss(plan, rows, {name: group.suffix(t) for t, name in enumerate(plan.forward)}, p)
        loss.backward()
        return loss.item()
    with torch.no_grad():
        forward = {name: group.suffix(t) for t, name in enumerate(plan.forward)}
    seeds = {name: x.requires_grad_() for name, x in forward.items()}
    loss = group_loss(plan, rows, seeds, p)
    loss.backward()
    for t, name in enumerate(plan.forward):
        group.suffix(t).backward(seeds[name].grad)
    return loss.item()


def test_a_boundary_that_is_not_extended_gives_another_gradient() -> None:
    """The test can fail: without the backward of the later pieces, the gradient lacks what went through them."""
    m, e = model(), values()
    formula({**e, **whole_logprobs(m)}).backward()
    right = gradient(m)
    m.zero_grad()
    plan = split_loss(graph())
    rows = row_values(plan, e, wide_values(plan, {given: e[given] for given in plan.wide_inputs}))
    for p in range(P):
        group = Group(m, p)
        for t in range(TURNS):
            group.prefix(t)
        suffixes(group, plan, rows, p, cut=False)
        group.prefix_backward(0)
    assert (gradient(m) - right).abs().max() > 1e-4
