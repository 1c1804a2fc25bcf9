"""How far decode is on a GPU, told by its rollout rank to its training rank: one word of shared memory.

responses |FULL  begin .. 128 128 .. 97 .. 4 .. 1 |0            |FULL   the next step is about to decode
tokens    |0     0 ..  0    1   2 .. 480 ..  1100 |0            |0      of the youngest response, of this decode alone
train     |  prefix: waits    | on 80 SMs         | no partition

No lock: the word is written whole, and a reader that sees the one before runs a prompt by an older row.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

FULL = (1 << 31) - 1
"""Every response of the step: it is about to be decoded."""
_WORD = struct.Struct("=ii")


class Live(NamedTuple):
    """Responses that decode, 0 behind the step's last; tokens that the youngest has since this decode began."""

    responses: int
    tokens: int


class LiveBatch:
    """The word of one GPU; both ranks open it in the directory where they meet, whoever comes first makes it."""

    def __init__(self, meeting: Path, gpu: int) -> None:
        fd = os.open(meeting / f"live-{gpu}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _WORD.size)
            self._page = mmap.mmap(fd, _WORD.size)
        finally:
            os.close(fd)

    def tell(self, responses: int, tokens: int = 0) -> None:
        """So many decode now, and none of them has fewer tokens."""
        word = _WORD.pack(responses, tokens)
        self._page[:] = word  # packed into the page it would be zero for a moment: nothing decodes

    def read(self) -> Live:
        """What decodes."""
        return Live(*_WORD.unpack(self._page[:]))  # taken whole: the page may change between its halves

    def close(self) -> None:
        """Let the page go."""
        self._page.close()
