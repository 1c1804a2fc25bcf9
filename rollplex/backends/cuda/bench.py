"""One side of a calibration in a process of its own: it measures what it is asked, a line of JSON each way.

    python -m rollplex.backends.cuda.bench '{"shape": {..}, "gpu": 0, "share": 0.5, "decoding": true}'
                                                          {"device": "NVIDIA H200", "sms": 132, ..}    when it is ready
    {"ask": "decode", "batch": 16, "context": 6000}       {"layers": 36}     and decodes until it is told to end
    {"ask": "mark"}   {"ask": "read"}                     {"count": 310, "seconds": 1.501}

What is begun goes on between questions: a decode step or a prefix forward a time, each until the GPU is done with it;
questions are answered between two of them, at the same one by all ranks that cut a model (peers.py). Errors are
answers: {"error": "RuntimeError: CUDA error: ..", "peer": false}; "peer" is true where another rank is to blame.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rollplex.backends.cuda import bench_rates as rates
from rollplex.backends.cuda.bench_gpu import Gpu, Machine
from rollplex.backends.cuda.peers import Alone, Peers, Ranks
from rollplex.backends.cuda.post import Post
from rollplex.backends.cuda.proxy import Proxy, RankShape
from rollplex.ir.errors import PeerError

Answer = dict[str, Any]


class Repeated:
    """Work that is done again and again; how often since the last mark, and the seconds that it took."""

    def __init__(self, exchange: Ranks, clock: Callable[[], float] = time.perf_counter) -> None:
        self.exchange = exchange
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
    """The questions of a calibration to one rank, on its machine."""

    def __init__(self, post: Post, machine: Machine) -> None:
        """Joins the ranks of its side. About a third of its share of the memory is for weights."""
        super().__init__(Peers.join(post, machine.device) if post.tp > 1 else Alone())
        self.machine, self.shape = machine, RankShape.of(post.shape, post.tp)
        self._room = post.share * machine.nbytes
        self._proxy = Proxy(self.shape, machine.device, self._room / 3, post.decoding, self.exchange)
        self._read: tuple[object, ...] = ()

    def gemm(self, tokens: int) -> Answer:
        """Rate of the linears."""
        return {"tflops": rates.gemm_tflops(self._proxy, tokens)}

    def attention(self, tokens: int) -> Answer:
        """Rate of causal attention."""
        return {"tflops": rates.attention_tflops(self.shape, self.machine.device, tokens)}

    def sum(self, tokens: int) -> Answer:
        """Hidden states of so many tokens summed over the ranks, until each can go on with its next linear."""
        part = self._proxy.hidden(self._stretch(tokens) * self.exchange.pieces)
        seconds = self.machine.seconds(lambda: self.exchange.gathered(self.exchange.summed(part)))
        return {"nbytes": part.nbytes, "seconds": seconds}

    def hbm(self) -> Answer:
        """Rate of HBM."""
        return {"gb_s": rates.hbm_gb_s(self.machine.device)}

    def link(self) -> Answer:
        """Rates of the host link."""
        return rates.link_gb_s(self.machine.device)

    def pages(self) -> Answer:
        """Memory management."""
        return rates.pages_s(self.machine.device.index)

    def decode(self, batch: int, context: int) -> Answer:
        """Begin to decode: a step is one replay of a captured graph."""
        self.end()
        cache, hidden = self._proxy.cache(batch, context, 2 * self._room / 3), self._proxy.hidden(batch)
        replay = self.machine.captured(lambda: self._proxy.decode(hidden, cache))

        def step() -> None:
            replay()
            self.machine.done()

        self.work, self._read = step, (cache, hidden)  # the graph reads them: they must stay
        return {"layers": len(cache)}

    def prefix(self, tokens: int, sms: int) -> Answer:
        """Begin prefix forwards of so many tokens on so many SMs; 0 SMs: no partition."""
        self.end()
        hidden = self._proxy.hidden(self._stretch(tokens))

        def forward() -> None:
            with self.machine.on(sms):
                self._proxy.prefix(hidden)
                self.machine.done()

        forward()  # what is loaded and chosen at the first call is no rate
        self.work = forward
        return {}

    def end(self) -> Answer:
        """Do nothing any more."""
        self.work, self._read = None, ()
        self.machine.release()
        return {}

    def _stretch(self, tokens: int) -> int:
        """This rank's of so many tokens; as in the trainer, padding makes all stretches as long."""
        return -(-tokens // self.exchange.pieces)


# ---- the process


def serve(bench: Repeated, lines: Iterator[str], answers: TextIO) -> None:
    """Answer until the questions end; between them go on with what was begun. PeerError where a rank is lost."""
    asked: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines, asked), daemon=True).start()
    while True:
        due = 1 if bench.work is None else bench.exchange.agreed(asked.qsize(), bench.turn)
        for _ in range(due):
            if (line := asked.get()) is None:
                return
            _say(answers, answer(bench, line))


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
        return _failed(err)


def _failed(err: Exception) -> Answer:
    return {"error": f"{type(err).__name__}: {err}", "peer": isinstance(err, PeerError)}


def _say(answers: TextIO, found: Answer) -> None:
    print(json.dumps(found), file=answers, flush=True)


def run(post: Post, machine: Callable[[int], Machine]) -> None:
    """The process. Answers go where stdout was; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        bench = Bench(post, machine(post.gpu))
        _say(answers, bench.machine.facts())
        serve(bench, iter(sys.stdin.readline, ""), answers)
    except Exception as err:
        _say(answers, _failed(err))
        raise
    bench.end()
    bench.exchange.close()


if __name__ == "__main__":
    run(Post.model_validate_json(sys.argv[1]), Gpu)
