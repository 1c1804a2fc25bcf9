"""Ranks of a rollout shard write their slabs into each other's pages: those and nothing else, and never whole weights.

rank 0's pages  |q0 q1|o0 o1|norm| ..      rank 1 writes q1, o1, ..      everything else stays as it was
stamp           theta_0 | theta_0 and 1 chunks of theta_1                a reader refuses it until it is published
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from megatron_tiny import megatron_plan
from processes import children
from runtime_tiny import CONFIG, luck
from torch import Tensor

from rollplex.backends.facts import load_facts
from rollplex.backends.memory.ledger import Ledger
from rollplex.backends.memory.memfd import HostArena, HostMemory
from rollplex.backends.publication import Publication, Subscription
from rollplex.backends.shard import Shard, shard_of
from rollplex.backends.training.peers import Peer
from rollplex.ir.errors import EngineError, PlanError
from rollplex.ir.job import Job
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Exchange, Unmap, written_by_peers
from rollplex.runtime.run import execute_plan

DTYPE, SNAPSHOT = torch.float64, "actor.snapshot"


def shard(tp: int) -> Shard:
    """Of the one rollout rank that `tp` training ranks write together."""
    model = {"dtype": "float64", "config": {**CONFIG, "num_key_value_heads": 4}}
    plan = megatron_plan(tp, model=model, workload={"prompts": 4})
    job = Job.model_validate(plan.job)
    trainer, roller = (load_facts(plan.processes[kind].engine) for kind in ("train", "rollout"))
    assert job.q == tp
    return shard_of(job.spec, plan.summary.layout, trainer, roller, job.rollout_tp, 0)


@dataclass
class Owner:
    """A training rank's pages with its stamp, and a peer that has mapped them."""

    pages: HostArena
    ledger: Ledger
    publication: Publication
    peer: Peer

    @property
    def flat(self) -> Tensor:
        return self.pages.view(0, (self.pages.nbytes // DTYPE.itemsize,), DTYPE)

    def reader(self) -> Subscription:
        """What the rollout engine of the owner's GPU looks at."""
        return Subscription(self.publication.page.export(), "train 0", lambda: "")


@contextmanager
def owner(nbytes: int) -> Iterator[Owner]:
    """Train 0, whose pages train 1 has imported."""
    memory = HostMemory(chunk_bytes=1 << 16)
    pages, publication = memory.reserve(SNAPSHOT, nbytes), Publication(None)
    ledger = Ledger.create("device 0", 4 * pages.nbytes, process="train 0")
    ledger.acquire(SNAPSHOT, pages.nbytes, "start")
    pages.map()
    there = memory.reserve(f"{SNAPSHOT} of train 0", nbytes)
    peer = Peer(SNAPSHOT, "train 0", there, Ledger.attach(ledger.export(), process="train 1"))
    peer.adopt([*pages.export(), publication.page.export()], "start")
    publication.start()
    try:
        yield Owner(pages, ledger, publication, peer)
    finally:
        peer.close()
        pages.close()
        publication.page.close()


def slabs(of: Shard, place: int) -> Tensor:
    """[elements]: which of the snapshot's elements a training rank writes, told by the layout alone."""
    found = torch.zeros(of.numel, dtype=torch.bool)
    for region in of.regions:
        if region.axis is not None:
            size = region.numel // region.parts // region.slabs
            for part in range(region.parts):
                at = region.start + (part * region.slabs + place) * size
                found[at : at + size] = True
    return found


@pytest.mark.parametrize("tp", [2, 4])
def test_a_rank_writes_its_slabs_into_its_peers_pages_and_nothing_else(tp: int) -> None:
    """By inode the same pages; behind it an element is the writer's where its slabs are, and as before elsewhere."""
    of, place = shard(tp), tp - 1
    with owner(of.numel * DTYPE.itemsize) as train:
        assert train.peer.arena.inodes() == train.pages.inodes() != []
        before = torch.randn(len(train.flat), dtype=DTYPE)
        train.flat.copy_(before)
        mine = torch.randn(of.numel, dtype=DTYPE)
        train.publication.writing(0)
        of.send(place, mine, train.peer.pages(DTYPE))
        written = slabs(of, place)
        assert 0 < int(written.sum()) < of.numel / tp + 1
        assert torch.equal(train.flat[: of.numel], torch.where(written, mine, before[: of.numel]))
        assert torch.equal(train.flat[of.numel :], before[of.numel :])


def test_every_element_that_is_cut_has_one_writer() -> None:
    of = shard(4)
    writers = sum(slabs(of, place).int() for place in range(4))
    assert isinstance(writers, Tensor)
    whole = sum(r.numel for r in of.regions if r.axis is None)
    assert set(writers.tolist()) == {0, 1}
    assert int((writers == 0).sum()) == whole > 0


def test_pages_that_a_rollout_may_read_are_not_written() -> None:
    """Nothing of the peer's stamp says that its update has begun: its engine may still decode."""
    with owner(1 << 12) as train:
        train.publication.writing(0)
        train.publication.publish()
        with pytest.raises(EngineError) as refused:
            train.peer.pages(DTYPE)
        said = str(refused.value)
        assert "exchange of actor.snapshot: the pages of train 0 hold theta_1, which its rollout engine may" in said
        assert "try: end the run and start again: a rank writes weights out of turn" in said


def test_a_rollout_sees_no_mixture_wherever_a_writer_stops() -> None:
    """Between any two slabs, and behind the last while others may write: theta_1 is there when it is published."""
    of = shard(2)
    parts = [slabs for region in of.regions for slabs in region.gathered(torch.arange(of.numel, dtype=DTYPE))]
    with owner(of.numel * DTYPE.itemsize) as train:
        reader = train.reader()
        with reader.readable(0):
            pass
        train.publication.writing(0)
        into = train.peer.pages(DTYPE)
        for slab in (s[1] for s in parts):
            refuses(reader)
            into[int(slab[0]) : int(slab[-1]) + 1].copy_(slab)
        refuses(reader)
        train.publication.publish()
        with reader.readable(1):
            pass
        reader.close()


def refuses(reader: Subscription) -> None:
    with pytest.raises(EngineError, match="a mixture: theta_0 and 1 chunks of theta_1"), reader.readable(0):
        pass


def test_an_import_has_no_bytes_and_holds_the_owners_pages() -> None:
    with owner(1 << 14) as train:
        assert train.ledger.total_bytes == train.pages.nbytes
        assert train.peer.ledger.events() == []
        with pytest.raises(PlanError, match=r"unmap it: actor.snapshot is still mapped by train 1"):
            train.ledger.check_release(SNAPSHOT, "unmap it")
        train.peer.let_go("unmap (imported)")
        train.ledger.release(SNAPSHOT, "unmap it")
        assert train.ledger.total_bytes == 0


# ---- whole runs


def released() -> Plan:
    return megatron_plan(2, optimizer={"lr": 1e-2, "snapshot": "release", "chunks": 3})


def test_a_release_costs_each_peers_pages_again() -> None:
    """Seconds: 2 ms a GiB for the pages and their reader, 1.2 for an import by the one peer."""
    kept = megatron_plan(2, optimizer={"lr": 1e-2, "snapshot": "keep", "chunks": 3})
    more = released().summary.times.exposed_transfer_s - kept.summary.times.exposed_transfer_s
    assert more == pytest.approx(kept.object(SNAPSHOT).bytes / 2**30 * 3.2e-3, abs=1.1e-6)


@pytest.mark.processes
def test_an_owner_cannot_release_what_a_peer_has_not_let_go(tmp_path: Path) -> None:
    """A plan that forgets the peers' import, which the checker refuses, ends where the ledger counts the pages."""
    plan = released()
    steps = plan.programs["train"]
    assert written_by_peers(steps) == {SNAPSHOT}
    keeps = tuple(s for s in steps if not (isinstance(s, Unmap) and s.imported))
    assert len(keeps) == len(steps) - 1
    lies = plan.model_copy(update={"programs": {**plan.programs, "train": keeps}})
    with pytest.raises(PlanError, match=r"unmap actor.snapshot: actor.snapshot is still mapped by train [01]"):
        execute_plan(lies, hosts={"reward": luck}, out_dir=tmp_path / "run")
    assert children() == []


@pytest.mark.processes
def test_an_exchange_out_of_turn_is_refused(tmp_path: Path) -> None:
    """Moved before the first chunk: the peer's pages are whole."""
    plan = megatron_plan(2)
    steps = list(plan.programs["train"])
    (at,) = (i for i, s in enumerate(steps) if isinstance(s, Exchange) and s.op == "write")
    first = next(i for i, s in enumerate(steps) if s.kind == "update_chunk")
    steps.insert(first, steps.pop(at).model_copy(update={"window": steps[first].window}))
    early = plan.model_copy(update={"programs": {**plan.programs, "train": tuple(steps)}})
    with pytest.raises(EngineError, match=r"the pages of train [01] hold theta_0, which its rollout engine may read"):
        execute_plan(early, hosts={"reward": luck}, out_dir=tmp_path / "run")
    assert children() == []
