"""Qwen2.5-VL of Megatron-Core's modules: a GPTModel with mrope cut over a group, a tower repeated on every rank.

model = build_model(spec, torch.float32, group, stored)     parameters on the meta device: nothing is allocated
bind(model, views)                                            every parameter is a view of memory of the caller
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from rollplex.backends.data.prompts import Prompt
from rollplex.backends.megatron import sequence
from rollplex.backends.megatron.attention import SharedPrefixAttention
from rollplex.backends.megatron.groups import Alone, Group, groups_of, start_alone
from rollplex.backends.megatron.layers import Attention, layer_spec, run_layers
from rollplex.backends.megatron.linears import Column, Row, SplitGateUp, TransposedRow
from rollplex.backends.megatron.names import Stored
from rollplex.backends.megatron.settings import language_settings, parse
from rollplex.backends.megatron.tower import Tower
from rollplex.ir.errors import JobError
from rollplex.ir.spec import ModelSpec


class MegatronQwen(nn.Module):
    """The tower and the language model of one rank; hidden states are [tokens, 1, hidden], the same on every rank.

    With `sequence` those between the language model's cut linears are the rank's stretch of the tokens (sequence.py).
    """

    def __init__(
        self, parsed: Any, padded_vocab: int, dtype: torch.dtype, group: Group, stored: Stored, sequence: bool
    ) -> None:
        super().__init__()
        self.sequence = sequence
        self.parsed = parsed
        self.group = group
        self.dtype = dtype
        self.language = _language(parsed, padded_vocab, dtype, group, stored, sequence)
        self.vision = Tower(parsed, dtype)

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return self.language.embedding.word_embeddings.weight.device

    @property
    def layers(self) -> list[Any]:
        """The language layers."""
        return list(self.language.decoder.layers)

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings [tokens, 1, hidden] of ids [tokens]."""
        return self.language.embedding.word_embeddings(ids[None]).transpose(0, 1)

    def embed_prompt(self, prompt: Prompt, tokens: int, recompute: bool = False) -> Tensor:
        """Embeddings of the first tokens, vision features in their places."""
        ids = prompt.input_ids[:tokens]
        hidden = self.embed(ids)
        if prompt.pixel_values is None or prompt.grid_thw is None:
            return hidden
        features = self.vision(prompt.pixel_values, prompt.grid_thw, recompute)
        pad = self.parsed.video_token_id if prompt.modality == "video" else self.parsed.image_token_id
        return hidden.masked_scatter((ids == pad)[:, None, None], features)

    def angles(self, positions: Tensor) -> Tensor:
        """Rotary angles of mrope positions [3, tokens]; some more for the padding of stretches."""
        if self.sequence:
            positions = sequence.stretched(positions, self.group)
        return self.language.rotary_pos_emb(positions[:, None], self.language.mrope_section)

    def scattered(self, hidden: Tensor) -> Tensor:
        """Hidden states as the language layers take them."""
        return sequence.scattered(hidden, self.group) if self.sequence else hidden

    def attending(self, io: Any, tokens: int) -> Any:
        """What attention does, without the padding of stretches."""
        return sequence.Unpadded(io, tokens) if self.sequence and sequence.padding(tokens, self.group) else io

    def decode(self, hidden: Tensor, positions: Tensor, io: Any, recompute: bool = False) -> Tensor:
        """All language layers and the final norm."""
        tokens, masks = len(hidden), [self.attending(io, len(hidden))] * len(self.layers)
        hidden = run_layers(self.layers, self.scattered(hidden), masks, self.angles(positions), recompute)
        hidden = self.language.decoder.final_layernorm(hidden)
        return sequence.gathered(hidden, tokens, self.group) if self.sequence else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's columns of the logits [tokens, padded vocabulary / tp]; they are never gathered."""
        tied = self.language.embedding.word_embeddings.weight if self.parsed.tie_word_embeddings else None
        return self.language.output_layer(hidden, weight=tied)[0][:, 0]


def build_model(
    spec: ModelSpec,
    dtype: torch.dtype,
    group: Group | None = None,
    stored: Stored | None = None,
    sequence_parallel: bool = False,
    device: torch.device | str = "cpu",
) -> MegatronQwen:
    """One rank's model from the config.json that `spec` was read from, every parameter on the meta device in `dtype`.

    `device` is where its rotary frequencies lie, and where the parameters will. `group` is the tensor-parallel
    group, None for a rank alone. JobError for what the backend cannot run.
    """
    start_alone(torch.device(device))
    parsed, tp = parse(spec.config), group or Alone()
    vocab, cut = _cut(spec, tp.size()), sequence_parallel and tp.size() > 1
    with torch.device("meta"):
        model = MegatronQwen(parsed, vocab, dtype, tp, stored or Stored(), cut)
    for module in model.modules():
        for leaf, old in module._parameters.items():
            if old is not None:  # norms ignore the dtype they are told
                module._parameters[leaf] = nn.Parameter(old.to(dtype))
    return model.train()


def _cut(spec: ModelSpec, tp: int) -> int:
    """Rows of embedding and head over all ranks; JobError for a degree that this backend does not cut into."""
    obstacles = [*spec.tp_obstacles(tp)]
    if tp > spec.kv_heads and not obstacles:
        obstacles = [f"the {spec.kv_heads} KV heads: the megatron backend repeats none"]
    if obstacles:
        degrees = ", ".join(str(n) for n in spec.legal_tp() if n <= spec.kv_heads)
        raise JobError(
            f"tensor_parallel {tp} does not divide {'; '.join(obstacles)}",
            hint=f"this model trains at tensor_parallel {degrees}",
        )
    return spec.padded_vocab(tp)


def _language(parsed: Any, padded_vocab: int, dtype: torch.dtype, group: Group, stored: Stored, stretches: bool) -> Any:
    proj, fc2 = (TransposedRow if k in stored.transposed else Row for k in ("o", "down"))
    fc1 = SplitGateUp if stored.split_gate_up else Column
    norm: Any = sequence.norm(group) if stretches else WrappedTorchNorm
    spec = layer_spec(Attention, SharedPrefixAttention, proj, fc1, fc2, norm)
    text = parsed.text_config
    block: Any = TransformerBlockSubmodules([spec] * text.num_hidden_layers, norm)
    made = GPTModel(
        language_settings(parsed, dtype, group.size(), stretches),
        block,
        vocab_size=padded_vocab,
        max_sequence_length=text.max_position_embeddings,
        share_embeddings_and_output_weights=parsed.tie_word_embeddings,
        position_embedding_type="mrope",
        rotary_base=text.rope_parameters["rope_theta"],
        pg_collection=groups_of(group),
        scatter_embedding_sequence_parallel=False,  # vision features take their places first
    )
    if stretches:
        sequence.start()
        head: Any = made.output_layer  # of hidden states that are whole again
        head.sequence_parallel, head.allreduce_dgrad = False, True
    return made
