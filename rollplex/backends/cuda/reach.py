"""Whether GPUs reach each other's memory: in a process of its own, whose driver is gone before engines are started.

python -m rollplex.backends.cuda.reach 0 1 2            [[0, 2], [2, 0]]     pairs that do not: who writes, whose memory
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator

from rollplex.backends.cuda import driver as cuda
from rollplex.ir.errors import EngineError, RunError

ANSWER_S = 60.0
Pairs = list[tuple[int, int]]


def unreached(devices: Iterable[int]) -> Pairs:
    """Pairs of these CUDA devices of which the first cannot write into the second's memory.

    RunError where the driver does not say.
    """
    asked = [sys.executable, "-m", "rollplex.backends.cuda.reach", *map(str, devices)]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        what = f"the driver has not said for {ANSWER_S:g} s which GPUs reach each other's memory"
        raise RunError(what, where="GPU", hint="see whether nvidia-smi answers") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        what = f"the driver does not say which GPUs reach each other's memory: {said}"
        raise RunError(what, where="GPU", hint="see `rollplex doctor`")
    return [(first, second) for first, second in json.loads(done.stdout)]


def cannot(devices: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The same, asked here; EngineError where the driver has an error."""
    d = cuda.bindings()
    cuda.check(d.cuInit(0), "the driver's start")
    handles = {n: cuda.check(d.cuDeviceGet(n), f"CUDA device {n}") for n in dict.fromkeys(devices)}
    for first, second in itertools.permutations(handles, 2):
        asked = d.cuDeviceCanAccessPeer(handles[first], handles[second])
        if not int(cuda.check(asked, f"access of CUDA device {first} to {second}")):
            yield first, second


if __name__ == "__main__":
    try:
        print(json.dumps(list(cannot(map(int, sys.argv[1:])))))
    except EngineError as err:
        sys.exit(str(err))
