"""When the prompt groups of a step are complete, and how much of the work behind decode is done before it ends.

decode  |=======================================|          C[m]  groups 0 .. m of every rank are complete
stream       |0 |  |1 |    |2 ||3 |                        starts at max(end of m - 1, C[m])
last                                            |4 |

C[m] is the expected longest of the first (m + 1) groups' responses of all data-parallel ranks, for a group's event is
one for all ranks. Of k responses the longest is expected at the quantile 1 - 1 / 2k, as in lengths.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollplex.ir.job import Job
from rollplex.passes.costs import INTERFERENCE_SHARE, Costs
from rollplex.passes.lengths import Lengths


@dataclass(frozen=True)
class StreamTimes:
    """Seconds: how long the stream's window is, how much of P2 and P3's work it hides, how decode is slowed down.

    `waits_s` is how long the trainer waits for the first group.
    """

    window_s: float
    hidden_s: float
    interference_s: float
    waits_s: float


def completions(job: Job, weight_bytes: float) -> tuple[float, ...]:
    """C[m]: seconds of undisturbed decode until groups 0 .. m of every rank are complete."""
    lengths, each = Lengths.of(job), job.group * job.data_parallel(job.policy)
    costs, prompts = Costs(job), job.sampled_per_engine[-1]
    tokens = [lengths.longest_of(each * (m + 1)) for m in range(job.prompts_per_rank)]
    return tuple(costs.decode_s(weight_bytes, job.rollout_tp, prompts, until=t) for t in tokens)


def stream_times(ready: Sequence[float], prefix_s: float, group_s: float, share: float = 1.0) -> StreamTimes:
    """The stream of groups that are complete at `ready` and take `group_s` each, behind prefixes of `prefix_s`.

    stream_times((4.0, 10.0), 2.0, 3.0).hidden_s == 3.0 (and a little less, for it slows decode down)
    """
    decode_s = ready[-1]
    beside = INTERFERENCE_SHARE * share * min(decode_s, prefix_s)
    first = _stream(ready, prefix_s / share, group_s, share, beside)
    slowed = INTERFERENCE_SHARE * share * min(decode_s, prefix_s + first.hidden_s)
    return _stream(ready, prefix_s / share, group_s, share, slowed)


def _stream(ready: Sequence[float], begins: float, group_s: float, share: float, slower: float) -> StreamTimes:
    stretch = 1 + slower / ready[-1] if ready[-1] else 1.0
    ends, now = ready[-1] * stretch, begins
    for complete in ready[:-1]:
        now = _done(max(now, complete * stretch), group_s, ends, share)
    whole = max(ends, begins) + (len(ready) - 1) * group_s
    last = max(now, ends)
    return StreamTimes(last - begins, max(whole - last, 0.0), slower, max(ready[0] * stretch - begins, 0.0))


def _done(start: float, work_s: float, decode_ends: float, share: float) -> float:
    """When work ends that has a share of the GPU while decode runs, and all of it afterwards."""
    beside = max(decode_ends - start, 0.0) * share
    return start + work_s / share if work_s <= beside else max(start, decode_ends) + work_s - beside
