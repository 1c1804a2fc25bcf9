"""Functions run by N processes of one gloo group; the processes are started once and serve every test that asks.

    first, second = ranks(2).run(function, "argument")      # function(..) on rank 0 and on rank 1

`function` is importable and finds the group as torch.distributed's default.
"""

from __future__ import annotations

import multiprocessing as mp
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import psutil

from rollplex.runtime import nursery

START_S = 120  # importing torch and both libraries on a busy machine
IMPORTED = ("torch.distributed", "transformers", "rollplex.backends.megatron.rank")  # once, for ranks of all groups
RUN_S = 60  # longer than any such test takes; a rank that waits for a dead one ends here


_KEPT: set[psutil.Process] = set()


def children() -> list[psutil.Process]:
    """All descendants of this process but the groups kept here, what multiprocessing keeps beside them, the nursery."""
    idle = {one.pid for one in nursery._kept}
    found = psutil.Process().children(recursive=True)
    return [process for process in found if process not in _KEPT and process.pid not in idle]


@cache
def ranks(count: int) -> Ranks:
    """The processes of this group size; they end with this one."""
    return Ranks(count)


class Ranks:
    """N daemon processes, forked from one that has imported what takes long; they meet through a file of their own."""

    def __init__(self, count: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(list(IMPORTED))
        meet = str(Path(mkdtemp(prefix="rollplex-ranks-")) / "meet")
        pairs = [context.Pipe() for _ in range(count)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(target=_serve, args=(rank, count, meet, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        before = set(children())
        for process in self._processes:
            process.start()
        _KEPT.update(set(children()) - before)
        for _, theirs in pairs:
            theirs.close()
        self._answers(START_S)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What the function returned, by rank; an exception of a rank is raised with its traceback."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args)))
        return self._answers(RUN_S)

    def _answers(self, seconds: float) -> list[Any]:
        found = [_answer(pipe, rank, seconds) for rank, pipe in enumerate(self._pipes)]
        errors = [error for error, _ in found if error]
        if errors:
            self._end()
            raise AssertionError(errors[0])
        return [value for _, value in found]

    def _end(self) -> None:
        """After an error the group is of no use: the next test starts another."""
        for process in self._processes:
            process.kill()
        ranks.cache_clear()


def _answer(pipe: Connection, rank: int, seconds: float) -> tuple[str, Any]:
    try:
        if not pipe.poll(seconds):
            return f"rank {rank} said nothing for {seconds} s", None
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return f"rank {rank} is gone", None


def _serve(rank: int, count: int, meet: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=RUN_S)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=count, timeout=timeout)
    pipe.send_bytes(pickle.dumps(("", None)))
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = ("", function(*args))
        except BaseException:
            answer = (traceback.format_exc(), None)
        pipe.send_bytes(pickle.dumps(answer))
