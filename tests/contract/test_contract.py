"""One suite of contracts for every combination (combinations.py): what a run is, judged by what it leaves.

gradients      of the first step, against one pass of transformers over whole sequences, in one process
updates        weights behind two steps, against torch.optim on whole parameters
schedules      serial = rollplex = streamed, to the bit
pages          both engines read one physical copy, which ranks of its shard write into; what rollout sampled has
               transformers' probabilities under it
bytes          every object in every window is what the plan says, at its place in the pinned pool, and nobody has a
               second copy
layout         the case that each class of weights is said to be, and no buffer where rows are re-indexed
collectives    the ranks of a kind enter the same ones in the same order, those of the plan
"""

from __future__ import annotations

import pytest
import torch
from combinations import BOUND, COMBINATIONS, STEPS, Combination, plan_of
from evidence import book, ended, laid_out, ran
from vllm_tiny import needs_vllm

from rollplex.ir.placement import peers
from rollplex.ir.steps import Exchange, Run, UnmapPart
from rollplex.runtime.protocol import ProcessId

RUN = [
    pytest.param(c, marks=needs_vllm if c.roller == "vllm" else pytest.mark.xdist_group(str(c))) for c in COMBINATIONS
]
pytestmark = [pytest.mark.processes, pytest.mark.parametrize("of", RUN, ids=str)]
torch.set_num_threads(1)


def test_gradients_are_those_of_one_process_on_whole_sequences(of: Combination) -> None:
    """Behind one step Adam's first moment is 1 - beta1 times the clipped gradient, on each rank its part of it."""
    run, reference = ran(of, "rollplex"), book(of)
    beta, most = run.job.optimizer.betas[0], run.job.optimizer.clip_norm
    for role in run.job.trained:
        wanted, norm = reference.gradients[0][role], reference.norms[0][role]
        assert all(g.abs().max() > 1e-7 for g in wanted.values()), "a parameter without a gradient tests nothing"
        clip = 1.0 if most is None else min(1.0, most / (norm + 1e-6))
        covered = set[tuple[int, int]]()
        for tp, own, moment in run.first_moments(role):
            whole = laid_out(run, role, tp, wanted)
            found = moment.double() / (1 - beta) / clip
            assert (found - whole[own.start : own.stop]).abs().max() <= BOUND[of.dtype]
            covered |= {(tp, at) for at in own}
        assert len(covered) == sum(len(laid_out(run, role, tp, wanted)) for tp in range(of.train))
    assert most is None or max(reference.norms[0].values()) > most, "nothing is clipped"


def test_losses_norms_and_weights_of_two_steps_are_torchs(of: Combination) -> None:
    run, reference = ran(of, "rollplex"), book(of)
    for step, metrics in enumerate(run.result.report.metrics):
        for role in run.job.trained:
            label = "" if role == run.job.policy else f"{role}_"
            assert metrics[f"{label}loss"] == pytest.approx(reference.losses[step][role], abs=BOUND[of.dtype])
            assert metrics[f"{label}grad_norm"] == pytest.approx(reference.norms[step][role], abs=BOUND[of.dtype])
    for role in run.job.trained:
        weights, wanted = ended(run, role), reference.textbook.models[role].parameters
        assert weights.keys() == wanted.keys()
        assert max((weights[n].double() - p).abs().max().item() for n, p in wanted.items()) <= BOUND[of.dtype]


def test_every_schedule_takes_the_same_steps_to_the_bit(of: Combination) -> None:
    """Weights, moments and samples of every rank; some response is shorter than another."""
    one, *others = (ran(of, schedule) for schedule in of.schedules)
    for other in others:
        assert other.result.digests == one.result.digests
        for a, b in zip(one.result.report.metrics, other.result.report.metrics, strict=True):
            for name in ("reward", "loss", "grad_norm", "response_tokens"):
                assert a[name] == b[name], name
    assert len({int(n) for rollout in ran(of, "rollplex").rollouts for n in rollout.lengths.flatten()}) > 2


def test_rollout_samples_under_the_pages_that_training_wrote(of: Combination) -> None:
    """In both steps, the second under theta_1: sampled log-probabilities are transformers' under the same weights."""
    run, reference = ran(of, "rollplex"), book(of)
    assert len(run.rollouts) == STEPS
    for rollout, wanted in zip(run.rollouts, reference.logprobs, strict=True):
        for (p, r), logp in wanted.items():
            assert (rollout.logprobs[p, r, : len(logp)].double() - logp).abs().max() <= BOUND[of.dtype]


def test_both_engines_of_a_gpu_hold_the_same_pages_and_nothing_is_there_twice(of: Combination) -> None:
    for schedule in of.schedules:
        run = ran(of, schedule)
        pages = {process: facts["inodes"] for process, facts in run.result.facts.items()}
        for gpu in range(of.gpus):
            assert pages[ProcessId("train", gpu)] == pages[ProcessId("rollout", gpu)]
            assert {"actor.snapshot", "actor.vision"} <= set(pages[ProcessId("train", gpu)])
        assert len({str(inodes) for inodes in pages.values()}) == of.gpus
        for gpu in range(of.gpus):
            wanted = {rank: pages[ProcessId("train", rank)]["actor.snapshot"] for rank in peers(run.job, gpu)}
            assert run.result.facts[ProcessId("train", gpu)]["peers"] == wanted
            assert len(wanted) == of.train // of.rollout - 1
        of_rollout = {o.name for o in plan_of(of, schedule).summary.objects if o.process == "rollout"}
        assert of_rollout == {"rollout.kv", "rollout.runtime"}, "no weights of its own"


def test_every_object_in_every_window_has_the_bytes_of_the_plan(of: Combination) -> None:
    for schedule in of.schedules:
        report = ran(of, schedule).result.report
        assert [row for row in report.objects if not row.as_planned] == []
        assert [(w.window, w.planned) for w in report.memory] == [(w.window, w.measured) for w in report.memory]
        assert [p for p in report.pieces if p.planned != p.measured] == []
        assert [p for p in report.places if p.planned != p.measured] == []
        at_host = {o.name for o in plan_of(of, schedule).summary.objects if "host" in o.residency.values()}
        assert at_host <= {p.object for p in report.places}
        permanent = [row for row in report.objects if not row.temporary and row.planned]
        assert {"actor.snapshot", "actor.gradients", "rollout.kv"} <= {row.object for row in permanent if row.measured}


def test_ranks_enter_the_collectives_of_the_plan_in_its_order(of: Combination) -> None:
    """What each combination needs and no more: sums over copies, shares sent back, slabs written to peers."""
    for schedule in of.schedules:
        run, plan = ran(of, schedule), plan_of(of, schedule)
        planned = [s for s in plan.programs["train"] if isinstance(s, Exchange)]
        entered = [run.exchanges.get(ProcessId("train", rank), []) for rank in range(of.gpus)]
        assert all(steps == planned * STEPS for steps in entered)
        reduce, sent = ("reduce_scatter", {("dp", "all_gather")}) if of.shares else ("all_reduce", set())
        needed = sent | (set() if of.pieces else {("dp", reduce)})
        needed = (needed if of.copies > 1 else set()) | ({("q", "write")} if of.train > of.rollout else set())
        assert {(s.group, s.op) for s in planned} == needed
        pieces = [p for s in plan.programs["train"] if isinstance(s, Run) for p in s.offloads]
        assert {p.reduce for p in pieces} == ({reduce if of.copies > 1 else ""} if of.pieces else set())
        behind = {s.object for s in plan.programs["train"] if isinstance(s, UnmapPart)}
        assert behind == ({"actor.gradients"} if of.released else set())
        assert {p.object for p in run.result.report.pieces} == {p.object for p in pieces} | behind


def test_weights_lie_as_the_case_has_them(of: Combination) -> None:
    """Case 1 is an alias, 2 a transposed view and slabs, 3 a buffer for QKV; in the joined order there is no buffer."""
    layout = plan_of(of, "rollplex").summary.layout
    found = {c.name: c.view for c in layout.classes}
    finer, joined = of.train > of.rollout, of.order == "reindex"
    assert found["o"] == found["down"] == ("transpose" if finer else "alias")
    assert found["gate_up"] == (("interleave" if joined else "slabs") if finer else "alias")
    assert found["qkv"] == ("alias" if of.trainer == "host" else "reindex" if joined else "rebuild")
    assert (layout.case3_buffer_bytes > 0) == (found["qkv"] == "rebuild")


def test_ranks_of_a_shard_hold_all_of_it_and_a_state_of_their_own(of: Combination) -> None:
    """Behind the exchange: each trained a slab of every tensor, and each has every slab."""
    digests = ran(of, "rollplex").result.digests
    for tp in range(1, of.train):
        first = tp // (of.train // of.rollout) * (of.train // of.rollout)
        shard = f"actor.snapshot.tp{first}" if first else "actor.snapshot"
        assert digests[f"actor.snapshot.tp{tp}"] == digests[shard] or tp == first
        assert digests["actor.vision"] == digests[f"actor.vision.tp{tp}"]
    states = {name: digest for name, digest in digests.items() if name.startswith("actor.master")}
    assert len(states) == of.train * (of.copies if of.shares else 1)
    first = [digest for name, digest in states.items() if "[" not in name or "[0:" in name]  # later: the tower alone
    assert len(set(first)) == len(first) == of.train
