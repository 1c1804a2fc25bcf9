"""Digests of tensors: how two runs are told to be identical to the bit, computed where the tensors lie.

tensor  ->  pieces of 128 Ki words of 8 bytes  ->  two sums a piece  ->  sha256 of lengths and sums, in order

    sum j of a piece  =  mix(w[0] ^ k[j, 0]) + mix(w[1] ^ k[j, 1]) + ..          modulo 2^64

mix is splitmix64's finaliser, a bijection of which every bit depends on every bit; the keys k are a stream of the same
generator, so each place of a piece counts in two ways of its own. Sums of integers are exact in any order: a CPU and a
GPU find the same digest. It tells chance and bugs, which do not know the keys, with 2^-128; it is no signature against
somebody who does. Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import Tensor

WORDS = 1 << 17
"""Of a piece; as large as a core has cache for, with its workspace."""
PIECES = 32
"""That a GPU takes at a time: 64 MiB of workspace."""
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None))
_LANES = 2
KIND = "keyed sums 1"
"""What these digests are; those of another kind say nothing beside them."""


def digest(*tensors: Tensor, device: torch.device | None = None) -> str:
    """Of the tensors' bytes, in order: 64 hex digits. Computed on `device`, or where each tensor lies."""
    seen = hashlib.sha256()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as cores:
        for tensor in tensors:
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            where = device or flat.device
            seen.update(flat.numel().to_bytes(8, "little"))
            if where.type == "cpu":
                found = list(cores.map(_sums, _words(flat, 1, where)))
            else:  # sums stay there until all are asked for: nothing waits between pieces
                found = [_sums(words) for words in _words(flat, PIECES, where)]
            if found:
                seen.update(torch.cat(found).cpu().numpy().data)
    return seen.hexdigest()


def _words(flat: Tensor, pieces: int, device: torch.device) -> Iterator[Tensor]:
    """[pieces, words] of so many pieces at a time; what is behind the last word's bytes is zero."""
    for part in flat.split(8 * WORDS * pieces):
        part = part.to(device)
        if part.numel() % 8 or part.storage_offset() % 8:
            part = torch.cat([part, part.new_zeros(-part.numel() % 8)])
        words = part.view(torch.int64)
        whole = words.numel() // WORDS * WORDS
        if whole:
            yield words[:whole].view(-1, WORDS)
        if whole < words.numel():
            yield words[whole:].view(1, -1)


def _sums(words: Tensor) -> Tensor:
    """[pieces, lanes] of int64 [pieces, words]."""
    keys = _keys(words.device)
    spare = torch.empty_like(words)
    return torch.stack([_mix(words ^ key[: words.shape[1]], spare).sum(1) for key in keys], 1)


@lru_cache
def _keys(device: torch.device) -> Tensor:
    """int64 [lanes, words], the same everywhere."""
    counter = torch.arange(1, _LANES * WORDS + 1, device=device).view(_LANES, WORDS) * _signed(_GOLDEN)
    return _mix(counter, torch.empty_like(counter))


def _mix(z: Tensor, spare: Tensor) -> Tensor:
    """splitmix64's finaliser of int64 `z`, in place; `spare` is as large."""
    for shift, factor in _ROUNDS:
        torch.bitwise_right_shift(z, shift, out=spare)
        z ^= spare.bitwise_and_((1 << (64 - shift)) - 1)  # torch shifts the sign in
        if factor is not None:
            z *= _signed(factor)
    return z


def _signed(word: int) -> int:
    """The int64 of the same bits."""
    return word - (1 << 64) if word >> 63 else word
