"""How long each window's compute takes, and how much of the decode window the trainer leaves idle."""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.ir.job import Job
from rollplex.ir.lora import lora_of
from rollplex.ir.planned_layout import LayoutSummary
from rollplex.ir.work import turn_work
from rollplex.passes.co_run import CoRun, shared
from rollplex.passes.costs import INTERFERENCE_SHARE, Costs
from rollplex.passes.schedule import Schedule, Window, turned
from rollplex.passes.stream_times import StreamTimes, completions, stream_times
from rollplex.passes.work import decoded_bytes, one_copy, updated_parameters


@dataclass(frozen=True)
class Turn:
    """One turn: its decode, its prefixes (`beside_s` under the sharing policy), and what they cost each other.

    `idle_s` is the part of its windows that the trainer's GPUs have free, the environment's seconds included.
    """

    decode_s: float
    prefix_s: float
    beside_s: float
    interference_s: float
    environment_s: float
    overlapped: bool
    stream: StreamTimes | None = None
    shared: CoRun | None = None

    def stretched(self, seconds: float) -> float:
        """How long a part of the prefixes takes beside decode."""
        return seconds if self.beside_s == self.prefix_s else seconds * self.beside_s / self.prefix_s

    @property
    def last_s(self) -> float:
        """Decode and prefixes, beside each other or one after the other."""
        if not self.overlapped:
            return self.decode_s + self.prefix_s
        return max(self.decode_s + self.interference_s, self.beside_s)

    @property
    def idle_s(self) -> float:
        """What is left of an overlapped turn when its prefixes have ended, and before a first group is trained on."""
        if self.stream:
            return self.stream.waits_s
        return self.last_s - self.beside_s + self.environment_s if self.overlapped else 0.0

    @property
    def saving_bound_s(self) -> float:
        """The most that overlap can save of the turn (paper section 3.1, equation 1)."""
        return max(0.0, min(self.prefix_s - self.interference_s, self.decode_s))


@dataclass(frozen=True)
class Timeline:
    """Seconds of compute by window, without transfers; turn by turn what decode and prefixes take.

    `compute` is each window's own work; `window` how long the window lasts, where decode runs beside the prefixes.
    `free_s` is by turn the part of P1 that the trainer's GPUs have free for transfers. `sampling_s` is the part of
    `decode_s` that no prefix may run beside: rounds of dynamic sampling before the last.
    """

    compute: dict[str, float]
    window: dict[str, float]
    turns: tuple[Turn, ...]
    free_s: tuple[float, ...]
    post_s: float
    sampling_s: float = 0.0

    @property
    def hidden_post_s(self) -> float:
        """Work of P2 that is done while others decode."""
        return sum(t.stream.hidden_s for t in self.turns if t.stream)

    @property
    def decode_s(self) -> float:
        """All rounds and turns of sampling."""
        return self.sampling_s + sum(t.decode_s for t in self.turns)

    @property
    def prefix_s(self) -> float:
        """Prefixes of all turns."""
        return sum(t.prefix_s for t in self.turns)

    @property
    def interference_s(self) -> float:
        """Decode's slowdown beside the prefixes."""
        return sum(t.interference_s for t in self.turns)

    @property
    def environment_s(self) -> float:
        """Between the turns."""
        return sum(t.environment_s for t in self.turns)


@dataclass(frozen=True)
class Added:
    """What the layout of the weights adds to a step: to decode that reads them so, and to their publication."""

    decode_s: float = 0.0
    publish_s: float = 0.0

    @classmethod
    def of(cls, job: Job, layout: LayoutSummary) -> Added:
        """Of a plan's layout. A second copy is written in the rollout engine's own order: nothing is rebuilt."""
        if not one_copy(job):
            return cls(publish_s=layout.exchange_s)
        frozen = lora_of(job) is not None  # a base that is rebuilt once, when the engines start
        rebuild = 0.0 if frozen else sum(c.rebuild_s for c in layout.classes)
        return cls(sum(c.decode_s for c in layout.classes), layout.exchange_s + rebuild)


def window_seconds(job: Job, schedule: Schedule, added: Added, step: int | None = None) -> Timeline:
    """The timeline of a job under a schedule, a suffix step taking so many responses, or else a whole group."""
    windows, rounds = schedule.windows, _rounds_s(job)
    own = {w.name: _window_s(job, schedule, w, step) for w in windows if w.kind not in ("decode", "stream", "publish")}
    compute = {w.name: added.publish_s if w.kind == "publish" else own.get(w.name, 0.0) for w in windows}
    compute |= {"P1 sample": sum(rounds)} if rounds else {}
    each = added.decode_s / len(schedule.turns)
    compute |= {_decoding(schedule, t): _decode_s(job, t) + each for t in schedule.turns}
    early = [w for w in windows if w.kind == "prefix" or (w.kind == "score" and w.phase == "P1")]
    group_s = sum(compute[w.name] for w in schedule.streaming)
    post = sum(compute[w.name] for w in windows if w.kind not in ("decode", "stream") and w not in early)
    post += (job.prompts_per_rank - 1) * group_s
    turns = tuple(_turn(job, schedule, compute, early, t) for t in schedule.turns)
    window = dict(compute)
    for t, found in zip(schedule.turns, turns, strict=True):
        last = _decoding(schedule, t)
        mine = [w.name for w in early if w.turn == t and schedule.overlapped]
        window |= {name: found.stretched(compute[name]) for name in mine}
        window[last] = found.idle_s if schedule.overlapped else compute[last] + found.environment_s
        if found.stream:
            window[last] = found.stream.window_s
    return Timeline(compute, window, turns, _free(job, schedule, turns, sum(rounds)), post, sum(rounds))


def _decoding(schedule: Schedule, turn: int) -> str:
    """The window that decode ends in."""
    return schedule.stream.name if schedule.stream else turned("P1 decode", turn)


def _turn(job: Job, schedule: Schedule, compute: dict[str, float], early: list[Window], turn: int) -> Turn:
    decode, prefix = compute[_decoding(schedule, turn)], sum(compute[w.name] for w in early if w.turn == turn)
    share, turns = _share(job) if schedule.overlapped else 1.0, job.workload.turns
    stream = None
    if schedule.stream:
        ready = completions(job, decoded_bytes(job))
        slower = decode / ready[-1] if ready[-1] else 1.0  # by what the layout adds to reading weights
        group_s = sum(compute[w.name] for w in schedule.streaming)
        stream = stream_times([c * slower for c in ready], prefix, group_s, share)
    interference = min(decode, prefix) * INTERFERENCE_SHARE * share if schedule.overlapped else 0.0
    beside = shared(job, decode, prefix) if schedule.overlapped else None
    return Turn(
        decode_s=decode,
        prefix_s=prefix,
        beside_s=beside.prefix_ends_s if beside else prefix / share,
        interference_s=stream.interference_s if stream else beside.interference_s if beside else interference,
        environment_s=turns.environment_s if turns and turn < len(schedule.turns) else 0.0,
        overlapped=schedule.overlapped,
        stream=stream,
        shared=beside,
    )


def _free(job: Job, schedule: Schedule, turns: tuple[Turn, ...], sampling: float) -> tuple[float, ...]:
    """By turn, when the trainer's GPUs may move: while others decode, and beside nothing."""
    if schedule.overlapped:
        free = [t.idle_s for t in turns]
    else:
        free = [t.decode_s + t.environment_s if job.disaggregated else 0.0 for t in turns]
    return (free[0] + (sampling if schedule.overlapped or job.disaggregated else 0.0), *free[1:])


def _share(job: Job) -> float:
    """A fixed share slows both sides in proportion; under MPS default either may take all that is idle."""
    return job.sharing.share or 1.0


def _decode_s(job: Job, turn: int, prompts: int | None = None) -> float:
    """Seconds of a turn's decode for so many prompts of an engine: those of the last round of sampling."""
    each = job.sampled_per_engine[-1] if prompts is None else prompts
    return Costs(job).decode_s(decoded_bytes(job), job.rollout_tp, each, turn)


def _rounds_s(job: Job) -> list[float]:
    """Seconds of every round of sampling before the last."""
    return [_decode_s(job, 1, prompts) for prompts in job.sampled_per_engine[:-1]]


def _window_s(job: Job, schedule: Schedule, window: Window, step: int | None) -> float:
    costs, role = Costs(job), window.role
    prompts = 1 if window in schedule.streaming else job.prompts_of(role)  # the last group
    calls = [(turn_work(job, role, c.turn), c.op == "whole") for c in schedule.work(window) if c.op != "generate"]
    match window.kind:
        case "prefix":
            return sum(costs.prefix_s(work, job.prefixes_of(role)) for work, _ in calls)
        case "score":
            return sum(costs.score_s(work, prompts, whole, step) for work, whole in calls)
        case "train":
            own = sum(costs.train_s(work, prompts, whole, step) for work, whole in calls)
            return own + _with_group_s(job, schedule, role)
        case _:
            return costs.adam_s(updated_parameters(job, window.role))


def _with_group_s(job: Job, schedule: Schedule, role: str) -> float:
    """Prefixes that a role runs where it trains, each with its group."""
    prefixes = schedule.prefixes(role) if job.with_group(role) else ()
    return sum(Costs(job).prefix_s(turn_work(job, role, c.turn), job.prompts_of(role)) for c in prefixes)
