"""One process' part of a checkpoint: a file of tensors, and facts for checkpoint.json.

    keep(state, folder)      folder/train-0.safetensors  ->  {"file": [name, bytes, sha256], "tasks": .., "updates": ..}
    take_up(state, folder)   the other way, before the first iteration

Of tensors that every copy of the model holds alike, the first copy writes its own for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from rollplex.backends.carried import SavedTensors, write_tensors
from rollplex.ir.job import Job
from rollplex.ir.placement import seat
from rollplex.runtime.protocol import CONTROLLER, ProcessId
from rollplex.runtime.state import ProcessState

RNG = "rng"


def keep(state: ProcessState, job: Job, folder: Path) -> dict[str, Any]:
    """Write the process' file, on disk when this returns; what the checkpoint notes of it."""
    carried = state.tasks.carried()
    tensors = dict(carried.own)
    if state.engine is not None:  # the controller's generators are its caller's
        tensors[RNG] = torch.get_rng_state()
    if first_copy(job, state.process) == state.process:
        tensors |= carried.copied
    record = write_tensors(folder / file_name(state.process), tensors)
    updates = {role: update.carried() for role, update in state.updates.items()}
    return {"file": list(astuple(record)), "tasks": dict(carried.facts), "updates": updates}


def take_up(state: ProcessState, job: Job, folder: Path, noted: Mapping[str, Any]) -> None:
    """Become what the process was; `noted` is its part of the checkpoint."""
    names = {file_name(first_copy(job, state.process)), file_name(state.process)}
    tensors = SavedTensors(*(folder / name for name in sorted(names, key=lambda n: n == file_name(state.process))))
    state.tasks.restore(tensors, noted["tasks"])
    if state.engine is not None:
        torch.set_rng_state(tensors[RNG])
    for role, update in state.updates.items():
        update.restore(noted["updates"][role])


def first_copy(job: Job, process: ProcessId) -> ProcessId:
    """The rank of the first copy of the model, or of the first engine, that has the same part of it."""
    if process == CONTROLLER:
        return process
    tp, rank = seat(job, process.kind, process.rank).tp, 0
    while seat(job, process.kind, rank).tp != tp:  # the first copy's ranks come first among equals
        rank += 1
    return ProcessId(process.kind, rank)


def file_name(process: ProcessId) -> str:
    """`train-0.safetensors`."""
    return f"{process.kind}-{process.rank}.safetensors"
