"""Pools: which processes share a GPU. Objects lie on their owner's, and nothing is imported from one pool to another.

rollplex        gpus        train, rollout          one copy of the weights, read by both
disaggregated   training    train                   rollout has a copy of its own, sent after every update
                rollout     rollout
"""

from __future__ import annotations

from collections.abc import Iterator

from rollplex.ir.check.facts import Facts
from rollplex.ir.check.rules import Violation


def sharers(facts: Facts) -> Iterator[Violation]:
    """An object has a GPU to lie on, and its readers are on the same one (paper section 3.3: pages of one device)."""
    kinds = facts.plan.processes
    for o in facts.objects.values():
        home = kinds[o.process].pool
        if not home:
            yield Violation("pool", f"{o.process} has no GPU, and {o.name} is its own", object=o.name, where=o.name)
        for reader in o.readers:
            if kinds[reader].pool != home:
                what = f"{reader} is on pool {kinds[reader].pool or 'none'}, the pages of {o.name} on {home or 'none'}"
                yield Violation("pool", what, object=o.name, where=o.name)


def summed_up(facts: Facts) -> Iterator[Violation]:
    """The summary has the pools of the processes, a rank a GPU."""
    told = [p.name for p in facts.plan.summary.pools]
    if sorted(told) != sorted(facts.pools):
        what = f"the summary has pools {', '.join(told)}, the processes are on {', '.join(facts.pools) or 'none'}"
        yield Violation("pool", what)
    for pool in facts.plan.summary.pools:
        for name in facts.pools.get(pool.name, ()):
            if (ranks := facts.plan.processes[name].ranks) != pool.gpus:
                yield Violation("pool", f"{name} has {ranks} ranks on the {pool.gpus} GPUs of {pool.name}", where=name)
    yield from _cluster(facts)


def _cluster(facts: Facts) -> Iterator[Violation]:
    match facts.plan.job:
        case {"cluster": {"gpus_per_node": int(per_node), "nodes": int(nodes)}}:
            used = sum(p.gpus for p in facts.plan.summary.pools)
            if used != per_node * nodes:
                yield Violation("pool", f"the pools have {used} GPUs, the cluster {per_node * nodes}")
        case _:
            return


def check_pools(facts: Facts) -> Iterator[Violation]:
    """Everything that is wrong with who runs where."""
    yield from sharers(facts)
    yield from summed_up(facts)
