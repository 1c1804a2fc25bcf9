"""The GPUs that processes started here will see, and what is free on each; no context is made to ask.

CUDA_VISIBLE_DEVICES  ""  all of nvidia-smi's      "2,0"  those, numbered anew      "GPU-5b.."  by their UUID
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

from rollplex.ir.errors import RunError

_QUERY = "index,uuid,name,memory.free"


@dataclass(frozen=True)
class Card:
    """A GPU: its name, its number for nvidia-smi, and the bytes that are free on it now."""

    index: str
    uuid: str
    name: str
    free_bytes: int


def cards() -> tuple[Card, ...]:
    """The GPUs in the order of their CUDA device numbers; RunError where there is no driver to ask."""
    return visible(_ask(_QUERY), os.environ.get("CUDA_VISIBLE_DEVICES"))


def driver_version() -> str:
    """The driver's version; RunError where there is none to ask."""
    return next(iter(_ask("driver_version").split()), "")


def _ask(query: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as err:
        raise RunError(f"nvidia-smi does not answer: {err}", where="GPU", hint="run on a machine with GPUs") from None
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise RunError(f"nvidia-smi: {said[0] if said else done.returncode}", where="GPU", hint="see `rollplex doctor`")
    return done.stdout


def visible(listed: str, asked: str | None) -> tuple[Card, ...]:
    """nvidia-smi's lines as CUDA numbers them; as CUDA does, the first name that is unknown ends the list."""
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines() if line.strip()]
    every = [Card(index, uuid, name, int(free) << 20) for index, uuid, name, free in rows]
    if asked is None:
        return tuple(every)
    found: list[Card] = []
    for word in (w.strip() for w in asked.split(",")):
        card = next((c for c in every if word and (c.index == word or c.uuid.startswith(word))), None)
        if card is None:
            break
        found.append(card)
    return tuple(found)
