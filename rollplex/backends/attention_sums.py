"""What the backward of fused attention sums apart on a GPU, so that its bits are the same each time, and in which runs.

16 heads, 132 SMs, 32 responses of 10240 tokens      in one call     in runs
  over the prefix, as one sequence of 327680         24.2 GB         16 of 2 responses, 1.5 GB
  over themselves, as 32 sequences                    2.7 GB          2 of 25 and 7, 2.1 GB

cuDNN         a gradient of the queries for each block of keys, one of the keys for each head, and a number a row
FlashAttention 2 (mha_varlen_bwd in csrc/flash_attn/flash_api.cpp of 2.8.3, of which torch 2.11 has a copy)
  dq_accum    FP32 [ceil(SMs / (sequences x heads)), queries + 128 x sequences, heads, d]
  softmax_d   FP32 [heads, queries + 128 x sequences]
The first dimension of dq_accum is there under `torch.use_deterministic_algorithms`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollplex.ir.work import Work

LARGEST_SUMS = 2 << 30
"""Bytes of cuDNN's sums in one call, and of FlashAttention's in one run of several responses."""

ROOM = 1024
KEY_BLOCK = 256
QUERY_BLOCK = 128
HEAD_ROW_BYTES = 128 * 4  # FP32 of a head that is no wider than 128


def room(tokens: int) -> int:
    """Tokens that an attention graph has room for, to be made for few lengths."""
    return -(-tokens // ROOM) * ROOM


def sums_apart(heads: int, queries: int, keys: int) -> bool:
    """Whether cuDNN's backward may sum up what each block of keys says of all queries apart."""
    return _by_blocks(heads, room(queries), keys) <= LARGEST_SUMS


def runs(lengths: Sequence[int], heads: int, sms: int, *, as_one: bool) -> list[slice]:
    """Whole sequences in their order, as many in a run as LARGEST_SUMS has room for; one that is longer is a run.

    `as_one`: the kernel takes the queries of a run for one sequence, since they all see the same keys.
    """
    found, first, queries = list[slice](), 0, 0
    for i, length in enumerate(lengths):
        sequences = 1 if as_one else i + 1 - first
        if i > first and _by_sms(heads, sms, queries + length, sequences) > LARGEST_SUMS:
            found.append(slice(first, i))
            first, queries = i, 0
        queries += length
    return [*found, slice(first, len(lengths))]


def backward_sums_bytes(work: Work, queries: int, keys: int, sequences: int = 1) -> int:
    """The most that a call has summed apart of sequences with so many queries each, or of fewer and shorter ones.

    They see so many keys before them as one sequence, and themselves. On a Hopper GPU shorter ones may take the other
    way: the larger of both. Runs sum up gradients of the keys and values before them in FP32.
    """
    if work.unfused or not queries:
        return 0
    heads, every = -(-work.spec.heads // work.tp), sequences * queries
    seen, alone = _by_sms(heads, work.sms, every, 1), _by_sms(heads, work.sms, queries, 1)
    themselves = max(_by_sms(heads, work.sms, n * queries, n) for n in range(1, sequences + 1))
    run = min(max(seen, themselves), max(LARGEST_SUMS, alone))
    shared = 2 * keys * work.spec.kv_heads_per_rank(work.tp) * work.spec.head_dim * 4 if seen > run else 0
    blocks = min(_by_blocks(heads, room(every), room(keys)), LARGEST_SUMS) if work.hopper else 0
    return max(run, blocks) + shared


def _by_blocks(heads: int, queries: int, keys: int) -> int:
    return heads * ((-(-keys // KEY_BLOCK) * queries + keys) * HEAD_ROW_BYTES + 4 * queries)


def _by_sms(heads: int, sms: int, queries: int, sequences: int) -> int:
    """FlashAttention's: of each sequence a block of rows more."""
    rows = heads * (queries + QUERY_BLOCK * sequences)
    return rows * (-(-sms // (sequences * heads)) * HEAD_ROW_BYTES + 4)
