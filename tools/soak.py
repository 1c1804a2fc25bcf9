"""Train the shapes example for hundreds of steps; watch every process: memory, descriptors, mappings, and the reward.

python tools/soak.py                     300 steps of examples/jobs/shapes_host.yaml; exit 1 when anything grows
python tools/soak.py --steps 100 KEY=VALUE ..
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rollplex import api
from rollplex.hosts import find
from rollplex.runtime.events import IterationDone, RunEvent, Started

ROOT = Path(__file__).resolve().parent.parent
MOST_GROWTH = {"RSS MiB": 8.0, "fds": 0.0, "mappings": 8.0, "threads": 0.0, "shm": 0.0}
"""How much more the last tenth may have than the tenth after the warm-up; malloc keeps some of what it was given."""


@dataclass
class Sampler:
    """A Progress that looks at every process when an iteration ends."""

    pids: dict[str, int] = field(default_factory=dict)
    rows: list[dict[tuple[str, str], float]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def __call__(self, event: RunEvent) -> None:
        if isinstance(event, Started):
            self.pids = {"controller": os.getpid(), **{str(process): pid for process, pid in event.pids.items()}}
        if isinstance(event, IterationDone):
            self.rewards.append(event.metrics["reward"])
            self.rows.append(dict(self._look()))

    @staticmethod
    def _hand_back() -> None:
        """What malloc keeps for later is no leak: without that of this process, growth is of what lives."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def _look(self) -> Iterator[tuple[tuple[str, str], float]]:
        self._hand_back()
        for name, pid in self.pids.items():
            place = Path(f"/proc/{pid}")
            status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
            yield (name, "RSS MiB"), int(status["VmRSS"].split()[0]) / 1024
            yield (name, "threads"), int(status["Threads"])
            yield (name, "fds"), len(os.listdir(place / "fd"))
            yield (name, "mappings"), len((place / "maps").read_text().splitlines())
        yield ("machine", "shm"), len([name for name in os.listdir("/dev/shm") if "rollplex" in name])


@dataclass(frozen=True)
class Row:
    """One figure of one process: medians of ten parts of the run, and how much the last has more than the second."""

    process: str
    what: str
    parts: tuple[float, ...]

    @property
    def growth(self) -> float:
        return self.parts[-1] - self.parts[1]

    @property
    def leaks(self) -> bool:
        return self.growth > MOST_GROWTH[self.what]

    def __str__(self) -> str:
        figures = " ".join(f"{part:>7.1f}" for part in self.parts)
        return f"{self.process:<11} {self.what:<9} {figures}   {self.growth:>+6.1f}{'  LEAKS' if self.leaks else ''}"


def table(samples: Sequence[dict[tuple[str, str], float]]) -> list[Row]:
    """Every figure of every process in tenths of the run."""
    size = len(samples) / 10
    tenths = [samples[round(i * size) : round((i + 1) * size)] for i in range(10)]
    return [Row(*key, tuple(median(sample[key] for sample in tenth) for tenth in tenths)) for key in samples[0]]


def main(arguments: Sequence[str]) -> int:
    """Run, print, and say whether anything leaks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    job = ROOT / "examples/jobs/shapes_host.yaml"
    compiled = api.compile_files(str(ROOT / "examples/grpo_video.py"), job, options.overrides)
    plan, sampler, began = api.with_steps(compiled.plan, options.steps), Sampler(), time.monotonic()
    assert compiled.algorithm is not None
    with TemporaryDirectory(prefix="soak-") as folder:
        hosts = find(plan, compiled.algorithm.fn.__globals__)
        api.run(plan, hosts=hosts, out_dir=Path(folder) / "run", progress=sampler)
    rows = table(sampler.rows)
    print(f"{'process':<11} {'tenth of':<9} " + " ".join(f"{i + 1:>7}" for i in range(10)) + "   growth")
    print("\n".join(str(row) for row in rows))
    tenth = max(1, len(sampler.rewards) // 10)
    first, last = fmean(sampler.rewards[:tenth]), fmean(sampler.rewards[-tenth:])
    rising = "rising" if last > first else "NOT RISING"
    print(f"\nreward, first and last tenth: {first:.3f} -> {last:.3f}, {rising}")
    leaks = sum(row.leaks for row in rows)
    print(f"{options.steps} steps in {time.monotonic() - began:.0f} s, {leaks} of {len(rows)} figures leak")
    return leaks + (last <= first)


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
