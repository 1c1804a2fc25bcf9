"""What is asked of the CUDA driver, and in which order, by a driver that notes it; nothing here needs a GPU.

pages     made, laid, zeroed, waited for     then handed out, or closed to writes
"""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import MagicMock

import pytest
import torch

from rollplex.backends.cuda import vmm
from rollplex.backends.cuda.vmm import CudaMemory

MIB = 1 << 20


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A driver in which everything succeeds; torch's waits are among its calls."""
    found = MagicMock()
    for name in ("cuMemUnmap", "cuMemRelease", "cuMemMap", "cuMemSetAccess", "cuMemsetD8"):
        getattr(found, name).return_value = (0,)
    for name, value in (
        ("cuDeviceGetAttribute", 1),
        ("cuMemGetAllocationGranularity", 2 * MIB),
        ("cuMemAddressReserve", 4096),
        ("cuMemCreate", 7),
        ("cuMemExportToShareableHandle", 9),
    ):
        getattr(found, name).return_value = (0, value)
    monkeypatch.setattr(vmm.cuda, "bindings", lambda: found)
    monkeypatch.setattr(vmm.cuda, "use", lambda device: None)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: found.default_stream)
    monkeypatch.setattr(torch.cuda, "synchronize", found.synchronize)
    return found


def calls(noted: MagicMock, act: Callable[[], object]) -> list[str]:
    noted.reset_mock()
    act()
    return [name for name, _, _ in noted.mock_calls if name.startswith("cuMem") or "sync" in name]


def test_pages_are_zero_before_anybody_else_may_write_them(noted: MagicMock) -> None:
    """The stream that writes zeros is waited for: lanes and other processes have no order with it."""
    arena = CudaMemory(0, chunk_bytes=2 * MIB).reserve("actor.snapshot", 4 * MIB)
    made = ["cuMemCreate", "cuMemCreate", "cuMemMap", "cuMemMap", "cuMemSetAccess", "cuMemsetD8", "cuMemsetD8"]
    assert calls(noted, arena.map) == [*made, "default_stream.synchronize"]
    assert calls(noted, arena.export) == ["cuMemExportToShareableHandle"] * 2
    assert calls(noted, arena.unmap)[0] == "synchronize"
    found = calls(noted, lambda: arena.map(writable=False))
    assert found[-2:] == ["default_stream.synchronize", "cuMemSetAccess"]
