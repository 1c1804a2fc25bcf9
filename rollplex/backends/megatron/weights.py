"""Weights between a Hugging Face directory and the ranks of a Megatron model, and anything else shaped like weights.

directory -> rank       each rank reads its own rows and columns, nothing else
ranks -> directory      parameter by parameter to the first rank, which writes what transformers loads
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollplex.backends.megatron.groups import Group
from rollplex.backends.megatron.names import Parameter, Piece, Stored, parameters, rows
from rollplex.backends.training import weights as host
from rollplex.ir.errors import JobError, Problem
from rollplex.ir.spec import ModelSpec

Read = Callable[[Piece], Tensor]
Copy = Callable[[Tensor, Tensor], object]


def fill(order: Iterable[Parameter], views: Mapping[str, Tensor], read: Read, copy: Copy = Tensor.copy_) -> None:
    """Give every parameter its values: `read(piece)` are the rows of a Hugging Face tensor; padding becomes zero."""
    for parameter in order:
        view = views[parameter.name].detach()
        if not parameter.pieces or sum(p.stop - p.start for p in parameter.pieces) < view.shape[_axis(parameter)]:
            view.zero_()
        for piece in parameter.pieces:
            copy(rows(parameter, piece, view), read(piece))


def load_weights(directory: str | Path, order: Sequence[Parameter], views: Mapping[str, Tensor]) -> None:
    """Fill a rank's parameters from the directory's safetensors files, cast to the views' dtype.

    JobError lists all missing tensors and those that are too small at once. Tensors that nobody needs are ignored.
    """
    with host.opened(directory) as files, host.copying() as copy:
        where = host.places(directory, files)
        slices = {name: (file, files[file].get_slice(key)) for name, (file, key) in where.items()}
        problems = list(_problems(order, slices, str(directory)))
        if problems:
            raise JobError(*problems[:20])
        fill(order, views, lambda piece: _rows(slices[piece.source][1], piece), copy)


def save_weights(
    directory: str | Path,
    spec: ModelSpec,
    stored: Stored,
    views: Mapping[str, Tensor],
    group: Group,
) -> None:
    """Write all ranks' weights as one Hugging Face directory; every rank of the group calls it, the first writes.

    One rank alone has it all where it lies: each tensor is put together when it is written.
    """
    if group.size() == 1:
        dtype = next(iter(views.values())).dtype
        host.write_model(
            directory, {t.name: (dtype, t.shape) for t in spec.tensors()}, assembled(spec, stored, views), spec.config
        )
        return
    tensors = gather(spec, stored, views, group)
    if tensors is not None:
        host.save_weights(directory, tensors, spec.config)


def assembled(spec: ModelSpec, stored: Stored, views: Mapping[str, Tensor]) -> Callable[[str], Tensor]:
    """Makes a Hugging Face tensor of the one rank's parameters, on their device: a view where it is one of them."""
    shapes = {t.name: t.shape for t in spec.tensors()}
    pieces: dict[str, list[tuple[Piece, Tensor]]] = {}
    for parameter in parameters(spec, stored=stored):
        for piece in parameter.pieces:
            found = rows(parameter, piece, views[parameter.name].detach())
            pieces.setdefault(piece.source, []).append((piece, found))

    def read(name: str) -> Tensor:
        if len(pieces[name]) == 1:
            return pieces[name][0][1]
        whole = pieces[name][0][1].new_empty(shapes[name])
        for piece, value in pieces[name]:
            whole.narrow(piece.axis, piece.start, piece.stop - piece.start).copy_(value)
        return whole

    return read


def gather(spec: ModelSpec, stored: Stored, views: Mapping[str, Tensor], group: Group) -> dict[str, Tensor] | None:
    """The Hugging Face tensors that all ranks' parameters (or their gradients) make up; None but on the first rank."""
    tp, root = group.size(), group.rank() == 0
    orders = [parameters(spec, tp, rank, stored) for rank in range(tp)]
    found = {t.name: torch.empty(0) for t in spec.tensors()}
    for shards in zip(*orders, strict=True):
        values = _gather_one(views[shards[0].name], group) if shards[0].sharded else [views[shards[0].name]]
        for parameter, value in zip(shards, values, strict=False):
            for piece in parameter.pieces if root else ():
                _put(found, spec, piece, rows(parameter, piece, value))
    return found if root else None


def _put(found: dict[str, Tensor], spec: ModelSpec, piece: Piece, value: Tensor) -> None:
    if not found[piece.source].numel():
        shape = next(t.shape for t in spec.tensors() if t.name == piece.source)
        found[piece.source] = torch.empty(shape, dtype=value.dtype)
    found[piece.source].narrow(piece.axis, piece.start, piece.stop - piece.start).copy_(value.detach())


def _gather_one(value: Tensor, group: Group) -> list[Tensor]:
    own = value.detach().contiguous()
    found = [torch.empty_like(own) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(own, found, group=group, group_dst=0)
    if own.is_cuda:  # NCCL's patience counts from when it was asked: ranks that only send would ask for all at once
        torch.cuda.synchronize(own.device)
    return found or []


def _axis(parameter: Parameter) -> int:
    """The stored dimension along which the pieces lie."""
    axis = parameter.pieces[0].axis if parameter.pieces else 0
    return 1 - axis if parameter.transposed else axis


def _rows(found: Any, piece: Piece) -> Tensor:
    """The piece of a file's tensor, without a copy."""
    return found[piece.start : piece.stop] if piece.axis == 0 else found[:, piece.start : piece.stop]


def _problems(order: Iterable[Parameter], slices: Mapping[str, tuple[Path, Any]], directory: str) -> Iterable[Problem]:
    for piece in (piece for parameter in order for piece in parameter.pieces):
        if piece.source not in slices:
            yield Problem(f"no tensor {piece.source}", directory)
            continue
        file, found = slices[piece.source]
        got = found.get_shape()[piece.axis]
        if got < piece.stop:
            yield Problem(f"{piece.source} has {got} rows along axis {piece.axis}, {piece.stop} are needed", str(file))
