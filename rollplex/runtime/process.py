"""An engine process: it dies with its parent, says that it lives, and serves its channel.

Nobody outlives the controller: the kernel kills this process when the controller dies (PR_SET_PDEATHSIG), and where
that was too late to ask, the end of the channel does (worker.py). SIGINT is the controller's to handle.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from typing import NoReturn

from rollplex.runtime.channel import Channel, Closed

PULSE_S = 0.25
_PR_SET_PDEATHSIG = 1


def live(sock: socket.socket) -> NoReturn:
    """Serve the controller at the other end of the socket until it says stop or is gone, then exit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the controller asks a process that hangs for its stacks
    channel = Channel(sock)
    threading.Thread(target=_pulse, args=(channel,), name="pulse", daemon=True).start()
    from rollplex.runtime.worker import serve  # torch: seconds, unless the nursery has it

    status = serve(channel)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # all is closed; tearing torch down would take seconds


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies; leave at once if that has happened already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _pulse(channel: Channel) -> None:
    """Ends with the channel."""
    while True:
        try:
            channel.pulse()
        except Closed:
            return
        time.sleep(PULSE_S)
