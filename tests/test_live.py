"""The runtime follows how far decode is: one word of shared memory, a row of the plan, a part of the SMs.

rollout  FULL ........ 9 ....... 3 ........ 0          rows  at most 16: wait   8: 64 SMs   4: all 132, no partition
prefix   waits         waits     no partition, all SMs       or from token 0       600         900
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from mutants.plans import SOLVED
from runtime_threads import TRAIN
from runtime_tiny import tiny_plan

from rollplex.backends.device import Device
from rollplex.backends.engine import Tasks
from rollplex.backends.live import FULL, LiveBatch
from rollplex.backends.memory.host import HostDevice
from rollplex.backends.training.beside import Beside
from rollplex.ir.errors import EngineError
from rollplex.ir.job import Job, load_job
from rollplex.ir.plan import Plan
from rollplex.ir.planned_sharing import Policy, PolicyRow
from rollplex.ir.steps import Run
from rollplex.runtime.controller import Controller
from rollplex.runtime.crew import Crew
from rollplex.runtime.holding import await_turn
from rollplex.runtime.patience import Silence
from rollplex.runtime.protocol import Entered, Held, Message
from rollplex.runtime.stages import Stages
from rollplex.runtime.state import ProcessState


@dataclass
class Parts:
    """A device that says which part of it work runs on."""

    on: list[int] = field(default_factory=list)
    made: list[int] = field(default_factory=list)

    def partition(self, sms: int) -> Callable[[], AbstractContextManager[None]]:
        self.made.append(sms)

        @contextmanager
        def part() -> Iterator[None]:
            self.on.append(sms)
            yield

        return part


def row(live: int, sms: int, tokens: int) -> PolicyRow:
    chunk = 6000 if sms else 0
    return PolicyRow(
        live_at_most=live, from_tokens=tokens, chunk_tokens=chunk, sms=sms, alone_s=1, decode_s=1, hidden_s=0
    )


def table(*rows: tuple[int, int], old: int = 10**6) -> Policy:
    """(responses, SMs) of rows that hold from token `old`, twice `old` .. on too, the first from the beginning."""
    return Policy(kind="solved", rows=tuple(row(n, sms, i * old) for i, (n, sms) in enumerate(rows)))


def beside(policy: Policy, tmp_path: Path, parts: Parts) -> tuple[Beside, LiveBatch]:
    path = tmp_path / "job.yaml"
    path.write_text(SOLVED)
    job: Job = load_job(path)
    here = Beside(policy, job, [LiveBatch(tmp_path, gpu) for gpu in (0, 1)], cast(Device, parts))
    return here, LiveBatch(tmp_path, 0)


def run_on(here: Beside, parts: Parts) -> int:
    """The SMs that a prompt ran on; 0: no partition."""
    parts.on.clear()
    assert here.may_begin()
    with here.prompt():
        pass
    return parts.on[0] if parts.on else 0


@dataclass
class Process:
    """A process that runs one prefix when the executor lets it; what its link hears of waiting, and how long it was."""

    here: Beside
    told: list[bool] = field(default_factory=list)
    began: threading.Event = field(default_factory=threading.Event)
    held_ns: int = -1

    def prefix(self) -> None:
        step = Run(window="P1 prefix-actor", task="prefix", node="kv", role="actor")
        engine = SimpleNamespace(may_begin=lambda step: self.here.may_begin())
        state = SimpleNamespace(engine=engine, link=SimpleNamespace(hold=self.told.append))
        self.held_ns = await_turn(cast(ProcessState, state), step)
        with self.here.prompt():
            self.began.set()


def test_a_word_is_seen_by_whoever_opens_it(tmp_path: Path) -> None:
    """Also when the directory is gone, and each GPU has its own."""
    ours, theirs, other = LiveBatch(tmp_path, 3), LiveBatch(tmp_path, 3), LiveBatch(tmp_path, 4)
    for file in tmp_path.iterdir():
        file.unlink()
    ours.tell(97, 480)
    assert (theirs.read(), other.read()) == ((97, 480), (0, 0))
    ours.tell(FULL)
    assert theirs.read() == (FULL, 0)
    ours.close()
    assert theirs.read() == (FULL, 0)


def test_a_word_is_never_seen_half_written(tmp_path: Path) -> None:
    """Responses and tokens of one telling, whichever: 20,000 are read while another process's thread writes."""
    ours, theirs, done = LiveBatch(tmp_path, 0), LiveBatch(tmp_path, 0), threading.Event()

    def write() -> None:
        while not done.is_set():
            ours.tell(1, 1)
            ours.tell(FULL, FULL)

    thread = threading.Thread(target=write)
    thread.start()
    found = {theirs.read() for _ in range(20_000)}
    done.set()
    thread.join()
    assert found <= {(0, 0), (1, 1), (FULL, FULL)}


def test_a_prompt_runs_by_the_row_of_what_decodes(tmp_path: Path) -> None:
    parts = Parts()
    here, live = beside(table((128, 32), (40, 64), (9, 96), (4, 132)), tmp_path, parts)
    assert parts.made == [32, 64, 96]
    found = {}
    for decoding in (FULL, 129, 128, 41, 40, 10, 9, 5, 4, 1, 0):
        live.tell(decoding)
        found[decoding] = run_on(here, parts)
    assert found == {FULL: 32, 129: 32, 128: 32, 41: 32, 40: 64, 10: 64, 9: 96, 5: 96, 4: 0, 1: 0, 0: 0}


def test_a_row_holds_from_its_token_on_whatever_decodes(tmp_path: Path) -> None:
    """Whichever comes first: so few responses, or so many tokens of the youngest."""
    parts = Parts()
    here, live = beside(table((128, 32), (40, 64), (9, 96), old=300), tmp_path, parts)
    found = {}
    for decoding, tokens in [(128, 299), (128, 300), (41, 599), (9, 300), (128, 600), (128, 1185), (2, 7), (0, 0)]:
        live.tell(decoding, tokens)
        found[decoding, tokens] = run_on(here, parts)
    assert found == {
        (128, 299): 32, (128, 300): 64, (41, 599): 64, (9, 300): 96, (128, 600): 96, (128, 1185): 96, (2, 7): 96,
        (0, 0): 0,
    }  # fmt: skip


def test_a_prompt_that_waits_begins_at_its_token(tmp_path: Path) -> None:
    here, live = beside(table((16, 0), (8, 64), old=300), tmp_path, Parts())
    live.tell(16, 299)
    assert not here.may_begin()
    live.tell(16, 300)
    assert here.may_begin()


def test_ranks_of_one_model_go_by_the_gpu_that_is_least_far(tmp_path: Path) -> None:
    """Each GPU by its own row: few that are young and many that are old are both far; what has ended has no say."""
    parts = Parts()
    here, live = beside(table((128, 32), (40, 64), old=300), tmp_path, parts)
    other = LiveBatch(tmp_path, 1)
    found = {}
    for ours, theirs in [((3, 10), (99, 300)), ((99, 299), (99, 300)), ((99, 300), (0, 0)), ((FULL, 0), (0, 0))]:
        live.tell(*ours)
        other.tell(*theirs)
        found[ours, theirs] = run_on(here, parts)
    assert list(found.values()) == [64, 32, 64, 32]


def test_ranks_of_one_model_go_by_the_fullest_of_their_gpus(tmp_path: Path) -> None:
    parts = Parts()
    here, live = beside(table((128, 32), (40, 64)), tmp_path, parts)
    live.tell(3)
    LiveBatch(tmp_path, 1).tell(99)
    assert run_on(here, parts) == 32


def test_a_prompt_waits_until_fewer_decode(tmp_path: Path) -> None:
    parts = Parts()
    here, live = beside(table((16, 0), (8, 64)), tmp_path, parts)
    live.tell(FULL)
    link = Process(here)
    thread = threading.Thread(target=link.prefix)
    thread.start()
    live.tell(9)
    time.sleep(0.05)
    assert not link.began.is_set()
    live.tell(8)
    assert link.began.wait(5)
    thread.join()
    assert parts.on == [64]
    assert (link.told, link.held_ns > 50e6) == ([True, False], True)


def test_a_prompt_that_need_not_wait_tells_nobody(tmp_path: Path) -> None:
    here, live = beside(table((16, 0), (8, 64)), tmp_path, Parts())
    live.tell(8)
    link = Process(here)
    link.prefix()
    assert (link.told, link.held_ns) == ([], 0)


def controller(plan: Plan, step_timeout_s: float) -> tuple[Controller, Callable[[Message], None]]:
    """One that hears of a training rank what it is told to hear, and knows of no other process."""
    job = Job.model_validate(plan.job)
    run = job.run.model_copy(update={"step_timeout_s": step_timeout_s})
    rank = SimpleNamespace(
        process=TRAIN, pid=1 << 23, silence=Silence(60), log="log", child=SimpleNamespace(poll=lambda: None)
    )
    crew = SimpleNamespace(members={TRAIN: rank}, inbox=SimpleQueue())
    heard = Controller(
        plan, job.model_copy(update={"run": run}), cast(Crew, crew), cast(Tasks, None), lambda event: None,
        Stages(lambda event: None),
    )  # fmt: skip
    return heard, lambda message: crew.inbox.put((TRAIN, message, []))


def looks(seconds: float) -> Callable[[], bool]:
    """Whether so many seconds have passed."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() >= until


def test_a_wait_that_the_sharing_asks_for_is_no_hang() -> None:
    """Longer than a step may take; behind it the work counts again."""
    plan = tiny_plan()
    prefix = next(i for i, s in enumerate(plan.programs["train"]) if isinstance(s, Run) and s.task == "prefix")
    hears, says = controller(plan, step_timeout_s=0.3)
    says(Entered(0, prefix))
    says(Held(True))
    hears.pump(looks(1.0))
    says(Held(False))
    with pytest.raises(EngineError, match=r"train 0 \(pid 8388608\) has been at it for 0.3 s .*: it hangs"):
        hears.pump(looks(5.0))


def test_a_prompt_that_waits_runs_when_decode_has_ended(tmp_path: Path) -> None:
    parts = Parts()
    here, live = beside(table((16, 0)), tmp_path, parts)
    live.tell(0)
    assert (run_on(here, parts), parts.made) == (0, [])


def test_a_fixed_share_is_lifted_behind_decode(tmp_path: Path) -> None:
    """60 % of 132 SMs while anything decodes, all of them then."""
    parts = Parts()
    here, live = beside(Policy(kind="fixed", share=0.6), tmp_path, parts)
    live.tell(FULL)
    assert run_on(here, parts) == 79
    live.tell(1)
    assert run_on(here, parts) == 79
    live.tell(0)
    assert run_on(here, parts) == 0


@pytest.mark.parametrize("kind", ["mps", "none"])
def test_mps_default_partitions_nothing(kind: str, tmp_path: Path) -> None:
    """Also where a surface gave its prediction rows."""
    parts = Parts()
    rows = table((128, 132)).rows if kind == "mps" else ()
    here, live = beside(Policy.model_validate({"kind": kind, "rows": rows}), tmp_path, parts)
    live.tell(FULL)
    assert (run_on(here, parts), parts.made) == (0, [])


def test_a_host_holds_nothing_to_a_part_of_its_cores() -> None:
    with HostDevice().partition(1)():
        assert torch.ones(1).item() == 1


def test_a_torch_without_green_contexts_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from rollplex.backends.cuda.partition import Partition

    monkeypatch.setitem(sys.modules, "torch.cuda.green_contexts", None)
    with pytest.raises(EngineError, match="64 SMs of GPU 0 cannot be split off: this torch has no green contexts"):
        Partition(0, 64)
