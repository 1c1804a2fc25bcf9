"""Figures that others published and that the compiler must reproduce: model cards, data sheets, the paper's tables.

Where a figure of the paper and plain arithmetic differ, both stand here, and `tools/reproduce.py` prints both.
"""

from __future__ import annotations

MODELS: dict[str, tuple[int, float, int]] = {
    # parameters (exact), GiB in bf16, bytes of KV a token at TP 1; from each model's config.json
    "Qwen2.5-VL-3B": (3_754_622_976, 6.99, 36_864),
    "Qwen2.5-VL-7B": (8_292_166_656, 15.45, 57_344),
    "Qwen2.5-VL-32B": (33_452_718_336, 62.31, 262_144),
    "Qwen2.5-VL-72B": (73_410_777_344, 136.74, 327_680),
    "Qwen3-VL-8B": (8_767_123_696, 16.33, 147_456),
    "Qwen3-VL-32B": (33_357_390_064, 62.13, 262_144),
    "Qwen3-VL-30B-A3B": (31_070_754_032, 57.87, 98_304),
    "Qwen3-VL-235B-A22B": (235_670_022_896, 438.97, 192_512),
    "Qwen2.5-7B": (7_615_616_512, 14.19, 57_344),
    "Llama-3.1-8B": (8_030_261_248, 14.96, 131_072),
    "Llama-3.1-70B": (70_553_706_496, 131.42, 327_680),
}
LANGUAGE_32B = 32_763_876_352

GPUS: dict[str, tuple[float, float, float, float, float, int, float | None]] = {
    # GB, TB/s, dense bf16 TFLOP/s, NVLink GB/s, PCIe GB/s, SMs; GiB that software sees, from logs
    "A100-80": (80, 2.039, 312, 600, 64, 108, None),
    "H100": (80, 3.35, 989, 900, 128, 132, 79.1),
    "H800": (80, 3.35, 989, 400, 128, 132, None),
    "H200": (141, 4.8, 989, 900, 128, 132, 139.8),
    "H20": (96, 4.0, 148, 900, 128, 78, None),
    "B200": (180, 8.0, 2250, 1800, 128, 148, None),
    "A800-80": (80, 2.039, 312, 400, 64, 108, 79.3),
    "A100-40": (40, 1.555, 312, 600, 64, 108, 39.4),
}

TABLE_1: dict[str, tuple[str, float, float | None, float]] = {
    # object: what the paper calls it, paper GiB, arithmetic GiB (None: a model of activations), tolerance
    "actor.snapshot": ("actor BF16 weights, TP 8", 7.6, 7.63, 0.01),
    "actor.gradients": ("actor FP32 gradients", 15.1, 15.26, 0.01),
    "actor.master": ("actor FP32 master weights", 15.1, 15.26, 0.01),
    "actor.moments": ("actor FP32 Adam moments", 30.3, 30.51, 0.01),
    "train.activations": ("activations, one microbatch", 28.3, None, 0.10),
    "*.boundary": ("preserved prefix KV, two roles", 16.0, 16.0, 0.01),
    "reference.weights": ("reference BF16 weights, TP 8", 7.6, 7.63, 0.01),
    "rollout.weights": ("rollout BF16 weights, TP 4", 15.1, 15.26, 0.01),
    "rollout.kv": ("rollout KV cache (a setting)", 29.0, 29.0, 0.01),
    "rollout.runtime": ("rollout runtime buffers (a setting, 2-4)", 3.0, 3.0, 0.01),
}
TABLE_1_TOTAL = (164.0, 168.0)
"""GiB: the paper says about 165, the arithmetic 166 to 168; both without the vision tower and CUDA contexts."""

LAYOUT: dict[str, tuple[float, float, float]] = {
    # case: billions of parameters, percent by arithmetic, percent in the paper (section 4.4)
    "1": (19.677, 60.06, 60.0),
    "2": (10.737, 32.77, 32.8),
    "3": (2.349, 7.17, 7.2),
}
CASE3_BUFFER_GIB, PAPER_BUFFER_GIB, SMALLER_THAN_A_SHARD = 1.09, 1.1, 85.5

FIGURE_8: dict[str, tuple[str, str]] = {
    # ablation: the phase in which the paper's run died, as the paper says it (section 4.4)
    "state_offload": ("P1", "in the first iteration, before any optimizer step"),
    "rollout_release": ("P3", "at an optimizer step"),
    "chunked_optimizer": ("P3", "at the first optimizer step"),
    "weight_sharing": ("P3", "at an optimizer step"),
}
MEDIAN_PROMPTS = (470, 5900)
"""Median tokens of a prompt, the shortest and the longest of the paper's four video tasks (section 2.2)."""

X32 = ("qwen2_5_vl_32b_h800x32.yaml", ("schedule=disaggregated", "cluster.rollout_gpus=16"))
"""The job of the paper's times, and what makes it its disaggregated baseline: two nodes roll out, two train."""
MEDIAN_RESPONSES = (125, 120)
"""Of the same two tasks: prompts are 79 and 98 % of their samples at the median (section 2.2)."""
TIMES: dict[str, tuple[float, float]] = {
    # ratio of two times of a step or of its rollout: the paper's least and most over its datasets
    "step, serial over rollplex": (1.23, 1.30),
    "step, disaggregated over rollplex": (1.57, 2.24),
    "rollout, TP 8 over TP 4": (1.17, 1.31),
    "step, rollout TP 8 over TP 4": (1.06, 1.17),
    "step, serial over rollplex, partial rollout": (1.08, 1.21),
    "step, serial over rollplex, oversampling": (1.04, 1.23),
}

STATE_BYTES, CUT_BYTES = 18, 6 + 12 / 4
"""Bytes a parameter of Megatron's training state, and with the distributed optimizer: 6 + 12 / DP, here of 4 ranks."""
