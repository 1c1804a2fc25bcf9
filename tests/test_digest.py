"""Digests of tensors: what they are to the bit, what they tell apart, and that it is the same on a CPU and on a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from hashlib import sha256

import pytest
import torch

from rollplex.backends import digest as module
from rollplex.backends.digest import PIECES, WORDS, digest

MASK = (1 << 64) - 1
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def mixed(z: int) -> int:
    """splitmix64's finaliser as its paper has it."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def key(lane: int, at: int) -> int:
    return mixed((lane * WORDS + at + 1) * 0x9E3779B97F4A7C15 & MASK)


def by_hand(*parts: bytes) -> str:
    """The definition on Python's integers."""
    seen = sha256()
    for part in parts:
        seen.update(len(part).to_bytes(8, "little"))
        filled = part + bytes(-len(part) % 8)
        words = [int.from_bytes(filled[i : i + 8], "little") for i in range(0, len(filled), 8)]
        for start in range(0, len(words), WORDS):
            piece = words[start : start + WORDS]
            for lane in (0, 1):
                total = sum(mixed(word ^ key(lane, at)) for at, word in enumerate(piece)) & MASK
                seen.update(total.to_bytes(8, "little"))
    return seen.hexdigest()


def bytes_of(n: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(n)


def tensor_of(body: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else torch.empty(0, dtype=torch.uint8)


@pytest.mark.parametrize("n", [0, 1, 8, 13, 8 * WORDS, 8 * WORDS + 3], ids=str)
def test_a_digest_is_its_definition(n: int) -> None:
    """Words that are no multiple of anything, and more than a piece."""
    body = bytes_of(n)
    assert digest(tensor_of(body)) == by_hand(body)
    assert digest(tensor_of(body), tensor_of(body[:5])) == by_hand(body, body[:5])


def test_it_is_of_the_bytes_in_order_wherever_they_lie() -> None:
    """Dtype and strides of a view are not what it tells; an odd address in memory is read all the same."""
    body = bytes_of(4096)
    flat = tensor_of(body)
    assert digest(flat.view(torch.bfloat16).view(32, -1)) == digest(flat.view(torch.float64)) == digest(flat)
    square = torch.arange(64.0).view(8, 8)
    assert digest(square.t()) == digest(square.t().contiguous()) != digest(square)
    assert digest(flat[3:67]) == by_hand(body[3:67])
    assert digest(torch.tensor([True, False])) == by_hand(b"\1\0")


def at(*places: int) -> torch.Tensor:
    return torch.tensor(places)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the lowest bit of a word": lambda w: w.index_copy(0, at(7), w[at(7)] ^ 1),
    "the sign of a word": lambda w: w.index_copy(0, at(7), w[at(7)] ^ -(1 << 63)),
    "the signs of two words": lambda w: w.index_copy(0, at(3, 9), w[at(3, 9)] ^ -(1 << 63)),
    "a word up, another down by as much": lambda w: w.index_copy(0, at(3, 9), w[at(3, 9)] + at(5, -5)),
    "two words that change places": lambda w: w.index_copy(0, at(3, 9), w[at(9, 3)]),
    "all words one further": lambda w: w.roll(1),
    "two pieces that change places": lambda w: torch.cat([w[: 2 * WORDS].roll(WORDS), w[2 * WORDS :]]),
    "every word negated": lambda w: ~w,
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_told(what: str) -> None:
    """Of one bit, and those that a plain sum or an unkeyed one would not see."""
    words = torch.arange(2 * WORDS + 100)
    assert digest(CHANGES[what](words)) != digest(words)


def test_zeros_of_other_lengths_differ_and_so_does_where_a_tensor_ends() -> None:
    zeros = torch.zeros(64, dtype=torch.uint8)
    assert len({digest(zeros[:n]) for n in range(65)}) == 65
    assert digest(zeros[:8], zeros[:8]) != digest(zeros[:16])


@pytest.mark.parametrize("pieces", [1, 2, PIECES])
def test_how_many_pieces_are_taken_at_a_time_changes_nothing(pieces: int) -> None:
    flat = tensor_of(bytes_of(8 * 3 * WORDS + 11))
    found = torch.cat([module._sums(words) for words in module._words(flat, pieces, flat.device)])
    assert torch.equal(found, torch.cat([module._sums(words) for words in module._words(flat, 1, flat.device)]))


def test_words_count_evenly_in_both_sums() -> None:
    """Each bit of a word that is flipped changes about half of the bits of both sums: 60 words, all their bits."""
    for lane in (0, 1):
        flips = []
        for place in range(60):
            word = mixed(place)
            for bit in range(64):
                changed = mixed(word ^ key(lane, place)) ^ mixed(word ^ (1 << bit) ^ key(lane, place))
                flips.append(changed.bit_count())
        assert 31.5 < sum(flips) / len(flips) < 32.5


@GPU
def test_a_gpu_finds_what_a_cpu_finds() -> None:
    """Where it lies there, and where it is sent there piece by piece; more than is taken at a time."""
    flat = torch.randint(-(1 << 63), (1 << 63) - 1, (WORDS * PIECES * 2 + 4321,))
    odd = flat.view(torch.uint8)[3:-2]
    for tensor in (flat, odd):
        assert digest(tensor.cuda()) == digest(tensor, device=torch.device("cuda", 0)) == digest(tensor)
