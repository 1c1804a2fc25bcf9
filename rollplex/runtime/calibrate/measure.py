"""The order of a calibration: rates with nothing beside, then at every decode batch every way of running prefixes.

decode side   rates | batch 1  ==== ==== ====..  | batch 4  ==== ====..     begins once a batch, goes on
prefix side         | alone ==  |  ==   ==   ==                             begins once a way, ends
                                 a point: both settle, both count from a mark, both are read

A side has a rank on every GPU that is measured. A step and a forward take as long as that of the slowest, and rates are
the lowest: nobody goes on before the last. Links and memory are measured on all GPUs at once, as a step uses them.

Figures are told as they come. Where it ends early, what is whole is a calibration all the same: all rates, and of the
surface the batches that are complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rollplex.ir.calibration import (
    AloneChunk,
    AloneStep,
    Calibration,
    CoRun,
    Exchange,
    Link,
    Pages,
    Rate,
    Shape,
    Step,
    Summed,
    Surface,
)
from rollplex.runtime.calibrate.grid import SETTLE_S, Grid
from rollplex.runtime.calibrate.side import Answer, Side

FORWARDS = 3
"""Prefix forwards that a point counts at least."""
Tell = Callable[[str, str], None]
"""Hears of every figure: what it is of, and the figure."""


@dataclass
class Measured:
    """What is known so far."""

    gemm: list[Rate] = field(default_factory=list)
    attention: list[Rate] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    hbm_gb_s: float = 0.0
    link: Link | None = None
    pages: Pages | None = None
    sums: list[Summed] = field(default_factory=list)
    alone: list[AloneChunk] = field(default_factory=list)
    decode: list[AloneStep] = field(default_factory=list)
    rows: list[CoRun] = field(default_factory=list)
    rates_done: bool = False

    def surface(self, grid: Grid) -> Surface | None:
        """Of the batches whose ways were all measured."""
        ways = len(grid.chunks) * len(grid.sms)
        whole = [s for s in self.decode if sum(row.batch == s.batch for row in self.rows) == ways]
        batches = {s.batch for s in whole}
        rows = tuple(row for row in self.rows if row.batch in batches)
        if not rows:
            return None
        return Surface(
            all_sms=grid.sms[-1], context=grid.contexts[0], decode=tuple(whole), prefix=tuple(self.alone), rows=rows
        )

    def calibration(
        self, grid: Grid, gpu: str, shape: Shape, stretches: bool, device: str, versions: dict[str, str]
    ) -> Calibration:
        """The file's content, once all rates are there."""
        assert self.rates_done, "all rates are there"
        assert self.link, "the link's too"
        assert self.pages, "and what memory management takes"
        return Calibration(
            gpu=gpu,
            device=device,
            versions=versions,
            shape=shape,
            gemm=tuple(self.gemm),
            attention=tuple(self.attention),
            decode=tuple(self.steps),
            hbm_gb_s=self.hbm_gb_s,
            link=self.link,
            pages=self.pages,
            exchange=Exchange(stretches=stretches, sums=tuple(self.sums)) if shape.gpus > 1 else None,
            surface=self.surface(grid),
        )


@dataclass(frozen=True)
class Measurement:
    """Two sides, what they are asked, and who hears of it; `sleep` is another's in tests."""

    decode: Side
    prefix: Side
    grid: Grid
    tell: Tell
    found: Measured = field(default_factory=Measured)
    sleep: Callable[[float], None] = time.sleep

    def run(self) -> None:
        """All of it; `found` has what is known whenever it ends."""
        self.rates()
        self.sums()
        self.steps()
        self.found.rates_done = True
        self.alone()
        for batch in self.grid.batches:
            self.at(batch)

    def rates(self) -> None:
        """Of the prefix side's shapes, which are the trainer's; of the GPU and its link."""
        found = self.found
        for kind, rates, points in (
            ("gemm", found.gemm, self.grid.gemm_tokens),
            ("attention", found.attention, self.grid.attention_tokens),
        ):
            for tokens in points:
                rates.append(Rate(tokens=tokens, **self._rates(kind, min, tokens=tokens)))
                self.tell(f"{kind}, {tokens} tokens", f"{rates[-1].tflops:.0f} TFLOP/s")
        found.hbm_gb_s = self._rates("hbm", min)["gb_s"]
        self.tell("HBM, read and written", f"{found.hbm_gb_s:.0f} GB/s")
        found.link = Link(**self._rates("link", min))
        one_way = f"{found.link.to_device_gb_s:.1f} to the GPU, {found.link.to_host_gb_s:.1f} back"
        self.tell("host link", f"{one_way}, {found.link.both_gb_s:.1f} each way at once, GB/s")
        found.pages = Pages(**self._rates("pages", max))
        p = found.pages
        told = f"{p.create_s * 1e3:.2f} made, {p.map_s * 1e3:.2f} mapped, {p.unmap_s * 1e3:.2f} let go, ms a GiB"
        self.tell("memory", f"{told}; pinned in {p.pin_s:.2f} s a GiB")

    def sums(self) -> None:
        """What the trainer's ranks exchange behind a linear, with nothing beside."""
        for tokens in self.grid.sum_tokens:
            answers = self.prefix.ask("sum", tokens=tokens)
            found = Summed(nbytes=answers[0]["nbytes"], seconds=_figure(max(a["seconds"] for a in answers)))
            if all(known.nbytes != found.nbytes for known in self.found.sums):  # stretches of ranks are rounded up
                self.found.sums.append(found)
            self.tell(f"sum over ranks, {tokens} tokens", f"{found.seconds * 1e3:.3f} ms")

    def steps(self) -> None:
        """Decode steps with nothing beside, every batch at every context."""
        for batch in self.grid.batches:
            for context in self.grid.contexts:
                self.decode.ask("decode", batch=batch, context=context)
                seconds = self._seconds(self.decode, self.grid.point_s / 2)
                self.found.steps.append(Step(batch=batch, context=context, seconds=seconds))
                self.tell(f"decode, {batch} x {context} tokens", f"{seconds * 1e3:.2f} ms a step")
        self.decode.ask("end")

    def alone(self) -> None:
        """Prefix chunks with nothing beside, on all SMs."""
        for chunk in self.grid.chunks:
            self.prefix.ask("prefix", tokens=chunk, sms=0)
            per_s = _figure(chunk / self._seconds(self.prefix, self.grid.point_s))
            self.found.alone.append(AloneChunk(chunk_tokens=chunk, tokens_per_s=per_s))
            self.tell(f"prefix, chunks of {chunk} tokens", f"{per_s:.0f} tokens/s")
        self.prefix.ask("end")

    def at(self, batch: int) -> None:
        """The surface at one decode batch."""
        self.decode.ask("decode", batch=batch, context=self.grid.contexts[0])
        alone_s = self._seconds(self.decode, self.grid.point_s)
        self.found.decode.append(AloneStep(batch=batch, seconds=alone_s))
        for chunk, sms in self._ways():
            row = self._point(batch, chunk, sms)
            self.found.rows.append(row)
            rate = next(a.tokens_per_s for a in self.found.alone if a.chunk_tokens == chunk)
            both = f"{row.step_s * 1e3:.2f} ms a step ({row.step_s / alone_s:.2f}x), "
            where = f"on {sms} SMs" if sms < self.grid.sms[-1] else "without a partition"
            told = f"{both}prefix {row.tokens_per_s:.0f} tokens/s ({row.tokens_per_s / rate:.2f}x)"
            self.tell(f"batch {batch} beside chunks of {chunk} {where}", told)
        self.decode.ask("end")

    def _ways(self) -> Iterator[tuple[int, int]]:
        return ((chunk, sms) for chunk in self.grid.chunks for sms in self.grid.sms)

    def _point(self, batch: int, chunk: int, sms: int) -> CoRun:
        every = self.grid.sms[-1]
        self.prefix.ask("prefix", tokens=chunk, sms=sms if sms < every else 0)
        alone = next(a.tokens_per_s for a in self.found.alone if a.chunk_tokens == chunk)
        window = max(self.grid.point_s, FORWARDS * chunk / alone * every / sms)
        self.sleep(SETTLE_S)
        for side in (self.prefix, self.decode):
            side.ask("mark")
        self.sleep(window)
        step, forward = (_slowest(side.ask("read")) for side in (self.decode, self.prefix))
        self.prefix.ask("end")
        return CoRun(batch=batch, chunk_tokens=chunk, sms=sms, step_s=step, tokens_per_s=_figure(chunk / forward))

    def _seconds(self, side: Side, window: float) -> float:
        """Of what a side does, once, with nothing beside it."""
        self.sleep(SETTLE_S)
        side.ask("mark")
        self.sleep(window)
        return _slowest(side.ask("read"))

    def _rates(self, kind: str, worst: Callable[[Iterable[float]], float], **about: Any) -> dict[str, float]:
        """The worst of what the prefix side's ranks have found."""
        answers = self.prefix.ask(kind, **about)
        return {name: _figure(worst(answer[name] for answer in answers)) for name in answers[0]}


def _slowest(reads: list[Answer]) -> float:
    return _figure(max(read["seconds"] / read["count"] for read in reads))


def _figure(value: float) -> float:
    """Five figures: more says nothing, and a file is read by people."""
    return float(f"{value:.5g}")
