"""One side of a calibration in a process of its own: it measures what it is asked, a line of JSON each way.

    python -m rollplex.backends.cuda.bench '{"shape": {..}, "tp": 1, "share": 0.5, "decoding": true}'
    {"ask": "facts"}                                      {"device": "NVIDIA H200", "sms": 132, ..}
    {"ask": "decode", "batch": 16, "context": 6000}       {"layers": 36}     and decodes until it is told to end
    {"ask": "mark"}   {"ask": "read"}                     {"count": 310, "seconds": 1.501}

What is begun goes on between questions: a decode step or a prefix forward a time, each until the GPU is done with it;
questions are answered between two of them. Errors are answers: {"error": "RuntimeError: CUDA error: .."}.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TextIO

import torch

from rollplex.backends.cuda import bench_rates as rates
from rollplex.backends.cuda.partition import Partition
from rollplex.backends.cuda.proxy import Proxy, RankShape
from rollplex.ir.calibration import Shape

Answer = dict[str, Any]


class Repeated:
    """Work that is done again and again; how often since the last mark, and the seconds that it took."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.work: Callable[[], None] | None = None
        self._clock, self._count, self._began, self._last = clock, 0, 0.0, 0.0

    def turn(self) -> None:
        """Once more."""
        assert self.work is not None, "nothing was begun"
        self.work()
        self._count, self._last = self._count + 1, self._clock()

    def mark(self) -> Answer:
        """Count from here."""
        self._count, self._began = 0, self._clock()
        return {}

    def read(self) -> Answer:
        """What was done since the mark, once at least."""
        if not self._count:
            self.turn()
        return {"count": self._count, "seconds": self._last - self._began}


class Bench(Repeated):
    """The questions of a calibration, on the first GPU that this process sees."""

    def __init__(self, shape: RankShape, share: float, decoding: bool) -> None:
        """`share` of the GPU's memory may be used, about a third of it by weights."""
        super().__init__()
        self.shape, self.device = shape, torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        self._room = share * torch.cuda.get_device_properties(0).total_memory
        self._proxy = Proxy(shape, self.device, self._room / 3, decoding)
        self._partitions: dict[int, Partition] = {}
        self._read: tuple[object, ...] = ()

    def facts(self) -> Answer:
        """The GPU and the versions."""
        found = torch.cuda.get_device_properties(0)
        return {
            "device": found.name,
            "sms": found.multi_processor_count,
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
        }

    def gemm(self, tokens: int) -> Answer:
        """Rate of the linears."""
        return {"tflops": rates.gemm_tflops(self._proxy, tokens)}

    def attention(self, tokens: int) -> Answer:
        """Rate of causal attention."""
        return {"tflops": rates.attention_tflops(self.shape, self.device, tokens)}

    def hbm(self) -> Answer:
        """Rate of HBM."""
        return {"gb_s": rates.hbm_gb_s(self.device)}

    def link(self) -> Answer:
        """Rates of the host link."""
        return rates.link_gb_s(self.device)

    def pages(self) -> Answer:
        """Memory management."""
        return rates.pages_s(0)

    def decode(self, batch: int, context: int) -> Answer:
        """Begin to decode: a step is one replay of a captured graph."""
        self.end()
        cache, hidden = self._proxy.cache(batch, context, 2 * self._room / 3), self._proxy.hidden(batch)
        graph = captured(lambda: self._proxy.decode(hidden, cache))

        def step() -> None:
            graph.replay()
            torch.cuda.synchronize()

        self.work, self._read = step, (cache, hidden)  # the graph reads them: they must stay
        return {"layers": len(cache)}

    def prefix(self, tokens: int, sms: int) -> Answer:
        """Begin prefix forwards of so many tokens on so many SMs; 0 SMs: no partition."""
        self.end()
        hidden = self._proxy.hidden(tokens)

        def forward() -> None:
            with self._on(sms):
                self._proxy.prefix(hidden)
                torch.cuda.synchronize()

        forward()  # what is loaded and chosen at the first call is no rate
        self.work = forward
        return {}

    def end(self) -> Answer:
        """Do nothing any more."""
        self.work, self._read = None, ()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return {}

    def _on(self, sms: int) -> AbstractContextManager[None]:
        if not sms:
            return nullcontext()
        if sms not in self._partitions:
            self._partitions[sms] = Partition(0, sms)
        return self._partitions[sms]()


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what the work launches, behind runs that warm up on another stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


# ---- the process


def serve(bench: Repeated, lines: Iterator[str], answers: TextIO) -> None:
    """Answer until the questions end; between them go on with what was begun."""
    asked: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines, asked), daemon=True).start()
    while True:
        try:
            line = asked.get(block=bench.work is None)
        except queue.Empty:
            bench.turn()
            continue
        if line is None:
            return
        print(json.dumps(answer(bench, line)), file=answers, flush=True)


def _read(lines: Iterator[str], asked: queue.SimpleQueue[str | None]) -> None:
    for line in lines:
        asked.put(line)
    asked.put(None)


def answer(bench: Repeated, line: str) -> Answer:
    """The answer to one question, or why there is none."""
    asked = json.loads(line)
    try:
        return getattr(bench, asked.pop("ask"))(**asked)
    except Exception as err:  # whatever torch or the driver says is told to whoever asked
        return {"error": f"{type(err).__name__}: {err}"}


def main() -> None:
    """Answers go where stdout was; what libraries print goes to stderr."""
    told = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        shape = RankShape.of(Shape.model_validate(told["shape"]), told["tp"])
        bench = Bench(shape, told["share"], told["decoding"])
    except Exception as err:
        print(json.dumps({"error": f"{type(err).__name__}: {err}"}), file=answers, flush=True)
        raise
    print(json.dumps(bench.facts()), file=answers, flush=True)
    serve(bench, iter(sys.stdin.readline, ""), answers)


if __name__ == "__main__":
    main()
