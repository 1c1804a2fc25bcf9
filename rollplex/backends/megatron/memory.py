"""Where a rank's parameters lie in flat memory: end to end, or as slabs of a rollout shard that several ranks fill.

q = 1    |embed|qkv|proj|fc1|fc2|norm| ..                    this rank's parameters, nothing else
q = 2    |embed0|embed1|qkv0|qkv1|proj0|proj1| .. |norm|     rank 2 R + j owns slab j of each tensor of rollout rank R

A rollout shard is made tensor by tensor, so that an engine reads each of its tensors as one piece; what every rank has
a copy of (norms) lies there once. `passes/layout_options.py` decides on it (paper section 3.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from rollplex.backends.megatron.names import Parameter


@dataclass(frozen=True)
class Slab:
    """Which of the `of` slabs of a tensor is this rank's."""

    index: int = 0
    of: int = 1


def starts(order: Sequence[Parameter], slab: Slab | None = None) -> dict[str, int]:
    """The first element of each parameter in flat memory that holds `order`, tensor by tensor."""
    slab, found, at = slab or Slab(), {}, 0
    for parameter in order:
        found[parameter.name] = at + slab.index * parameter.numel * _is_cut(parameter, slab)
        at += _width(parameter, slab)
    return found


def numel(order: Iterable[Parameter], slab: Slab | None = None) -> int:
    """Elements of that memory: of a rollout shard, or of the rank's own parameters."""
    return sum(_width(parameter, slab or Slab()) for parameter in order)


def views(memory: Tensor, order: Sequence[Parameter], slab: Slab | None = None) -> dict[str, Tensor]:
    """Each parameter as a view of flat memory, by name."""
    at = starts(order, slab)
    return {p.name: memory[at[p.name] : at[p.name] + p.numel].view(p.shape) for p in order}


def bind(model: nn.Module, order: Iterable[Parameter], memory: Mapping[str, Tensor]) -> None:
    """Replace every parameter of the model by a view of the caller's memory; nothing is copied, nothing else is kept.

    AssertionError unless `order` and `memory` have the model's parameters in their shapes and dtype. The attributes by
    which Megatron tells a share from a copy are set here: it sets them only where it initialises weights itself.
    """
    wanted = dict(model.named_parameters())
    known = {p.name: p for p in order}
    assert wanted.keys() == known.keys(), f"names differ: {sorted(wanted.keys() ^ known.keys())[:5]}"
    for name, old in wanted.items():
        view = memory[name]
        assert (view.shape, view.dtype) == (old.shape, old.dtype), f"{name}: {view.shape} {view.dtype}, {old.shape}"
        owner, leaf = name.rpartition(".")[::2]
        model.get_submodule(owner)._parameters[leaf] = _as_parameter(view, known[name], old.requires_grad)


def _as_parameter(view: Tensor, known: Parameter, requires_grad: bool) -> nn.Parameter:
    made = nn.Parameter(view, requires_grad=requires_grad)
    axis = known.pieces[0].axis if known.pieces else 0
    attributes = {
        "tensor_model_parallel": known.sharded,
        "partition_dim": (1 - axis if known.transposed else axis) if known.sharded else -1,
        "partition_stride": 1,
        "allreduce": True,
        "sequence_parallel": False,
    }
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def _is_cut(parameter: Parameter, slab: Slab) -> bool:
    return parameter.sharded and slab.of > 1


def _width(parameter: Parameter, slab: Slab) -> int:
    return parameter.numel * (slab.of if _is_cut(parameter, slab) else 1)
