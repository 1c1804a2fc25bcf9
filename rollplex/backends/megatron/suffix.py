"""The suffix of a model call on one rank: the last prompt token and the responses, over a materialised prefix.

prefix   p0 p1 .. p(P-2)                                    this rank's keys and values in the boundary slot
suffix   p(P-1) r0 r1 .. r(T-2) | p(P-1) r0 .. r(U-2) | ..  the responses of a group end to end, without padding
scores          r0 r1 r2 .. r(T-1) |    r0 .. r(U-1) | ..   logits exist a few rows at a time, cut over the ranks
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from rollplex.backends.data.prompts import Prompt
from rollplex.backends.megatron.attention import ReadPrefix
from rollplex.backends.megatron.facts import HEAD_CHUNK_TOKENS
from rollplex.backends.megatron.head import token_logprobs
from rollplex.backends.megatron.model import MegatronQwen
from rollplex.backends.training.sizes import LOGIT_ROWS


def suffix_logprobs(
    model: MegatronQwen,
    kv: Tensor,
    prompt: Prompt,
    responses: Sequence[Tensor],
    temperature: float = 1.0,
    *,
    recompute: bool = False,
    logit_rows: int | None = None,
) -> Tensor:
    """Log-probabilities [n, T_max] of the response tokens, 0 beyond each response's end, the same on every rank.

    `kv` is `PrefixResult.kv` or an autograd leaf over it; `responses` are n int64 tensors of 1 to T_max tokens. Runs
    under the caller's grad mode: under no_grad this is the detached scoring of a reference. `recompute` keeps only
    layer inputs for the backward. At most `logit_rows` rows of logits exist at a time, in the backward too; None takes
    as many as the plan has room for.
    """
    assert all(len(r) for r in responses), "every response has at least one token"
    lengths = [len(r) for r in responses]
    last = prompt.input_ids[-1:].to(kv.device)
    inputs = torch.cat([torch.cat([last, r[:-1]]) for r in responses])
    start = prompt.next_position - 1
    positions = torch.cat([torch.arange(start, start + n, device=kv.device) for n in lengths]).expand(3, -1)
    hidden = model.decode(model.embed(inputs), positions, ReadPrefix(kv, lengths), recompute)
    most = logit_rows or (HEAD_CHUNK_TOKENS if kv.is_cuda else LOGIT_ROWS)
    rows = zip(hidden.split(most), torch.cat(list(responses)).split(most), strict=True)
    found = torch.cat([_head(model, h, wanted, temperature) for h, wanted in rows])
    return pad_sequence(list(found.split(lengths)), batch_first=True)


def _head(model: MegatronQwen, hidden: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    def score(hidden: Tensor, tokens: Tensor) -> Tensor:
        vocab = model.parsed.text_config.vocab_size
        return token_logprobs(model.logits(hidden), tokens, temperature, vocab, model.group)

    if not torch.is_grad_enabled():
        return score(hidden, tokens)
    return checkpoint(score, hidden, tokens, use_reentrant=False, preserve_rng_state=False)
