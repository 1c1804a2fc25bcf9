"""Publication on a GPU: new weights where the rollout engine reads them, in place or gathered and loaded.

in place     what the plan rebuilds is copied and permuted, the stamp is written: the engine reads the trainer's pages
gather       every Hugging Face tensor is put together from the trainer's parameters, in a buffer that is sent
load         a rollout engine with weights of its own copies each tensor into its fused ones

    python -m benchmarks.publication_gpu PLAN [--json FILE]        the weights of that plan; one GPU, TP 1

Both happen in one process, so the second way is spared the transport; seconds are medians of 7.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from rollplex.backends.facts import load_facts
from rollplex.backends.megatron import memory
from rollplex.backends.megatron.names import Piece, Stored, parameters
from rollplex.backends.megatron.weights import assembled, fill
from rollplex.backends.publication import Publication
from rollplex.backends.shard import shard_of
from rollplex.backends.training.placement import DTYPES
from rollplex.ir.job import Job
from rollplex.ir.plan import Plan, read_plan

ROUNDS = 7


@dataclass(frozen=True)
class Published:
    """Median seconds; `nbytes` are those of the weights, `rebuilt` of them what is copied in place."""

    nbytes: int
    rebuilt: int
    in_place: float
    gather: float
    load: float


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds, all work of the device included; median of rounds after one that does not count."""
    seconds = []
    for _ in range(ROUNDS + 1):
        _settle(device)
        began = time.perf_counter()
        work()
        _settle(device)
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])


def measure(plan: Plan, device: torch.device) -> Published:
    """The policy's language model and tower, as the plan lays them out; AssertionError unless both ways agree."""
    job, layout = Job.model_validate(plan.job), plan.summary.layout
    spec, dtype = job.spec, DTYPES[job.model.dtype]
    trainer, roller = (load_facts(plan.processes[kind].engine) for kind in ("train", "rollout"))
    shard, order = shard_of(spec, layout, trainer, roller, 1, 0), parameters(spec, stored=Stored.planned(layout))
    views: dict[str, Tensor] = {}
    pages: dict[str, Tensor] = {}
    for part in ("language", "vision"):
        own = [p for p in order if p.part == part]
        pages[part] = torch.randn(memory.numel(own), device=device).to(dtype)
        views |= memory.views(pages[part], own)
    buffer = torch.empty(shard.buffer_numel, dtype=dtype, device=device)
    publication = Publication(None)

    def in_place() -> None:
        shard.rebuild(pages["language"], buffer)
        publication.publish()

    read = assembled(spec, Stored.planned(layout), views)
    sent = {t.name: torch.empty(t.shape, dtype=dtype, device=device) for t in spec.tensors()}
    fused = parameters(spec)
    own = memory.views(torch.empty(memory.numel(fused), dtype=dtype, device=device), fused)

    def gather() -> None:
        for name, tensor in sent.items():
            tensor.copy_(read(name))

    def load() -> None:
        fill(fused, own, lambda piece: _rows(sent[piece.source], piece))

    seconds = timed(in_place, device), timed(gather, device), timed(load, device)
    loaded = assembled(spec, Stored(), own)
    assert all(torch.equal(loaded(t.name), read(t.name)) for t in spec.tensors()), "other weights were loaded"
    publication.page.close()
    size = dtype.itemsize
    return Published(sum(t.numel for t in spec.tensors()) * size, shard.buffer_numel * size, *seconds)


def _rows(tensor: Tensor, piece: Piece) -> Tensor:
    return tensor.narrow(piece.axis, piece.start, piece.stop - piece.start)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    asked = parser.parse_args()
    found = measure(read_plan(asked.plan), torch.device("cuda", asked.gpu))
    gib, rebuilt = found.nbytes / 2**30, found.rebuilt / 2**30
    print(f"{gib:.2f} GiB of weights: in place {found.in_place * 1e3:.2f} ms ({rebuilt:.2f} GiB rebuilt)")
    print(f"gather {found.gather * 1e3:.2f} ms, load {found.load * 1e3:.2f} ms")
    if asked.json:
        asked.json.write_text(json.dumps(asdict(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
