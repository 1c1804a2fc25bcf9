"""Job files: what a good one means, and each thing that can be wrong with one, told with its line."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_texts import GOOD, edited, tiny, write
from pydantic import BaseModel

from rollplex.ir.job import Job, load_job

EXAMPLES = Path(__file__).parent.parent / "examples" / "jobs"

# ---- what a good job means


def test_a_job_answers_for_its_sizes_and_degrees(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, GOOD))
    assert job.spec.parameters == 33_452_718_336
    assert job.capacity_bytes == round(79.1 * 2**30)
    assert job.host_pool_bytes == 1_190_000_000_000  # 85 % of 1.4 TB
    assert (job.gpus, job.q, job.engines, job.train_tp, job.rollout_tp) == (8, 2, 2, 8, 4)
    assert (job.policy, job.data_parallel("actor"), job.data_parallel("reference")) == ("actor", 1, 1)
    assert (job.prompts_per_rank, job.prompts_per_engine, job.group, job.itemsize) == (32, 16, 8, 2)
    assert job.kv_cache_bytes == 29 * 2**30
    assert job.runtime_bytes == 3 * 2**30
    assert job.optimizer.lr == 1e-6  # YAML 1.1 alone reads 1e-6 as a text
    assert job.notes() == ()


def test_the_description_is_three_aligned_lines(tmp_path: Path) -> None:
    assert load_job(write(tmp_path, GOOD)).describe() == (
        "model      Qwen2.5-VL-32B, 33.45 B parameters               cluster   1 node x 8 H800, 1.4 TB host\n"
        "roles      actor megatron TP8 -> vllm TP4 x 2 (q = 2)       reference megatron TP8\n"
        "work       32 prompts x 8 responses, 8192 + 2048 tokens     schedule  rollplex"
    )


@pytest.mark.parametrize(("nodes", "data_parallel", "engines"), [(1, 1, 2), (4, 4, 8)])
def test_the_example_jobs_load(nodes: int, data_parallel: int, engines: int) -> None:
    job = load_job(EXAMPLES / f"qwen2_5_vl_32b_h800x{8 * nodes}.yaml")
    assert (job.cluster.nodes, job.data_parallel("actor"), job.engines) == (nodes, data_parallel, engines)
    assert (job.workload.prompts, job.group, job.schedule) == (32, 8, "rollplex")
    assert max(map(len, job.describe().splitlines())) <= 100


def test_overrides_change_keys_and_create_sections(tmp_path: Path) -> None:
    overrides = ("schedule=naive", "ablate=[state_offload]", "optimizer.lr=2e-5", "solver.seed=7", "algorithm.kl=0.1")
    job = load_job(write(tmp_path, GOOD), overrides)
    assert (job.schedule, job.ablate, job.optimizer.lr) == ("naive", ("state_offload",), 2e-5)
    assert (job.solver.seed, job.algorithm) == (7, {"kl": 0.1})


def test_a_model_may_be_a_name_alone_and_still_be_overridden(tmp_path: Path) -> None:
    text = edited(("{name: Qwen2.5-VL-32B, dtype: bfloat16}", "qwen2.5-vl-32b"))
    assert load_job(write(tmp_path, text)).spec.name == "Qwen2.5-VL-32B"
    assert load_job(write(tmp_path, text), ["model.name=Qwen2.5-VL-3B"]).spec.layers == 36


def test_sizes_take_units_to_the_byte(tmp_path: Path) -> None:
    job = load_job(tiny(tmp_path))
    assert (job.kv_cache_bytes, job.runtime_bytes) == (48 * 2**20, 512)
    assert (job.capacity_bytes, job.host_memory_bytes) == (3 * 2**29, 512_000_000)


def test_paths_are_relative_to_the_job_file_and_the_model_travels_with_the_job(tmp_path: Path) -> None:
    job = load_job(tiny(tmp_path))
    assert job.run.data == str(tmp_path / "data" / "train.jsonl")
    assert job.run.weights == str(tmp_path.parent / "warm")
    data = job.model_dump(mode="json")
    (tmp_path / "tiny" / "config.json").unlink()
    again = Job.model_validate(json.loads(json.dumps(data)))
    assert again == job
    assert (again.spec.name, again.spec.hidden, again.device.page_bytes) == ("tiny", 64, 4096)


def test_host_engines_do_not_pad_the_vocabulary(tmp_path: Path) -> None:
    spec = load_job(tiny(tmp_path)).spec
    assert spec.padded_vocab() == 131
    assert spec.rank_parameters(1) == spec.parameters


def test_the_kv_need_counts_each_prompt_once_and_every_response(tmp_path: Path) -> None:
    job = load_job(tiny(tmp_path))
    # 64 prompt tokens: 3 shared blocks (the last token is every response's own), then 16 + 16 tokens in 2 own blocks.
    blocks = 4 * (3 + 2 * 2) + 1
    assert job.rollout_kv_need_bytes == blocks * 16 * (2 * 2 * 2 * 16 * 8)


def test_a_job_survives_pickle_and_json(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, GOOD), ["algorithm={clip: 0.2, name: null, on: true}"])
    assert job.spec.hidden == 5120  # cached values must not get in the way
    assert pickle.loads(pickle.dumps(job)) == job
    assert Job.model_validate(job.model_dump(mode="json")) == job
    assert Job.model_validate_json(job.model_dump_json()) == job


@given(
    nodes=st.integers(1, 10**6),
    memory=st.floats(0, 1e9),
    capacity=st.none() | st.floats(min_value=1e-9, max_value=1e6),
    kv_bytes=st.integers(0, 2**50),
    lr=st.floats(0, 1),
    chunks=st.just("auto") | st.integers(1, 4096),
    freeze=st.lists(st.sampled_from(["vision", "language"]), unique=True),
    ablate=st.lists(st.sampled_from(["state_offload", "weight_sharing"]), unique=True),
    algorithm=st.dictionaries(st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.floats(-1, 1)),
)
def test_any_job_round_trips_through_json(
    nodes: int,
    memory: float,
    capacity: float | None,
    kv_bytes: int,
    lr: float,
    chunks: int | str,
    freeze: list[str],
    ablate: list[str],
    algorithm: dict[str, object],
) -> None:
    job = Job.model_validate(
        {
            "model": "Qwen2.5-VL-3B",
            "cluster": {"gpu": "H20", "nodes": nodes, "host_memory_gb": memory, "capacity_gib": capacity},
            "roles": {"actor": {"train": {}, "rollout": {"kv_cache_gib": f"{kv_bytes} B"}, "freeze": freeze}},
            "workload": {"prompts": 1, "prompt_tokens": 2, "response_tokens": 1},
            "optimizer": {"lr": lr, "chunks": chunks},
            "ablate": ablate,
            "algorithm": algorithm,
        }
    )
    assert job.kv_cache_bytes == kv_bytes
    again = Job.model_validate(json.loads(job.model_dump_json()))
    assert again == job
    assert again.model_dump_json() == job.model_dump_json()


def test_notes_tell_of_repeated_kv_heads_and_estimated_capacity(tmp_path: Path) -> None:
    text = edited(("Qwen2.5-VL-32B", "Qwen2.5-VL-3B"), ("gpu: H800", "gpu: H20"))
    repeated, _, _, capacity = load_job(write(tmp_path, text)).notes()
    assert repeated == "roles.actor.train: each of the 2 KV heads is held 4 times"
    assert capacity.startswith("H20: usable memory 94.6 GiB is estimated")


def sections(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The classes of everything below a model, by name."""
    found: dict[str, type[BaseModel]] = {}
    queue: list[Any] = [f.annotation for f in model.model_fields.values()]
    while queue:
        kind = queue.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel) and kind.__name__ not in found:
            found[kind.__name__] = kind
            queue += [f.annotation for f in kind.model_fields.values()]
        queue += get_args(kind)
    return found


def test_every_key_says_what_it_means() -> None:
    """The job's own keys and those of each of its sections, which are all that its JSON schema has."""
    below = sections(Job)
    assert set(below) == set(Job.model_json_schema()["$defs"])
    for section in (Job, *below.values()):
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"


def test_reading_a_job_loads_neither_torch_nor_a_solver() -> None:
    program = (
        "import sys; from rollplex.ir.job import load_job; from rollplex.ir.models import load_model;"
        f"load_job({str(EXAMPLES / 'qwen2_5_vl_32b_h800x8.yaml')!r});"
        "print([m for m in ('torch', 'transformers', 'ortools', 'networkx', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
