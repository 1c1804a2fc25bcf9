"""Frames over the unnamed socket pair between the controller and one engine process; an empty frame is a pulse.

    frame = 8 bytes length of the body, 4 bytes number of file descriptors, the body, then the descriptors

Imports nothing heavy: a process sends its first pulse before it has imported torch.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence

_HEADER = struct.Struct("!QI")
# Both directions share one open file description, hence one O_NONBLOCK flag: no timeout here is ever None.
_TICK_S = 0.5
_FD_BYTES = array("i").itemsize
_SMALL = 1 << 16


class Closed(Exception):
    """The other end is gone: the process died, or it closed the channel."""


class Channel:
    """One end of the pair. One thread receives; any thread sends.

    Every wait in here ends when the other process reads or writes, or is gone; how long to be patient with a process
    that is there but silent is for the callers to say (they count pulses), and they end these waits by `close`.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._reader = sock
        self._writer = sock.dup()
        self._reader.settimeout(_TICK_S)
        self._writer.settimeout(_TICK_S)
        self._sending = threading.Lock()
        self._closed = False

    def send(self, body: Sequence[bytes | memoryview], fds: Sequence[int] = ()) -> None:
        """Send one frame, whose body comes in parts; the descriptors are closed here, sent or not.

        Closed if the other end is gone.
        """
        try:
            with self._sending:
                self._send_all(_together([_HEADER.pack(sum(len(part) for part in body), len(fds)), *body]))
                for fd in fds:
                    self._send_fd(fd)
        except OSError as err:
            raise Closed from err
        finally:
            for fd in fds:
                os.close(fd)

    def pulse(self) -> None:
        """Tell the other end that this process is alive."""
        self.send(())

    def receive(self) -> tuple[bytearray, list[int]]:
        """The next frame, a pulse too; the caller owns the descriptors. Closed if the other end is gone."""
        fds: list[int] = []
        try:
            length, count = _HEADER.unpack(self._receive_exactly(_HEADER.size))
            body = self._receive_exactly(length)
            while len(fds) < count:
                fds.append(self._receive_fd())
            return body, fds
        except (OSError, Closed) as err:
            for fd in fds:
                os.close(fd)
            raise Closed from err

    def close(self) -> None:
        """Close this end; a thread that waits in it gets Closed."""
        self._closed = True
        self._reader.close()
        self._writer.close()

    def _send_all(self, parts: Iterable[bytes | memoryview]) -> None:
        for part in parts:
            view = memoryview(part)
            while view:
                self._still_open()
                try:
                    view = view[self._writer.send(view) :]
                except TimeoutError:
                    continue

    def _send_fd(self, fd: int) -> None:
        while True:
            self._still_open()
            try:
                socket.send_fds(self._writer, [b"f"], [fd])
                return
            except TimeoutError:
                continue

    def _receive_exactly(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            self._still_open()
            try:
                got = self._reader.recv_into(view)
            except TimeoutError:
                continue
            if got == 0:
                raise Closed
            view = view[got:]
        return data

    def _receive_fd(self) -> int:
        while True:
            self._still_open()
            try:
                # socket.recv_fds of Python 3.11 drops its flags, and the fd would be inherited.
                data, sent, _, _ = self._reader.recvmsg(1, socket.CMSG_LEN(_FD_BYTES), socket.MSG_CMSG_CLOEXEC)
            except TimeoutError:
                continue
            if not data or not sent:
                raise Closed
            return int.from_bytes(sent[0][2][:_FD_BYTES], sys.byteorder)

    def _still_open(self) -> None:
        if self._closed:
            raise Closed


def _together(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes, small parts that follow each other as one: a call of the system each is dear."""
    small = bytearray()
    for part in parts:
        if len(part) < _SMALL:
            small += part
        else:
            yield bytes(small)
            yield part
            small.clear()
    yield bytes(small)


def pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair without a name in any file system."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
