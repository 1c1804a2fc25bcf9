"""The groups that Megatron's modules work in, without its global state: they are handed to every module.

A process may hold models of different degrees side by side (a tower on every rank, a language model cut over all of
them), which `megatron.core.parallel_state` cannot say.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection


class Alone:
    """A group of this rank alone: Megatron asks a group for its size and its rank before it sends anything."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


Group = Any  # a torch.distributed.ProcessGroup, or Alone


def start_alone(device: torch.device) -> None:
    """Start torch.distributed with this process only, unless it runs: Megatron drops every group while it does not.

    It allocates on the current CUDA device, whatever it is told: for a model on a CPU, that is the CPU.
    """
    if device.type == "cpu":
        torch.cuda.current_device = lambda: "cpu"  # pyright: ignore[reportAttributeAccessIssue]
    if not dist.is_initialized():
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def groups_of(tp: Group) -> ProcessGroupCollection:
    """What a module is given: tensor parallel over `tp`, one pipeline stage, no context parallelism."""
    return ProcessGroupCollection(tp=tp, pp=Alone(), cp=Alone(), embd=None)


def all_reduce(value: Any, group: Group, op: Any = dist.ReduceOp.SUM) -> Any:
    """`value` reduced over the group in place, and returned."""
    if group.size() > 1:
        dist.all_reduce(value, op=op, group=group)
    return value
