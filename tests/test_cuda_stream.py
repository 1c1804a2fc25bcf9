"""The optimizer's stream on a GPU: pinned state, streams for lanes, the result of torch's fused AdamW to the bit."""

from __future__ import annotations

import pytest
import torch

from rollplex.backends.lanes import LaneSpan
from rollplex.ir.errors import EngineError
from rollplex.runtime.optimizer import AdamConfig, ChunkedAdam, FlatState, Workspace, flat_layout
from rollplex.runtime.stream import UPDATE, ChunkStream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and cuda-python")

SIZES = (("embed", 70_000), ("norm", 300), ("mlp", 129_001))
NUMEL = sum(numel for _, numel in SIZES)


def pinned(numel: int) -> torch.Tensor:
    """A float32 tensor over host pages that the driver has locked."""
    from rollplex.backends.cuda.pinned import register
    from rollplex.backends.memory.memfd import HostMemory

    arena = HostMemory().reserve("state", 4 * numel)
    arena.map()
    register(arena, 0)
    return arena.view(0, (numel,), torch.float32)


def spans_of(adam: ChunkedAdam, chunks: list[tuple[int, int]], in_flight: int, step: int) -> tuple[LaneSpan, ...]:
    from rollplex.backends.cuda.lanes import StreamLanes

    longest = max(stop - start for start, stop in chunks)
    ring = [Workspace(*(torch.empty(longest, device="cuda") for _ in range(4))) for _ in range(in_flight)]
    stream = ChunkStream(adam, chunks, ring, StreamLanes(0, 30), step, 1.0, "actor")
    for index in range(len(chunks)):
        stream.update(index)
    torch.cuda.synchronize()
    return stream.spans()


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_three_steps_of_pinned_state_are_torchs_adamw_on_the_gpu_to_the_bit(in_flight: int) -> None:
    torch.manual_seed(0)
    start = torch.randn(NUMEL)
    whole = torch.nn.Parameter(start.cuda())
    torchs = torch.optim.AdamW([whole], lr=1e-3, weight_decay=0.1, foreach=False, fused=True)
    state = FlatState(*(pinned(NUMEL) for _ in range(4)))
    state.master.copy_(start)
    snapshot = {name: torch.empty(numel, dtype=torch.bfloat16, device="cuda") for name, numel in SIZES}
    adam = ChunkedAdam(AdamConfig(1e-3, weight_decay=0.1), flat_layout(SIZES), state, snapshot)
    chunks = [(at, min(at + 33_333, NUMEL)) for at in range(0, NUMEL, 33_333)]
    for step in range(1, 4):
        gradient = torch.randn(NUMEL)
        state.grad.copy_(gradient)
        whole.grad = gradient.cuda()
        torchs.step()
        spans_of(adam, chunks, in_flight, step)
        assert torch.equal(state.master, whole.detach().cpu())
    kept = torchs.state[whole]
    assert torch.equal(state.exp_avg, kept["exp_avg"].cpu())
    assert torch.equal(state.exp_avg_sq, kept["exp_avg_sq"].cpu())
    assert torch.equal(torch.cat(list(snapshot.values())), whole.detach().bfloat16())


def test_lanes_overlap_and_chunks_keep_their_order() -> None:
    numel = 48 << 20
    state = FlatState(*(pinned(numel) for _ in range(4)))
    adam = ChunkedAdam(AdamConfig(1e-3), flat_layout([("w", numel)]), state, {})
    chunks = [(at, at + numel // 6) for at in range(0, numel, numel // 6)]
    spans_of(adam, chunks, 3, 1)
    spans = {span.text.removesuffix(" of actor"): span for span in spans_of(adam, chunks, 3, 2)}
    for index in range(6):
        load, update, store = (spans[f"{stage} of chunk {index}"] for stage in ("load", UPDATE, "store"))
        assert load.stop_ns <= update.start_ns + 2000
        assert update.stop_ns <= store.start_ns + 2000  # events are read in steps of half a microsecond
    for index in range(2, 5):
        store, load = spans[f"store of chunk {index - 1}"], spans[f"load of chunk {index + 1}"]
        assert load.start_ns < store.stop_ns


def test_work_that_does_not_end_is_given_up() -> None:
    from rollplex.backends.cuda.lanes import StreamLanes

    lanes = StreamLanes(0, 0.2)
    slow = lanes.run("load", "load of chunk 0 of actor", lambda: torch.cuda._sleep(4_000_000_000))
    with pytest.raises(EngineError, match=r"GPU: load of chunk 0 of actor has not ended for 0.2 s"):
        lanes.wait([slow])
    torch.cuda.synchronize()
