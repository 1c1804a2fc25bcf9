"""Messages between the controller and an engine process: whole, in order, with their descriptors, or Closed."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.runtime import protocol
from rollplex.runtime.channel import Channel, Closed, pair
from rollplex.runtime.patience import TICK_S, Silence
from rollplex.runtime.protocol import Exported, Signalled


@pytest.fixture
def ends():
    a, b = (Channel(sock) for sock in pair())
    yield a, b
    a.close()
    b.close()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@settings(max_examples=30, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]),
    shape=st.lists(st.integers(0, 4), max_size=3),
)
def test_a_tensor_arrives_with_its_bits_dtype_and_shape(dtype: torch.dtype, shape: list[int]) -> None:
    sent = torch.randint(0, 2, shape).to(dtype)
    message = protocol.decode(
        bytearray().join(protocol.encode(Signalled("rollout", {"tokens": sent, "again": sent.clone()})))
    )
    assert isinstance(message, Signalled)
    got = message.values["tokens"]
    assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
    assert torch.equal(got, sent)
    got.zero_()
    assert torch.equal(message.values["again"], sent)


def test_a_view_travels_without_the_storage_behind_it() -> None:
    row = torch.arange(1 << 20)[5:8]
    assert sum(map(len, protocol.encode(Signalled("e", {"row": row})))) < 1000


def test_a_frame_larger_than_the_socket_buffer_arrives_whole(ends: tuple[Channel, Channel]) -> None:
    a, b = ends
    body = os.urandom(1 << 22)
    sender = threading.Thread(target=a.send, args=([body[:99], body[99:]],))
    sender.start()
    got, fds = b.receive()
    sender.join()
    assert got == body
    assert fds == []


def test_descriptors_travel_with_their_message_and_none_is_left_behind(ends: tuple[Channel, Channel]) -> None:
    a, b = ends
    before = open_fds()
    pages = [os.memfd_create(f"page{i}") for i in range(5)]
    inodes = [os.fstat(fd).st_ino for fd in pages]
    protocol.send(a, Exported("actor.snapshot"), tuple(pages))
    body, fds = b.receive()
    assert protocol.decode(body) == Exported("actor.snapshot")
    assert [os.fstat(fd).st_ino for fd in fds] == inodes
    for fd in fds:
        os.close(fd)
    assert open_fds() == before


def test_a_pulse_is_an_empty_frame(ends: tuple[Channel, Channel]) -> None:
    ends[0].pulse()
    assert ends[1].receive() == (bytearray(), [])


def test_the_death_of_the_other_end_ends_a_receive_and_a_send(ends: tuple[Channel, Channel]) -> None:
    a, b = ends
    threading.Timer(0.2, a.close).start()
    with pytest.raises(Closed):
        b.receive()
    with pytest.raises(Closed):
        b.send([b"anyone there?"])


def test_closing_ends_a_send_that_nobody_reads(ends: tuple[Channel, Channel]) -> None:
    a, _ = ends
    threading.Timer(0.2, a.close).start()
    with pytest.raises(Closed):
        a.send([bytes(1 << 22)])


def test_silence_is_counted_only_while_we_look() -> None:
    now = [0.0]
    silence = Silence(limit_s=2.0, clock=lambda: now[0])
    now[0] = 3600.0  # the laptop slept
    assert not silence.too_long()
    for _ in range(4):
        now[0] += TICK_S
        assert not silence.too_long()
    silence.heard()
    looks = 0
    while not silence.too_long():
        now[0] += TICK_S
        looks += 1
    assert looks * TICK_S == pytest.approx(2.0, abs=2 * TICK_S)
