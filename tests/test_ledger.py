"""The ledger: one capacity for all processes of a device, a message that helps, a log that becomes bytes by window.

train0    mark A     acquire x ......... mark B .......... release x
rollout0       acquire kv ..... release kv
by window      A: x, kv, both            B: x
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.backends.memory import ledger as ledger_module
from rollplex.backends.memory.ledger import Event, Ledger, Mark
from rollplex.backends.memory.table import HOST, amount
from rollplex.backends.memory.usage import TOTAL, bytes_by_window, touched_by_window
from rollplex.ir.errors import EngineError, OutOfMemory, PlanError

PAGE = 4096
MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def train() -> Ledger:
    return Ledger.create("gpu0", 100 * PAGE, process="train0")


def join(ledger: Ledger, process: str) -> Ledger:
    return Ledger.attach(ledger.export(), process=process)


def fork(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return pid


def ending(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_processes_share_one_table(train: Ledger) -> None:
    rollout = join(train, "rollout0")
    assert (rollout.device, rollout.capacity_bytes, rollout.page_bytes) == ("gpu0", 100 * PAGE, PAGE)
    train.acquire("boundary", 10 * PAGE, "map boundary")
    assert rollout.acquire("kv", 30 * PAGE + 1, "map kv") == 31 * PAGE  # whole pages
    assert [(e.process, e.object, e.nbytes) for e in train.live()] == [
        ("rollout0", "kv", 31 * PAGE),
        ("train0", "boundary", 10 * PAGE),
    ]
    assert rollout.release("kv", "unmap kv") == 31 * PAGE
    assert (train.total_bytes, train.peak_bytes) == (10 * PAGE, 41 * PAGE)


def test_over_capacity_says_where_what_how_much_and_what_to_try() -> None:
    train = Ledger.create("gpu0", 80 * GIB, process="train0")
    train.mark("P3 update")
    train.acquire("actor.master", 15 * GIB, "fetch actor.master")
    train.acquire("actor.moments", 31 * GIB, "fetch actor.moments")
    join(train, "rollout0").acquire("rollout.kv", 29 * GIB, "map rollout.kv")
    with pytest.raises(OutOfMemory) as error:
        train.acquire("actor.grads", 16 * GIB, "fetch actor.grads")
    assert str(error.value).splitlines() == [
        "gpu0: fetch actor.grads, window P3 update: actor.grads asks for 16.00 GiB, "
        "but 75.00 GiB of 80.00 GiB are live: 11.00 GiB (11811160064 bytes) too many",
        "       31.00 GiB  actor.moments  (train0)",
        "       29.00 GiB  rollout.kv  (rollout0)",
        "       15.00 GiB  actor.master  (train0)",
        "    try: release or offload actor.moments before this step, or make actor.grads smaller",
    ]
    assert train.total_bytes == 75 * GIB  # a refusal changes nothing
    assert len(train.events()) == 2


def test_one_byte_decides() -> None:
    """A capacity one byte too small is refused, the exact one is not."""
    Ledger.create("gpu0", 10 * PAGE, process="t").acquire("x", 10 * PAGE, "map x")
    with pytest.raises(OutOfMemory, match=r"\(1 bytes\) too many"):
        Ledger.create("gpu0", 10 * PAGE - 1, process="t").acquire("x", 10 * PAGE, "map x")


def test_hints_of_the_first_object_and_of_the_host() -> None:
    with pytest.raises(OutOfMemory, match="split kv into smaller parts"):
        Ledger.create("gpu0", PAGE, process="t").acquire("kv", 2 * PAGE, "map kv")
    with pytest.raises(OutOfMemory, match="raise the cluster's host memory"):
        Ledger.create(HOST, PAGE, process="t").acquire("kv", 2 * PAGE, "map kv")


def test_refusals_name_step_and_object(train: Ledger) -> None:
    train.acquire("x", 1, "map x")
    with pytest.raises(PlanError, match="gpu0: map x again: x is mapped already by train0"):
        train.acquire("x", 1, "map x again")
    with pytest.raises(PlanError, match="unmap y: train0 holds no y"):
        train.release("y", "unmap y")
    with pytest.raises(PlanError, match="touch y: train0 holds no y"):
        train.touch("y", 1, "touch y")
    join(train, "rollout0").acquire("x", 1, "map x")  # another process' x is another object


def test_an_object_that_others_read_cannot_be_released(train: Ledger) -> None:
    rollout = join(train, "rollout0")
    train.acquire("snapshot", PAGE, "map snapshot")
    rollout.borrow("snapshot", "train0", "map snapshot")
    assert train.total_bytes == PAGE  # one physical copy
    with pytest.raises(PlanError, match="unmap snapshot: snapshot is still mapped by rollout0") as error:
        train.release("snapshot", "unmap snapshot")
    assert "a signal from them is missing" in str(error.value)
    with pytest.raises(PlanError, match="is still mapped by rollout0"):
        train.check_release("snapshot", "unmap snapshot")
    with pytest.raises(PlanError, match="snapshot is mapped already by rollout0"):
        rollout.borrow("snapshot", "train0", "map snapshot")
    with pytest.raises(PlanError, match="train0 holds no kv"):
        rollout.borrow("kv", "train0", "map kv")
    rollout.give_back("snapshot", "train0", "unmap snapshot")
    with pytest.raises(PlanError, match="rollout0 has not mapped snapshot of train0"):
        rollout.give_back("snapshot", "train0", "unmap snapshot")
    train.release("snapshot", "unmap snapshot")


def test_a_reservation_is_measured_and_may_grow(train: Ledger) -> None:
    train.mark("P2 train")
    train.acquire("activations", 10 * PAGE, "run train")
    train.touch("activations", 4 * PAGE + 5, "run train")
    train.touch("activations", 2 * PAGE, "run train")
    assert (train.live()[0].nbytes, train.live()[0].touched) == (10 * PAGE, 4 * PAGE + 5)
    train.touch("activations", 11 * PAGE - 1, "run train")
    assert train.total_bytes == 11 * PAGE
    with pytest.raises(OutOfMemory, match="run train, window P2 train: activations asks for"):
        train.touch("activations", 101 * PAGE, "run train")
    assert touched_by_window(train.events(), train.marks()) == {"P2 train": {"activations": 11 * PAGE - 1}}
    assert bytes_by_window(train.events(), train.marks())["P2 train"] == {"activations": 11 * PAGE, TOTAL: 11 * PAGE}


# --- several processes ---


def test_processes_never_exceed_the_capacity_together() -> None:
    """Four processes fight for 10 pages; the kernel's lock, not luck, keeps the sum right."""
    ledger = Ledger.create("gpu0", 10 * PAGE, process="watch")

    def fight(process: str) -> None:
        mine = join(ledger, process)
        refused = 0
        for turn in range(150):
            try:
                mine.acquire("x", (1 + turn % 5) * PAGE, "map x")
            except OutOfMemory:
                refused += 1
                continue
            mine.release("x", "unmap x")
        assert all(0 <= event.total <= 10 * PAGE for event in mine.events())
        assert len(mine.events()) == 2 * (150 - refused)

    children = [fork(lambda name=name: fight(name)) for name in ("a", "b", "c", "d")]
    assert [ending(pid) for pid in children] == [0, 0, 0, 0]
    assert ledger.total_bytes == 0
    assert 0 < ledger.peak_bytes <= 10 * PAGE


def test_threads_of_one_process_are_kept_apart_too(train: Ledger) -> None:
    def work(name: str) -> None:
        for _ in range(100):
            train.acquire(name, PAGE, "map")
            train.release(name, "unmap")

    threads = [threading.Thread(target=work, args=(f"o{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({event.seq for event in train.events()}) == 800
    assert train.total_bytes == 0


def test_a_process_killed_with_the_lock_held_frees_it(train: Ledger) -> None:
    def die() -> None:
        mine = join(train, "rollout0")
        mine.acquire("kv", 5 * PAGE, "map kv")
        with mine._table() as table:
            table.live.clear()  # it meant to write this, and never did
            os.kill(os.getpid(), signal.SIGKILL)

    train.acquire("x", PAGE, "map x")
    assert ending(fork(die)) == -signal.SIGKILL
    assert train.total_bytes == 6 * PAGE
    assert train.forget("rollout0") == 5 * PAGE
    assert [(e.process, e.object) for e in train.live()] == [("train0", "x")]
    assert train.events()[-1].total == PAGE


def test_a_process_killed_at_any_moment_leaves_a_whole_table(train: Ledger) -> None:
    def churn() -> None:
        mine = join(train, "rollout0")
        while True:
            mine.acquire("kv", 5 * PAGE, "map kv")
            mine.release("kv", "unmap kv")

    for turn in range(20):
        pid = fork(churn)
        time.sleep(0.01 + 0.0007 * turn)
        os.kill(pid, signal.SIGKILL)
        assert ending(pid) == -signal.SIGKILL
        assert train.forget("rollout0") in (0, 5 * PAGE)
        assert train.total_bytes == 0


def test_readers_that_died_are_forgotten(train: Ledger) -> None:
    train.acquire("snapshot", PAGE, "map snapshot")
    join(train, "rollout0").borrow("snapshot", "train0", "map snapshot")
    assert train.forget("rollout0") == 0
    train.release("snapshot", "unmap snapshot")


def test_a_hung_holder_is_reported(train: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_LOCK_TIMEOUT_S", 0.1)
    other = join(train, "rollout0")
    fcntl.flock(other._fd, fcntl.LOCK_EX)
    with pytest.raises(EngineError, match=r"gpu0: a process has kept the memory ledger locked for 0\.1 s") as error:
        train.acquire("x", 1, "map x")
    assert "stopped or hung" in str(error.value)


def test_the_table_holds_hundreds_of_objects(train: Ledger) -> None:
    big = Ledger.create("gpu0", 1 << 40, process="t")
    for i in range(500):
        big.acquire(f"object.with.a.rather.long.name.{i}", PAGE, "map")
    assert big.total_bytes == 500 * PAGE


def test_nothing_leaks() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        ledger = Ledger.create("gpu0", PAGE, process="a")
        other = join(ledger, "b")
        other.close()
        ledger.close()
    assert len(os.listdir("/proc/self/fd")) == before


# --- logs ---


def test_windows_of_one_process_count_the_objects_of_all(train: Ledger) -> None:
    rollout = join(train, "rollout0")
    train.acquire("weights", PAGE, "load")  # before the first window
    train.mark("P1 prefix")
    rollout.acquire("kv", 10 * PAGE, "map kv")
    train.acquire("scratch", 5 * PAGE, "map scratch")
    train.release("scratch", "unmap scratch")
    train.acquire("boundary", 3 * PAGE, "map boundary")
    train.mark("P1 decode")
    rollout.release("kv", "unmap kv")
    train.acquire("scratch", 6 * PAGE, "map scratch")
    train.mark("P2 train")
    train.release("boundary", "unmap boundary")
    events = train.events() + rollout.events()
    expected = {
        "P1 prefix": {"weights": PAGE, "kv": 10 * PAGE, "scratch": 5 * PAGE, "boundary": 3 * PAGE, TOTAL: 16 * PAGE},
        "P1 decode": {"weights": PAGE, "kv": 10 * PAGE, "boundary": 3 * PAGE, "scratch": 6 * PAGE, TOTAL: 14 * PAGE},
        "P2 train": {"weights": PAGE, "boundary": 3 * PAGE, "scratch": 6 * PAGE, TOTAL: 10 * PAGE},
    }
    assert bytes_by_window(events, train.marks()) == expected
    assert bytes_by_window(events[::-1], train.marks()[::-1]) == expected  # in whatever order the reports come


def test_events_say_who_when_where(train: Ledger) -> None:
    rollout = join(train, "rollout0")
    train.mark("P1 decode")
    start = time.monotonic_ns()
    rollout.acquire("kv", 1, "map kv")
    (event,) = rollout.events()
    assert start <= event.ns <= time.monotonic_ns()
    assert event == Event(event.ns, event.seq, "rollout0", "P1 decode", "acquire", "kv", PAGE, PAGE)
    rollout.mark("decode, step 3")  # a process may also mark windows of its own
    rollout.release("kv", "unmap kv")
    assert rollout.events()[-1].window == "decode, step 3"
    train.acquire("x", 1, "map x")
    assert train.events()[-1].window == "P1 decode"


def test_a_report_a_step_needs_no_earlier_report(train: Ledger) -> None:
    """Each mark carries what was live, so the log of step 2 alone gives its windows in full."""
    train.acquire("weights", 7 * PAGE, "load")
    train.mark("A")
    assert [len(part) for part in train.take_log()] == [1, 1]
    train.mark("A")
    train.acquire("x", PAGE, "map x")
    events, marks = train.take_log()
    assert bytes_by_window(events, marks) == {"A": {"weights": 7 * PAGE, "x": PAGE, TOTAL: 8 * PAGE}}
    assert train.take_log() == ([], [])


def test_a_window_that_comes_again_keeps_the_larger_figure(train: Ledger) -> None:
    for nbytes in (3 * PAGE, 9 * PAGE, 2 * PAGE):
        train.mark("A")
        train.acquire("x", nbytes, "map x")
        train.release("x", "unmap x")
        train.mark("B")
    assert bytes_by_window(train.events(), train.marks()) == {"A": {"x": 9 * PAGE, TOTAL: 9 * PAGE}, "B": {TOTAL: 0}}


actions = st.lists(
    st.tuples(st.sampled_from(["train0", "rollout0"]), st.sampled_from("abc"), st.integers(0, 9)), max_size=40
)


@given(actions=actions)
@settings(max_examples=60, deadline=None)
def test_bytes_by_window_equals_a_replay(actions: list[tuple[str, str, int]]) -> None:
    """Any interleaving: the figures equal those of somebody who watched the table after every change."""
    train = Ledger.create("gpu0", 1 << 40, process="train0")
    hands = {"train0": train, "rollout0": join(train, "rollout0")}
    seen: dict[str, dict[str, int]] = {}
    for turn, (process, name, size) in enumerate(actions):
        if size == 0:
            train.mark(f"w{turn % 3}")
        elif any(entry.process == process and entry.object == name for entry in train.live()):
            hands[process].release(name, "unmap")
        else:
            hands[process].acquire(name, size * PAGE, "map")
        if train.window:
            _watch(seen.setdefault(train.window, {TOTAL: 0}), train)
    events = [event for hand in hands.values() for event in hand.events()]
    assert bytes_by_window(events, train.marks()) == seen


def _watch(peaks: dict[str, int], ledger: Ledger) -> None:
    live: dict[str, int] = {}
    for entry in ledger.live():
        live[entry.object] = live.get(entry.object, 0) + entry.nbytes
    for name, nbytes in {**live, TOTAL: sum(live.values())}.items():
        peaks[name] = max(peaks.get(name, 0), nbytes)


def test_marks_and_events_are_plain_data(train: Ledger) -> None:
    """They travel in the step report: made of numbers, strings and dicts of them."""
    train.acquire("x", 1, "map x")
    train.mark("A")
    (event,), (mark,) = train.take_log()
    assert Event(**vars(event)) == event
    assert Mark(**vars(mark)) == mark
    assert mark.live == {"x": PAGE}


def test_amounts_for_people() -> None:
    assert [amount(n) for n in (0, 2048, MIB // 2, GIB // 2, 80 * GIB)] == [
        "0.00 KiB",
        "2.00 KiB",
        "0.50 MiB",
        "0.50 GiB",
        "80.00 GiB",
    ]
