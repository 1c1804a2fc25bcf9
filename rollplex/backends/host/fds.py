"""File descriptors with a small JSON header over a Unix socket: how pages travel between the processes of one host.

    owner    send_fds(sock, {"object": "actor.snapshot"}, arena.export())      closes its copies once they are sent
    reader   header, fds = recv_fds(sock, timeout_s=30); arena.adopt(fds)      adopt closes them

On the wire: 8 bytes (length of the header, number of fds), the header, then one byte for every batch of fds.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rollplex.ir.errors import EngineError

FDS_A_MESSAGE = 128  # the kernel's SCM_MAX_FD is 253
_PREFIX = struct.Struct("!II")


def send_fds(sock: socket.socket, header: dict[str, Any], fds: Sequence[int], timeout_s: float = 30.0) -> None:
    """Send `header` and `fds`, and close the fds here, sent or not.

    Ends when the reader has made room, when it is gone, or after `timeout_s`: EngineError in the last two cases.
    """
    owned = list(fds)
    body = json.dumps(header).encode()
    try:
        with _patience(sock, timeout_s, f"sending {len(owned)} file descriptors"):
            sock.sendall(_PREFIX.pack(len(body), len(owned)) + body)
            for at in range(0, len(owned), FDS_A_MESSAGE):
                socket.send_fds(sock, [b"f"], owned[at : at + FDS_A_MESSAGE])
    finally:
        close_fds(owned)


def recv_fds(sock: socket.socket, timeout_s: float = 30.0) -> tuple[dict[str, Any], list[int]]:
    """Receive one message of `send_fds`; the caller owns the fds (close-on-exec).

    Ends when the message is whole, when the sender is gone, or after `timeout_s`: EngineError in the last two cases.
    """
    fds: list[int] = []
    with _patience(sock, timeout_s, "receiving file descriptors"):
        length, count = _PREFIX.unpack(_recv_exactly(sock, _PREFIX.size))
        header = json.loads(_recv_exactly(sock, length))
        try:
            while len(fds) < count:
                fds += _recv_batch(sock, min(FDS_A_MESSAGE, count - len(fds)))
        except BaseException:
            close_fds(fds)
            raise
    return header, fds


def close_fds(fds: Sequence[int]) -> None:
    """Close every one of `fds`."""
    for fd in fds:
        os.close(fd)


def _recv_batch(sock: socket.socket, expected: int) -> list[int]:
    # Not socket.recv_fds: in Python 3.11 it drops its flags, and the fds would leak into children.
    fds = array("i")
    data, messages, flags, _ = sock.recvmsg(1, socket.CMSG_LEN(expected * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    if data == b"":
        raise EOFError
    for _, _, content in messages:
        fds.frombytes(content[: len(content) // fds.itemsize * fds.itemsize])
    if len(fds) != expected or flags & socket.MSG_CTRUNC:
        close_fds(fds)
        raise EngineError(
            f"{len(fds)} of {expected} file descriptors arrived",
            where="fd passing",
            hint="raise the limit on open files (ulimit -n)",
        )
    return list(fds)


def _recv_exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        piece = sock.recv(nbytes - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


@contextmanager
def _patience(sock: socket.socket, timeout_s: float, doing: str) -> Iterator[None]:
    """Bound every wait on `sock`, and say plainly how one ended badly."""
    before = sock.gettimeout()
    sock.settimeout(timeout_s)
    hint = "look at the log of the process at the other end"
    try:
        yield
    except TimeoutError as error:
        raise EngineError(f"no answer within {timeout_s:g} s while {doing}", where="fd passing", hint=hint) from error
    except (EOFError, BrokenPipeError, ConnectionResetError) as error:
        raise EngineError(f"the other end is gone while {doing}", where="fd passing", hint=hint) from error
    finally:
        sock.settimeout(before)
