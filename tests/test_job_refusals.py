"""Every refusal of a job file: the edit that provokes it, the line it points at, and its words."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_texts import GOOD, TINY, edited, refusal, tiny

from rollplex.ir.errors import JobError
from rollplex.ir.job import load_job

# what is wrong: (text in GOOD, its replacement, the message)
KEYS = {
    "unknown key": ("group: 8", "groups: 8", "job.yaml:24: unknown key `groups`\n    try: group"),
    "unknown key, nothing near": (
        "group: 8",
        "zzz: 8",
        "job.yaml:24: unknown key `zzz`\n    try: keys here: prompts, group, prompt_tokens",
    ),
    "the only value of a list": (
        "freeze: [vision]",
        "lora: {rank: 8, targets: [lm_head]}",
        "job.yaml:17: `targets`: `lm_head` is not known; expected one of qkv, o, gate_up, down",
    ),
    "unknown section": ("optimizer:", "optimiser:", "job.yaml:29: unknown key `optimiser`\n    try: optimizer"),
    "unknown key of an engine": (
        "runtime_gib: 3",
        "runtime_gb: 3",
        "job.yaml:16: unknown key `runtime_gb`\n    try: runtime_gib",
    ),
    "missing key": (
        "  host_memory_gb: 1400\n",
        "",
        "job.yaml:2: `host_memory_gb` is missing\n    try: host memory of one node",
    ),
    "missing section": (
        "model: {name: Qwen2.5-VL-32B, dtype: bfloat16}",
        "",
        "job.yaml:2: `model` is missing",
    ),
    "missing key of an engine": ("      kv_cache_gib: 29\n", "", "job.yaml:12: `kv_cache_gib` is missing"),
    "twice": ("group: 8", "prompts: 8", "job.yaml:24: key `prompts` stands there twice (line 23 too)"),
    "not a number": ("prompts: 32", "prompts: many", "job.yaml:23: `prompts` is 'many'; expected a whole number"),
    "a fraction": ("prompts: 32", "prompts: 3.5", "job.yaml:23: `prompts` is 3.5; expected a whole number"),
    "a flag": ("prompts: 32", "prompts: true", "job.yaml:23: `prompts`: true does not belong here"),
    "empty": ("prompts: 32", "prompts:", "job.yaml:23: `prompts` is null; expected a whole number"),
    "too small": ("group: 8", "group: 0", "job.yaml:24: `group` is 0; must be at least 1"),
    "no prefix": ("prompt_tokens: 8192", "prompt_tokens: 1", "job.yaml:25: `prompt_tokens` is 1; must be at least 2"),
    "negative": ("lr: 1e-6", "lr: -1", "job.yaml:30: `lr` is -1; must be at least 0"),
    "infinite": ("lr: 1e-6", "lr: .inf", "job.yaml:30: `lr` is inf; expected a finite number"),
    "a share of all": ("lr: 1e-6", "lr: 1\nsharing: {kind: fixed, share: 1}", "`share` is 1; must be less than 1"),
    "a bad size": ("kv_cache_gib: 29", "kv_cache_gib: 29 G", "job.yaml:15: `kv_cache_gib`: '29 G' is not a size"),
    "a section for a text": (
        "gpu: H800",
        "gpu: {name: H800}",
        "job.yaml:3: `gpu` is {'name': 'H800'}; expected a text",
    ),
    "a text for a section": (
        "optimizer:\n  lr: 1e-6",
        "optimizer: adamw",
        "job.yaml:29: `optimizer` is 'adamw'; expected a section with keys",
    ),
    "schedule": (
        "schedule: rollplex",
        "schedule: rolplex",
        "job.yaml:28: `schedule`: `rolplex` is not known; expected one of serial, rollplex, streamed, "
        "naive, disaggregated\n    try: rollplex",
    ),
    "ablation": (
        "schedule: rollplex",
        "ablate: [weight_share]",
        "job.yaml:28: `ablate`: `weight_share` is not known; expected one of state_offload, rollout_release, "
        "chunked_optimizer, weight_sharing\n    try: weight_sharing",
    ),
    "ablation twice": (
        "schedule: rollplex",
        "ablate: [state_offload, state_offload]",
        "job.yaml:28: `ablate`: state_offload stands there more than once",
    ),
    "chunks": ("lr: 1e-6", "chunks: some", "job.yaml:30: `chunks`: is 'some'; expected auto or a whole number"),
    "betas": ("lr: 1e-6", "betas: [0.9]", "job.yaml:30: `betas` has too few values: [0.9]"),
    "algorithm value": (
        "schedule: rollplex",
        "algorithm: {clip: [1]}",
        "job.yaml:28: `clip`: is [1]; expected a number, a text, true, false or null",
    ),
}


@pytest.mark.parametrize("case", KEYS)
def test_a_wrong_key_or_value_is_refused_with_its_line(case: str, tmp_path: Path) -> None:
    old, new, message = KEYS[case]
    error = refusal(tmp_path, edited((old, new)))
    assert message in str(error)
    assert len(error.problems) == 1  # nothing follows from a value that is only a stand-in


ODD = """
  name: odd
  config: {model_type: qwen2, hidden_size: 64, num_hidden_layers: 1, num_attention_heads: 8, intermediate_size: 100,
           vocab_size: 128}"""
SECOND_POLICY = """\
    train: {tensor_parallel: 8}
    rollout: {tensor_parallel: 4, kv_cache_gib: 29}"""
ROLLOUT = """\
    rollout:
      engine: vllm
      tensor_parallel: 4
      kv_cache_gib: 29
      runtime_gib: 3
"""
SCORE = "    score:\n      engine: megatron\n      tensor_parallel: 8"
TRAIN_TP = "tensor_parallel: 8\n    rollout"

# what is wrong: (edits of GOOD, the message)
RULES = {
    "no such model": (
        [("Qwen2.5-VL-32B", "Qwen2.5-VL-32")],
        "job.yaml:1: no model `Qwen2.5-VL-32`: neither in the registry nor a path\n    try: Qwen2.5-VL-32B",
    ),
    "no such gpu": ([("gpu: H800", "gpu: H80")], "job.yaml:3: no GPU `H80`\n    try: H800"),
    "heads": (
        [("Qwen2.5-VL-32B", "Qwen2.5-VL-7B")],
        "job.yaml:11: tensor_parallel 8 does not divide the 28 attention heads (Qwen2.5-VL-7B); by heads alone "
        "1, 2, 4, 7, 14, 28 would do\n    try: tensor_parallel 1 or 2 or 4",
    ),
    "kv heads": (
        [("gpus_per_node: 8", "gpus_per_node: 5"), ("tensor_parallel: 4", "tensor_parallel: 5")],
        "job.yaml:14: tensor_parallel 5 does not divide the 8 KV heads, nor is it a multiple of them (Qwen2.5-VL-32B)",
    ),
    "feed-forward and vocabulary": (
        [("{name: Qwen2.5-VL-32B, dtype: bfloat16}", ODD), ("  frames: 16\n", "")],
        "job.yaml:14: tensor_parallel 8 does not divide the feed-forward width 100 (odd)",
    ),
    "a node": (
        [("gpus_per_node: 8", "gpus_per_node: 6"), ("nodes: 1", "nodes: 4")],
        "job.yaml:11: tensor_parallel 8 must divide the 6 GPUs of a node, or take whole nodes\n"
        "    try: tensor_parallel 1 or 2",
    ),
    "stated data_parallel": (
        [(TRAIN_TP, "tensor_parallel: 8\n      data_parallel: 2\n    rollout")],
        "job.yaml:12: data_parallel 2 x tensor_parallel 8 is 16, but the cluster has 8 GPUs\n"
        "    try: data_parallel 1, or leave it out",
    ),
    "q": (
        [(TRAIN_TP, "tensor_parallel: 2\n    rollout")],
        "job.yaml:14: q = 2 / 4 = 1/2: a rollout shard is made of whole training shards, so q must be a positive "
        "integer\n    try: rollout tensor_parallel 1 or 2",
    ),
    "no pool": (
        [("schedule: rollplex", "schedule: disaggregated")],
        "job.yaml:28: disaggregated needs to know the GPUs of the rollout pool\n    try: cluster.rollout_gpus: 4",
    ),
    "nothing to train on": (
        [("schedule: rollplex", "schedule: disaggregated"), ("nodes: 1", "nodes: 1\n  rollout_gpus: 8")],
        "job.yaml:6: 8 rollout GPUs leave none of the cluster's 8 to train on\n"
        "    try: less than 8, or schedule: rollplex",
    ),
    "half a group": (
        [("schedule: rollplex", "schedule: disaggregated"), ("nodes: 1", "nodes: 2\n  rollout_gpus: 4")],
        "job.yaml:12: the 12 GPUs of the training pool are not whole groups of tensor_parallel 8\n"
        "    try: tensor_parallel 1 or 2 or 4",
    ),
    "stated data_parallel of a pool": (
        [
            ("schedule: rollplex", "schedule: disaggregated"),
            ("nodes: 1", "nodes: 2\n  rollout_gpus: 8"),
            (TRAIN_TP, "tensor_parallel: 8\n      data_parallel: 2\n    rollout"),
        ],
        "job.yaml:13: data_parallel 2 x tensor_parallel 8 is 16, but the training pool has 8 GPUs\n"
        "    try: data_parallel 1, or leave it out",
    ),
    "one pool only": (
        [
            ("schedule: rollplex", "schedule: disaggregated\nablate: [weight_sharing]"),
            ("nodes: 1", "nodes: 2\n  rollout_gpus: 8"),
        ],
        "job.yaml:30: ablate has weight_sharing, but pools of their own share no weights\n    try: schedule: rollplex",
    ),
    "tail without a share": (
        [("group: 8", "group: 8\n  rollout: {kind: partial}")],
        "job.yaml:25: kind partial needs a `share`\n    try: share: 0.8",
    ),
    "tail with the other's key": (
        [("group: 8", "group: 8\n  rollout: {kind: oversample, factor: 1.25, share: 0.8}")],
        "job.yaml:25: share 0.8 has no effect with kind oversample\n    try: kind: partial",
    ),
    "no tail to cut": (
        [("group: 8", "group: 8\n  rollout: {factor: 1.25}")],
        "job.yaml:25: factor 1.25 has no effect with kind full\n    try: kind: oversample",
    ),
    "sampled prompts over engines": (
        [("group: 8", "group: 8\n  rollout: {kind: oversample, factor: 1.03}")],
        "job.yaml:25: 33 sampled prompts do not divide over the 2 rollout engines\n"
        "    try: factor: 1.0625, for 34 of them",
    ),
    "prompts over engines": (
        [("prompts: 32", "prompts: 33")],
        "job.yaml:23: 33 prompts do not divide over the 2 rollout engines\n    try: a multiple of 2, such as 32",
    ),
    "prompts over ranks": (
        [
            ("nodes: 1", "nodes: 4"),
            ("prompts: 32", "prompts: 40"),
            ("tensor_parallel: 8\nworkload", "tensor_parallel: 2\nworkload"),
        ],
        "job.yaml:23: 40 prompts do not divide over reference's 16 data-parallel ranks\n"
        "    try: a multiple of 16, such as 32",
    ),
    "more ranks than prompts": (
        [("nodes: 1", "nodes: 8"), ("prompts: 32", "prompts: 4")],
        "job.yaml:23: 4 prompts leave some of actor's 8 data-parallel ranks without work\n"
        "    try: a multiple of 16, such as 16",
    ),
    "kv budget": (
        [("kv_cache_gib: 29", "kv_cache_gib: 20")],
        "job.yaml:15: 20.0 GiB of KV cache are 4.1 GiB short: 16 prompts x (8192 + 8 x 2048) tokens on one engine take "
        "24.1 GiB a GPU, and the engine would preempt\n    try: kv_cache_gib: 24.12, fewer prompts, a shorter budget, "
        "or a larger rollout tensor_parallel",
    ),
    "no trainer": (
        [(SCORE, "    recompute: none")],
        "job.yaml:18: role `reference` has neither `train` nor `score`",
    ),
    "no policy": (
        [(ROLLOUT, "")],
        "job.yaml:7: no role has both `train` and `rollout`",
    ),
    "two policies": (
        [(SCORE, SECOND_POLICY)],
        "job.yaml:20: `actor` is sampled from already; one policy a job",
    ),
    "role name": ([("reference:", "my-ref:")], "job.yaml:18: `my-ref` cannot be the name of an algorithm's parameter"),
    "all frozen": (
        [("[vision]", "[vision, language]")],
        "job.yaml:17: every part of `actor` is frozen, so there is nothing to train",
    ),
    "engine": (
        [("engine: vllm", "engine: sglang")],
        "job.yaml:13: no rollout engine `sglang`\n    try: one of host, vllm",
    ),
    "gpu dtype": (
        [("dtype: bfloat16", "dtype: float32")],
        "job.yaml:1: dtype float32 is for host engines; GPU engines hold weights in bfloat16",
    ),
    "median": (
        [("  frames: 16", "  response_median: 4096")],
        "job.yaml:27: response_median 4096 exceeds the budget response_tokens 2048",
    ),
    "all of a text model frozen": (
        [("Qwen2.5-VL-32B", "Llama-3.1-8B"), ("  frames: 16", "  frames: 0"), ("[vision]", "[language]")],
        "job.yaml:17: every part of `actor` is frozen: Llama-3.1-8B has no vision tower\n    try: freeze: []",
    ),
    "frames of a text model": (
        [("Qwen2.5-VL-32B", "Llama-3.1-8B")],
        "job.yaml:27: Llama-3.1-8B has no vision tower\n    try: frames: 0",
    ),
    "frames beyond the prompt": (
        [("  frames: 16", "  frames: 32\n  max_pixels: 602112")],
        "job.yaml:28: 32 frames of 602112 pixels take 12288 of 8192 prompt tokens\n    try: fewer frames",
    ),
    "share missing": (
        [("schedule: rollplex", "sharing: {kind: fixed}")],
        "job.yaml:28: kind fixed needs a `share` of the SMs, between 0 and 1\n    try: share: 0.6",
    ),
    "share without effect": (
        [("schedule: rollplex", "sharing: {share: 0.5}")],
        "job.yaml:28: share 0.5 has no effect with kind mps\n    try: kind: fixed",
    ),
    "a pattern that names nothing": (
        [("  lr: 1e-6", '  no_decay: ["*norm*", "*layer_norm*"]')],
        "job.yaml:30: no trained parameter is called `*layer_norm*`\n"
        "    try: model.language_model.layers.*.input_layernorm.weight or ",
    ),
    "a pattern that divides a fused weight": (
        [("  lr: 1e-6", '  no_decay: ["*.bias", "*k_proj*"]')],
        "layers.0.self_attn.v_proj.weight as one parameter, of which model.language_model.layers.0.self_attn.k_proj."
        "weight alone is named\n    try: a pattern for all of them, or for none",
    ),
    "chunks and their ablation": (
        [("  lr: 1e-6", "  chunks: 4\nablate: [chunked_optimizer]")],
        "job.yaml:30: ablate switches chunking off, but optimizer.chunks is 4\n    try: chunks: auto",
    ),
}


@pytest.mark.parametrize("case", RULES)
def test_a_job_that_cannot_work_is_refused_before_anything_is_planned(case: str, tmp_path: Path) -> None:
    edits, message = RULES[case]
    assert message in str(refusal(tmp_path, edited(*edits)))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            "{tensor_parallel: 4, sequence_parallel: false}",
            "no repeated KV heads on cpu: 4 ranks, 2 KV heads\n    try: at most 2",
        ),
        ("{pipeline_parallel: 2}", "no pipeline_parallel on cpu\n    try: leave it out"),
        ("{context_parallel: 2}", "no context_parallel on cpu\n    try: leave it out"),
        ("{}\n    recompute: selective", "no recompute selective on cpu\n    try: none or full"),
    ],
)
def test_what_megatron_does_not_run_on_a_cpu_is_refused(train: str, message: str, tmp_path: Path) -> None:
    tiny(tmp_path)
    text = TINY.replace("train: {engine: host}", f"train: {train}").replace("node: 1", "node: 4")
    assert f"engine megatron has {message}" in str(refusal(tmp_path, text))


def test_a_cpu_job_must_state_its_capacity_and_use_engines_that_a_cpu_runs(tmp_path: Path) -> None:
    tiny(tmp_path)
    text = TINY.replace(', capacity_gib: "1.5 GiB"', "").replace("train: {engine: host}", "train: {engine: fsdp}", 1)
    text += "schedule: serial\n"
    assert str(refusal(tmp_path, text)) == (
        "job.yaml:2: a cpu has no memory size of its own; the job must state one\n"
        '    try: cluster.capacity_gib: "256 MiB"\n'
        "job.yaml:5: engine fsdp cannot run on cpu\n"
        "    try: engine: host"
    )


# ---- all at once


def test_all_problems_come_at_once_keys_and_rules_alike(tmp_path: Path) -> None:
    text = edited(
        ("prompts: 32", "prompts: 32\n  zzz: 1"), ("Qwen2.5-VL-32B", "Qwen2.5-VL-7B"), ("gpu: H800", "gpu: H80")
    )
    error = refusal(tmp_path, text, "optimizer.lr=fast", "nonsense")
    assert [problem.where for problem in error.problems] == [
        "--set nonsense",
        "job.yaml:24",
        "--set optimizer.lr=fast",
        "job.yaml:3",
        "job.yaml:11",
        "job.yaml:21",
    ]


def test_nothing_is_concluded_from_the_default_of_a_misspelt_key(tmp_path: Path) -> None:
    text = edited((TRAIN_TP, "tensor_paralel: 8\n    rollout"))
    assert str(refusal(tmp_path, text)) == "job.yaml:11: unknown key `tensor_paralel`\n    try: tensor_parallel"


def test_a_misspelt_key_does_not_hide_what_has_nothing_to_do_with_it(tmp_path: Path) -> None:
    text = edited((TRAIN_TP, "tensor_paralel: 8\n    rollout"), ("gpu: H800", "gpu: H80"))
    assert [problem.where for problem in refusal(tmp_path, text).problems] == ["job.yaml:11", "job.yaml:3"]


def test_wrong_degrees_do_not_hide_a_wrong_batch(tmp_path: Path) -> None:
    error = refusal(tmp_path, GOOD, "roles.actor.rollout.tensor_parallel=32", "workload.prompts=33", "cluster.nodes=2")
    rollout = "--set roles.actor.rollout.tensor_parallel=32"
    assert [problem.where for problem in error.problems] == [rollout] * 3 + ["--set workload.prompts=33"] * 2
    assert "q = 8 / 32 = 1/4" in str(error)


# ---- overrides


OVERRIDES = {
    "no value": ("schedule", "--set schedule: write section.key=value"),
    "no key": ("=3", "--set =3: write section.key=value"),
    "an empty part": ("workload..prompts=3", "--set workload..prompts=3: write section.key=value"),
    "unknown key": ("workload.promts=3", "--set workload.promts=3: unknown key `promts`\n    try: prompts"),
    "unknown section": ("work.prompts=3", "--set work.prompts=3: unknown key `work`"),
    "wrong value": ("workload.prompts=x", "--set workload.prompts=x: `prompts` is 'x'; expected a whole number"),
    "not YAML": ("ablate=[a", "--set ablate=[a: `[a` is not a YAML value"),
    "inside a value": ("schedule.x=1", "--set schedule.x=1: `schedule` holds 'rollplex', not a section"),
    "a rule": ("workload.prompts=33", "--set workload.prompts=33: 33 prompts do not divide over the 2 rollout engines"),
    "a role gone": ("roles.actor=null", "--set roles.actor=null: `actor` is null; expected a section with keys"),
}


@pytest.mark.parametrize("case", OVERRIDES)
def test_a_wrong_override_is_named_by_its_text(case: str, tmp_path: Path) -> None:
    override, message = OVERRIDES[case]
    assert str(refusal(tmp_path, GOOD, override)).startswith(message)


def test_the_last_override_of_a_key_counts_and_is_blamed(tmp_path: Path) -> None:
    overrides = ("workload.prompts=33", "workload.prompts=64", "workload.group=0")
    assert str(refusal(tmp_path, GOOD, *overrides)) == "--set workload.group=0: `group` is 0; must be at least 1"


# ---- files that are no job

BAD_TEXT = {
    "syntax": ("model: [a\ncluster: b", "job.yaml:2:8: not YAML: "),
    "a tab": ("model:\n\tname: x", "job.yaml:2:1: not YAML: found character"),
    "empty": ("", "job.yaml:1: expected the sections of a job, found nothing\n    try: start with model, cluster"),
    "only a comment": ("# later", "job.yaml:1: expected the sections of a job, found nothing"),
    "a list": ("- model", "job.yaml:1: expected the sections of a job, found a list"),
    "a word": ("model", "job.yaml:1: expected the sections of a job, found a str"),
    "two documents": ("a: 1\n---\nb: 2", "job.yaml:2:1: not YAML: but found another document"),
    "an alias": ("a: &x {b: 1}\nc: *x", "job.yaml:1:4: not YAML: aliases (*name) are not read here"),
    "a loop": ("a: &x [*x]", "aliases (*name) are not read here"),
    "code": ("a: !!python/object:os.system {}", "not YAML: "),
    "a wrong tag": ("a: !!int many", "job.yaml:1:4: not YAML: 'many' is not of type int"),
    "an odd tag": ("a: !car red", "job.yaml:1:4: not YAML: the tag !car is not read here"),
    "a control character": ("a: \x07", "job.yaml: not YAML: "),
    "depth": ("a: " + "[" * 5000, "job.yaml: nested too deeply"),
}


@pytest.mark.parametrize("case", BAD_TEXT)
def test_a_text_that_is_no_job_is_refused(case: str, tmp_path: Path) -> None:
    text, message = BAD_TEXT[case]
    assert message in str(refusal(tmp_path, text))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"no such file: .*none\.yaml\n    try: examples/jobs/"):
        load_job(tmp_path / "none.yaml")
    with pytest.raises(JobError, match="is a directory; expected a YAML file"):
        load_job(tmp_path)
    (tmp_path / "job.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JobError, match=r"job.yaml: not a text file \(UTF-8\)"):
        load_job(tmp_path / "job.yaml")
    with pytest.raises(JobError, match="cannot read"):
        load_job(tmp_path / "job.yaml" / "inside")
    with pytest.raises(JobError, match="cannot read /dev/zero: more than 64 MiB"):
        load_job("/dev/zero")


def test_a_model_path_without_an_end_is_refused(tmp_path: Path) -> None:
    """It is read for its first 64 MiB, not until the memory is full."""
    assert "/dev/zero: cannot read it: more than 64 MiB" in str(refusal(tmp_path, GOOD, "model.name=/dev/zero"))


def test_a_broken_config_is_told_beside_the_jobs_own_problems(tmp_path: Path) -> None:
    tiny(tmp_path)
    (tmp_path / "tiny" / "config.json").write_text('{"model_type": "qwen2"}')
    error = refusal(tmp_path, TINY.replace("prompts: 4", "prompts: 0"))
    assert error.problems[0].where == "job.yaml:7"
    assert {p.where for p in error.problems[1:]} == {"job.yaml:1"}
    assert f"{tmp_path / 'tiny' / 'config.json'}: field `hidden_size` is missing" in str(error)


def test_a_config_that_is_not_json_is_refused_with_both_places(tmp_path: Path) -> None:
    tiny(tmp_path)
    (tmp_path / "tiny" / "config.json").write_text("{")
    error = refusal(tmp_path, TINY)
    assert str(error).startswith(f"job.yaml:1: {tmp_path / 'tiny' / 'config.json'}:1: not JSON")
    assert len(error.problems) == 1


@pytest.mark.parametrize("name", ["~nobody/model", "a\\0b", "x" * 5000])
def test_an_impossible_path_is_just_no_model(name: str, tmp_path: Path) -> None:
    assert "neither in the registry nor a path" in str(refusal(tmp_path, GOOD, f'model.name="{name}"'))
