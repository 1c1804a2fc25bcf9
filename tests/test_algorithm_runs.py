"""Every algorithm of examples/ trains on the host engine: three steps are those of a textbook trainer (textbook.py)."""

from __future__ import annotations

import pytest
import torch
from algorithm_runs import ROLES, Watched, in_pieces, leaving_plan_of, plan_of, tight_plan_of
from runtime_tiny import SHORT, luck

from rollplex.ir.plan import Plan

torch.set_num_threads(1)
STEPS = 3


@pytest.mark.parametrize("name", ROLES)
def test_three_steps_are_those_of_the_textbook(name: str) -> None:
    compare(name, plan_of(name), STEPS)


@pytest.mark.parametrize("name", ["ppo", "embodied"])
def test_under_tight_memory_two_steps_are_those_of_the_textbook(name: str) -> None:
    """Several trained roles, and turns: state and frozen weights on the host, chunks through workspaces."""
    plan = tight_plan_of(name)
    places = {o.name: set(o.residency.values()) for o in plan.summary.objects}
    trained = {"ppo": ("actor", "critic"), "embodied": ("actor",)}[name]
    assert all("host" in places[f"{role}.{what}"] for role in trained for what in ("prefix_saved", "master", "moments"))
    assert all("hbm" in places[o] and "host" in places[o] for o in ("reference.weights", "reference.vision"))
    assert all(plan.summary.chunks.of(role).count > 1 for role in trained)
    compare(name, plan, 2)


CHUNKS = {"serial": 2, "rollplex": 2, "streamed": 1}
"""Chunks of an update that has no room for gradients, at the least memory that each schedule runs in."""


@pytest.mark.parametrize("schedule", ["serial", "rollplex"])
def test_gradients_of_two_roles_leave_in_pieces_and_two_steps_are_those_of_the_textbook(schedule: str) -> None:
    """The critic's and then the actor's, each beside its last backward; both wait at the host for their updates."""
    plan = leaving_plan_of("ppo", schedule=schedule, optimizer={"chunks": CHUNKS[schedule]})
    assert all(plan.object(f"{role}.gradients").residency["P3 update-critic"] == "host" for role in ("actor", "critic"))
    compare("ppo", plan, 2)


def test_gradients_that_left_in_pieces_come_back_whole_and_two_steps_are_those_of_the_textbook() -> None:
    """The critic's make room for the actor's work, and are in HBM again for their update."""
    plan = plan_of("ppo", schedule="serial", cluster={"capacity_gib": "4812 KiB"})
    places = plan.object("critic.gradients").residency
    train, between, update = (places[w] for w in ("P2 train-critic", "P2 train-actor", "P3 update-critic"))
    assert (train, between, update) == ("hbm", "host", "hbm")
    assert list(in_pieces(plan)) == ["critic"]
    assert plan.summary.times.hidden_offload_s > 0
    compare("ppo", plan, 2)


def test_gradients_of_two_roles_that_leave_in_pieces_give_the_bits_of_those_that_stay() -> None:
    """Under every schedule, whatever its chunks."""
    single = {"dtype": "float32"}
    plans = [leaving_plan_of("ppo", schedule=s, model=single, optimizer={"chunks": n}) for s, n in CHUNKS.items()]
    plans.append(plan_of("ppo", model=single, workload=SHORT))
    assert in_pieces(plans[-1]) == {}
    found = []
    for plan in plans:
        watched = Watched(plan)
        for k in range(STEPS):
            watched.run.step(k)
        found.append((watched.digests(), [watched.norm(role) for role in ("actor", "critic")]))
        watched.run.close()
    assert found[1:] == found[:1] * 3


def compare(name: str, plan: Plan, steps: int) -> None:
    """A run's samples, losses, norms and weights with the textbook's, step by step, and its bytes with the plan."""
    watched = Watched(plan)
    book = watched.textbook(name)
    lengths = set[int]()
    for k in range(steps):
        watched.step(k)
        seen = book.step(watched.prompts, watched.rollouts, watched.histories, luck)
        for turn, rollout in enumerate(watched.rollouts):
            lengths |= set(rollout.lengths.flatten().tolist())
            for p, r in seen.each():
                old = seen.old[(p, r, turn) if len(watched.rollouts) > 1 else (p, r)]
                assert torch.allclose(rollout.logprobs[p, r, : len(old)], old, rtol=0, atol=1e-10)
        for role in watched.run.job.trained:
            assert watched.loss(role) == pytest.approx(book.losses[role], abs=1e-10)
            assert watched.norm(role) == pytest.approx(book.norms[role], abs=1e-10)
            assert book.norms[role] > 1e-3
            now = watched.weights(role)
            assert max((now[n] - p).abs().max().item() for n, p in book.models[role].parameters.items()) < 1e-10
    assert len(lengths) > 2
    assert all(row.as_planned for row in watched.run.log.objects(watched.run.plan))
    watched.run.close()


@pytest.mark.parametrize("name", ROLES)
def test_serial_and_rollplex_take_the_same_steps_to_the_bit(name: str) -> None:
    found = []
    for schedule in ("serial", "rollplex"):
        watched = Watched(plan_of(name, schedule=schedule, model={"dtype": "float32"}))
        for k in range(STEPS):
            watched.step(k)
        found.append(watched.digests())
        watched.run.close()
    assert found[0] == found[1]
    assert {f"{role}.master" for role in watched.run.job.trained} < found[0].keys()
