"""vLLM's Qwen2.5-VL under a name of ours: it takes patches and grids that the data set has made, so it needs no
processor, no tokenizer and no files beside a config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VLDummyInputsBuilder,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLMultiModalProcessor,
    Qwen2_5_VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from rollplex.backends.vllm.inputs import POSITIONS

NAME = "RollplexQwen2_5_VLForConditionalGeneration"


class PatchesInfo(Qwen2_5_VLProcessingInfo):
    """What the scheduler asks of a processor; an image or a video of a prompt may fill it."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": 1, "video": 1}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return dict.fromkeys(mm_counts, seq_len)


class NoProcessor(Qwen2_5_VLMultiModalProcessor):
    """Is asked for nothing: prompts come processed."""

    requires_tokenizer = False


@MULTIMODAL_REGISTRY.register_processor(NoProcessor, info=PatchesInfo, dummy_inputs=Qwen2_5_VLDummyInputsBuilder)
class RollplexQwen2_5_VL(Qwen2_5_VLForConditionalGeneration):
    """The same model at the positions of the data set, which are the trainer's."""

    supports_mm_device_do_normalize = False  # patches are normalised: since 0.31 vLLM would do it on the device

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[Tensor, int]:
        """[3, tokens] and what to add to a later token's number; transformers and vLLM number videos differently."""
        if not mm_features:
            return super().get_mrope_input_positions(input_tokens, mm_features)
        positions = mm_features[0].data[POSITIONS].data
        return positions[:, :-1], int(positions[0, -1]) - len(input_tokens)


def register() -> None:
    """Make the name known to vLLM; again is no harm."""
    if NAME not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(NAME, RollplexQwen2_5_VL)
