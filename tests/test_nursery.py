"""Engine processes are forks of a nursery, children of the controller, and named."""

from __future__ import annotations

import os
import signal
import stat
import sys
from pathlib import Path

import psutil
import pytest

from rollplex.ir.errors import EngineError
from rollplex.runtime.channel import Channel, pair
from rollplex.runtime.crew import child_environment
from rollplex.runtime.nursery import Child, Nursery, kept, nursery

pytestmark = pytest.mark.processes

ENVIRONMENT = child_environment(os.environ, 1)


def test_what_the_user_has_set_for_nccl_reaches_engines_and_nothing_else_does() -> None:
    """Multicast over NVLink off, for one: engines on several GPUs must not switch it on by themselves."""
    off = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
    assert child_environment(off, 1).items() >= off.items()
    assert not [name for name in child_environment({}, 1) if name.startswith(("NCCL", "NVSHMEM", "TORCH_"))]


def forked(one: Nursery, log: Path, modules: tuple[str, ...] = ()) -> tuple[Child, Channel]:
    ours, theirs = pair()
    return one.fork("train 7", theirs, log, modules), Channel(ours)


def test_an_engine_is_a_named_child_that_outlives_its_nursery(tmp_path: Path) -> None:
    with nursery(ENVIRONMENT) as one:
        child, channel = forked(one, tmp_path / "log", ("no.such.module",))
    process = psutil.Process(child.pid)
    assert (process.ppid(), process.name()) == (os.getpid(), "train 7")
    assert channel.receive() == (b"", [])  # a pulse
    assert child.poll() is None
    child.kill()
    assert child.wait(10) == child.poll() == -signal.SIGKILL
    channel.close()


def test_an_engine_ends_with_the_channel(tmp_path: Path) -> None:
    with nursery(ENVIRONMENT) as one:
        child, channel = forked(one, tmp_path / "log")
    channel.close()
    assert child.wait(10) not in (None, 0)


def test_a_kept_nursery_serves_the_next_run_while_it_lives_and_imports_alike() -> None:
    def pid(environment: dict[str, str]) -> int:
        with nursery(environment) as one:
            return one.pid

    with kept():
        first = pid(ENVIRONMENT)
        assert pid({**ENVIRONMENT, "ANY_NAME": "1"}) == first
        other = pid({**ENVIRONMENT, "OMP_NUM_THREADS": "2"})
        assert other != first
        os.kill(other, signal.SIGKILL)
        os.waitid(os.P_PID, other, os.WEXITED | os.WNOWAIT)
        assert pid({**ENVIRONMENT, "OMP_NUM_THREADS": "2"}) != other


SAYS = """
import gc, os
os.register_at_fork(after_in_child=lambda: open({path!r}, "a").write(f"{{gc.get_freeze_count()}}\\n"))
"""


def test_collections_in_an_engine_leave_alone_what_it_shares_with_the_nursery(tmp_path: Path) -> None:
    """All that was imported before the fork; a collection that looks at it copies its pages."""
    said = tmp_path / "said"
    (tmp_path / "says.py").write_text(SAYS.format(path=str(said)))
    with nursery(child_environment({**os.environ, "PYTHONPATH": str(tmp_path)}, 1)) as one:
        child, channel = forked(one, tmp_path / "log", ("says",))
    child.kill()
    child.wait(10)
    channel.close()
    assert [int(line) > 100_000 for line in said.read_text().splitlines()] == [True, True], "both forks"


def test_a_nursery_that_cannot_import_is_an_error_with_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(broken))
    one = Nursery(ENVIRONMENT)
    with pytest.raises(EngineError, match=r"cannot start train 7: the process that starts engines ended with status 3"):
        forked(one, tmp_path / "log")
    one.close()
