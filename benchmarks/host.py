"""The whole mechanism on this CPU: schedules, publication, the optimizer's stream, copies of the actor.

    python -m benchmarks.host [--rounds 3] [--steps 6] [--millions 32] [--out benchmarks/results/host.md]

Minutes on two cores that are otherwise idle; beside other work the figures mean little, and the page tells the load.
The last line sums up. See host_schedules.py, host_publication.py and host_update.py for what is measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.host_publication import Publications, timed_publications
from benchmarks.host_schedules import Measured, measure
from benchmarks.host_update import CHUNKS, STREAMED_BYTES, TENSORS, Updates, timed_updates, whole_tensors
from benchmarks.page import command, measured_with, table

REPEATS = 7


def say(text: str) -> None:
    """Progress; the page alone goes to standard output."""
    print(text, file=sys.stderr, flush=True)


def compared(found: list[Measured], steps: int) -> list[str]:
    """A row a schedule, all against the faster serial."""
    serial = fastest_serial(found)
    rows = []
    for m in found:
        times = (f"{m.step_s:.3f}", f"{serial / m.step_s:.2f}x")
        windows = (f"{m.of(lambda o: o.decode_s):.3f}", f"{m.of(lambda o: o.prefix_s):.3f}")
        shares = (f"{m.of(lambda o: o.hidden_share):.0%}", f"{m.of(lambda o: o.post_hidden_share):.0%}")
        rows.append((m.name, *times, *windows, *shares))
    job = found[0].plan.job
    load, model = job["workload"], job["model"]["config"]
    text = (
        f"{load['prompts']} prompts of {load['frames']} frames and at most {load['prompt_tokens']} tokens, "
        f"{load['group']} responses each of at most {load['response_tokens']} (median {load['response_median']}); "
        f"{model['num_hidden_layers']} layers of {model['hidden_size']}, float32; medians of {len(found[0].seconds)} "
        "runs in turn (one run of serial with a thread for every core), each the mean of "
        f"{steps - 1} steps behind the first. "
        "The schedules have one thread a process, and end in the same weights, moments and samples to the bit."
    )
    head = ("schedule", "step s", "over serial", "decode s", "prefix s", "prefix hidden", "post hidden")
    return ["## Schedules", "", text, "", *table(head, rows)]


def fastest_serial(found: list[Measured]) -> float:
    """Seconds of a step of serial, with one thread or with all cores."""
    return min(m.step_s for m in found if m.schedule == "serial")


def moved(publications: Publications, updates: Updates, numel: int) -> list[str]:
    """Publication and update of a state of its own, larger than that of the schedules' model."""
    text = f"{numel * 2 / 2**20:.0f} MiB of BF16 weights until another process has read them; medians of {REPEATS}."
    ways = {"in place": publications.in_place, "copy and load": publications.copy_and_load}
    lines = ["## Publication", "", text, "", *table(("way", "ms"), [(n, f"{s * 1e3:.3f}") for n, s in ways.items()])]
    text = (
        f"One AdamW update of {numel:,} parameters in {TENSORS} tensors, {CHUNKS} chunks; float32 state, BF16 weights "
        f"written; {STREAMED_BYTES} bytes a parameter; a thread a lane; medians of {REPEATS}; the same bits each way."
    )
    named = {
        "chunks that overlap, 3 in flight": updates.overlapped,
        "chunks one after the other": updates.one_by_one,
        "torch.optim.AdamW, unchunked": updates.unchunked,
    }
    rows = [(n, f"{s * 1e3:.1f}", f"{numel * STREAMED_BYTES / s / 1e9:.2f}") for n, s in named.items()]
    return [*lines, "", "## Optimizer stream", "", text, "", *table(("way", "ms", "GB/s"), rows)]


def summary(found: list[Measured], publications: Publications, updates: Updates) -> str:
    """The one line that the rest explains."""
    serial, one = fastest_serial(found), {m.schedule: m for m in found if m.threads == 1}
    steps = [f"{n} {one[n].step_s:.3f} s ({serial / one[n].step_s:.2f}x)" for n in ("rollplex", "streamed")]
    place, copy = publications.in_place * 1e3, publications.copy_and_load * 1e3
    return (
        f"serial {serial:.3f} s, {', '.join(steps)}; "
        f"prefix hidden {one['rollplex'].of(lambda o: o.hidden_share):.0%}; "
        f"publication {place:.3f} ms, copy and load {copy:.3f} ms; "
        f"optimizer stream {updates.overlapped * 1e3:.1f} ms, unchunked {updates.unchunked * 1e3:.1f} ms; "
        f"second copy of the actor {max(m.second_copy for m in found)} bytes"
    )


def main() -> None:
    """Measure, print the page, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each schedule")
    parser.add_argument("--steps", type=int, default=6, help="of each run; the first is not timed")
    parser.add_argument("--millions", type=float, default=32.0, help="parameters that are updated and published")
    parser.add_argument("--out", type=Path, help="write the page there too")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    heading = measured_with("torch", "transformers")
    numel = whole_tensors(int(asked.millions * 1e6))
    publications = timed_publications(numel, REPEATS)  # first: the other process is a fork
    say(f"publication: {publications.in_place * 1e3:.3f} ms in place")
    updates = timed_updates(numel, REPEATS)
    say(f"update: {updates.overlapped * 1e3:.1f} ms")
    found = measure(asked.rounds, asked.steps, say)
    if any(d != found[0].digests[0] for m in found if m.threads == 1 for d in m.digests):
        sys.exit("the schedules ended in different weights, moments or samples")
    lines = ["# The mechanism on a CPU", "", f"`{command()}`; {heading}.", ""]
    lines += [*compared(found, asked.steps), "", *moved(publications, updates, numel), ""]
    text = "\n".join([*lines, summary(found, publications, updates)]) + "\n"
    if asked.out:
        asked.out.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
