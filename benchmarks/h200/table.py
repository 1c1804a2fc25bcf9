"""Schedules and ways to share one H200, run one after the other on both real engines: what the page of results says.

python -m benchmarks.h200.table DIR --out benchmarks/results/step_h200.md      the plans of plans.py, in their order

The first plan is the serial one, against which all are held. Beside the runs, on the same GPU: the optimizer's stream
against the link, and publication against gather and load. The page is written anew after each part, so a run that is
cut off leaves what it has. See ran.py for every formula.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.driver import Driver
from benchmarks.h200.ran import Ran, read
from benchmarks.optimizer_gpu import Stream
from benchmarks.page import measured_with, table
from benchmarks.publication_gpu import Published
from rollplex.ir.plan import read_plan

GIB = 2**30
MILLIONS, IN_FLIGHT = 512, 3
GOALS = "Goals: the stream at least 85% of the duplex link, windows within 5% of the plan, no second copy."


@dataclass
class Found:
    """All that has been measured so far; `failed` are parts that ended badly, with what they said."""

    runs: list[Ran] = field(default_factory=list)
    stream: Stream | None = None
    published: Published | None = None
    failed: list[str] = field(default_factory=list)


def say(text: str) -> None:
    """Progress; the page alone goes to standard output."""
    print(text, file=sys.stderr, flush=True)


def run(plan: Path, out: Path) -> Ran:
    """One plan, from its first process to its report; CalledProcessError if it fails."""
    began = time.monotonic()
    with Driver() as driver:
        subprocess.run([sys.executable, "-m", "rollplex.cli", "run", str(plan), "--out", str(out)], check=True)
    name, seconds = plan.stem.partition(" ")[2], time.monotonic() - began
    return read(out, name, read_plan(plan), driver.before, driver.within, seconds)


def schedules(runs: list[Ran]) -> list[str]:
    """A row a run: seconds a step and what of them was hidden."""
    serial, rows = runs[0], []
    for r in runs:
        step = (str(r.step), f"{serial.step.mean / r.step.mean:.2f}x", f"{r.plan.summary.times.step_s:.2f}")
        parts = tuple(str(r.overlap(name)) for name in ("decode_s", "prefix_s", "hidden_s"))
        bound, gained = r.bound(serial), r.gained(serial)
        share = f"{gained / bound:.0%}" if r is not serial and bound > 0 else "-"
        hidden = (f"{r.longer(serial):.2f}", f"{gained:.2f}", f"{bound:.2f}", share)
        hidden = ("-",) * 4 if r is serial else hidden
        post = (str(r.overlap("post_s")), f"{r.overlap('post_hidden_s').mean:.2f}")
        last = (f"{r.publish.mean * 1e3:.1f}", f"{r.report['metrics'][-1].get('logprob_gap', float('nan')):.4f}")
        rows.append((r.name, *step, *parts, *hidden, *post, *last))
    head = ("schedule", "step s", "over serial", "predicted s", "T_D s", "T_P s", "in decode s", "d_D s", "gained s")
    head = (*head, "bound s", "of the bound", "T_post s", "in decode s", "publish ms", "logprob gap")
    return table(head, rows)


def memory(runs: list[Ran]) -> list[str]:
    """A row a run: bytes of windows against the plan, and whether the actor is there twice."""
    rows = []
    for r in runs:
        used, pages = r.at_start()
        off, window = r.driven_off()
        windows = (f"{max(r.driven().values(), default=0) / GIB:.1f}", f"{off:+.1%} in {window}")
        planned = (f"{r.plan.summary.peak_hbm_bytes / GIB:.1f}", f"{r.peak() / GIB:.1f}", f"{r.windows_off():.1%}")
        start = tuple(f"{n / GIB:.2f}" for n in (used, pages, used - pages, r.allowed(), r.actor_bytes()))
        as_planned = "yes" if r.report["memory_as_planned"] else "NO"
        rows.append((r.name, *planned, as_planned, *windows, *start, f"{r.second_copy():,}"))
    head = ("schedule", "planned peak GiB", "measured", "windows off by", "as planned", "driver's peak GiB")
    head = (*head, "driver against plan", "at start: driver", "planned pages", "the rest", "planned for it")
    return table((*head, "one actor", "second copy, bytes"), rows)


def beside(found: Found) -> list[str]:
    """The stream and publication, in a sentence each."""
    lines = []
    if s := found.stream:
        up, back = s.rates(IN_FLIGHT)
        lines.append(
            f"Optimizer stream, {s.millions} M parameters, {IN_FLIGHT} chunks in flight: {up:.1f} GB/s to the GPU and "
            f"{back:.1f} back; the link each way at once {s.link[2]:.1f}: {s.share(IN_FLIGHT):.0%} of it."
        )
    if p := found.published:
        lines.append(
            f"Publication of {p.nbytes / GIB:.2f} GiB: in place {p.in_place * 1e3:.2f} ms ({p.rebuilt / GIB:.2f} GiB "
            f"rebuilt); gather {p.gather * 1e3:.2f} and load {p.load * 1e3:.2f} ms, in one process, with "
            f"{2 * p.nbytes / GIB:.1f} GiB more."
        )
    return lines


def page(found: Found, heading: str) -> str:
    """All that is there, under what it was measured with."""
    lines = [heading, "", GOALS, ""]
    if found.runs:
        lines += [*schedules(found.runs), "", *memory(found.runs), ""]
        lines += [
            f"{r.name}: {r.seconds:.0f} s in all; {phase}: {', '.join(r.stages(phase))}"
            for r in found.runs
            for phase in ("start", "end")
        ]
    return "\n".join([*lines, "", *beside(found), "", *found.failed, summary(found)]).replace("\n\n\n", "\n\n") + "\n"


def summary(found: Found) -> str:
    """The last line."""
    if not found.runs:
        return "no plan has run to its end"
    serial = found.runs[0]
    told = []
    for r in found.runs:
        bound = r.bound(serial)
        share = f", {r.gained(serial) / bound:.0%} of the bound" if r is not serial and bound > 0 else ""
        told.append(f"{r.name} {r.step.mean:.2f} s ({serial.step.mean / r.step.mean:.2f}x{share})")
    if s := found.stream:
        told.append(f"optimizer stream {s.share(IN_FLIGHT):.0%} of the link")
    if p := found.published:
        told.append(f"publication {p.in_place * 1e3:.1f} ms, gather and load {(p.gather + p.load) * 1e3:.1f} ms")
    told.append(f"windows within {max(r.windows_off() for r in found.runs):.1%} of the plan")
    told.append(f"second copy {max(r.second_copy() for r in found.runs)} bytes")
    return "; ".join([*told, *([f"{len(found.failed)} parts FAILED"] if found.failed else [])])


def figures(module: str, runs: Path, *arguments: str) -> dict[str, Any]:
    """What a benchmark of its own process has measured."""
    into = runs / f"{module}.json"
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json", str(into)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return json.loads(into.read_text(encoding="utf-8"))


def part(found: Found, name: str, plans: dict[str, Path], runs: Path) -> None:
    """Measure one part: a plan, or what is measured beside them."""
    match name:
        case "optimizer stream":  # of a state that is pinned within seconds
            data = figures("optimizer_gpu", runs, str(MILLIONS))
            found.stream = Stream(MILLIONS, tuple(data["link"]), {int(n): s for n, s in data["seconds"].items()})
        case "publication":
            found.published = Published(**figures("publication_gpu", runs, str(next(iter(plans.values())))))
        case _:
            found.runs.append(run(plans[name], runs / name.partition(" ")[0]))


def main() -> None:
    """Run all, print the page, write it where it is asked for; exit 1 when a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("/dev/shm/runs"))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    heading = measured_with("torch", "vllm", "megatron-core")
    asked.runs.mkdir(parents=True, exist_ok=True)
    plans, found = {plan.stem: plan for plan in sorted(asked.folder.glob("*.json"))}, Found()
    for name in (*plans, "optimizer stream", "publication"):
        began = time.monotonic()
        try:
            part(found, name, plans, asked.runs)
        except (subprocess.CalledProcessError, OSError) as err:
            found.failed.append(f"{name} FAILED: {err}")
        say(f"{name}: {time.monotonic() - began:.0f} s")
        if asked.out:
            asked.out.write_text(page(found, heading), encoding="utf-8")
    print(page(found, heading), end="", flush=True)
    sys.exit(1 if found.failed else 0)


if __name__ == "__main__":
    main()
