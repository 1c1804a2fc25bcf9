"""How many responses decode on a GPU, told by its rollout rank to its training rank: one word of shared memory.

rollout   |FULL  begin .. 128 128 .. 97 .. 4 .. 1 |0            |FULL   the next step is about to decode
train     |  prefix: waits    | on 80 SMs         | no partition

No lock: the word is written whole, and a reader that sees the one before runs a prompt by an older row.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

FULL = (1 << 31) - 1
"""Every response of the step: it is about to be decoded."""
_WORD = struct.Struct("=q")


class LiveBatch:
    """The word of one GPU; both ranks open it in the directory where they meet, whoever comes first makes it."""

    def __init__(self, meeting: Path, gpu: int) -> None:
        fd = os.open(meeting / f"live-{gpu}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _WORD.size)
            self._page = mmap.mmap(fd, _WORD.size)
        finally:
            os.close(fd)

    def tell(self, responses: int) -> None:
        """So many decode now."""
        self._page[:] = _WORD.pack(responses)  # packed into the page it would be zero for a moment: nothing decodes

    def read(self) -> int:
        """How many decode; 0 behind the step's last response."""
        return _WORD.unpack_from(self._page, 0)[0]

    def close(self) -> None:
        """Let the page go."""
        self._page.close()
