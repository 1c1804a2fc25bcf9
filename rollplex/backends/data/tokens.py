"""Tokenizers: the one of a Hugging Face directory, or bytes with Qwen's special tokens, made without a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rollplex.ir.errors import JobError

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PADS = {"video": "<|video_pad|>", "image": "<|image_pad|>"}

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type in ('image', 'video') %}<|vision_start|><|{{ c.type }}_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token a byte (ids 0 to 255) and Qwen's special tokens (256 to 263), with Qwen2.5-VL's chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core: Any = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local Hugging Face directory; JobError when it has none, or no chat template."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError, KeyError) as err:
        reason = str(err).splitlines()[0] if str(err) else type(err).__name__
        raise JobError(f"no tokenizer here: {reason}", where=directory, hint="it needs a tokenizer.json") from None
    if not tokenizer.chat_template:
        raise JobError("the tokenizer has no chat template", where=directory, hint="add chat_template.jinja")
    return tokenizer


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a response: <|im_end|> and the padding token."""
    ids: list[Any] = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    return tuple(sorted({i for i in ids if i is not None}))


def response_text(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    """What a response says, without its end token."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True))
