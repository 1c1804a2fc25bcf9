"""vLLM as the sampler of a rollout rank: its engine core in this process, over the pages that the trainer fills.

A tensor-parallel engine is one vLLM engine a rank, started together and stepped alike (vLLM's external launcher); they
meet in a process group of their own, which vLLM takes as the default group and destroys with itself. It is gloo's.
For tensors of GPUs vLLM has groups of NCCL beside it, and an all-reduce that opens memory of other ranks by CUDA's IPC.
VMM arenas cannot be opened so, and need not: it opens its own buffers and what layers put out, not weights, not KV.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from rollplex.backends.collectives import store_in
from rollplex.backends.data.batch import PromptBatch
from rollplex.backends.data.histories import Histories
from rollplex.backends.data.rollout import Rollout
from rollplex.backends.facts import load_facts
from rollplex.backends.hf.model import parse_config
from rollplex.backends.rollout.sampler import Served
from rollplex.backends.training.placement import config_of
from rollplex.backends.vllm import kv, loader, model
from rollplex.backends.vllm.decoding import Asked, VllmDecoding
from rollplex.backends.vllm.settings import nothing_collected, over_gloo, some_kernels_vary, undisturbed
from rollplex.backends.vllm.versions import installed
from rollplex.ir.errors import EngineError
from rollplex.ir.job import Job
from rollplex.ir.placement import Seat
from rollplex.ir.serving import kv_block_tokens, model_length

LEAST_SHARE = 0.01
"""Of the GPU, which must be free when vLLM starts; what it may take is said by the plan's KV, not by a share."""
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""Decode steps are captured, nothing is compiled: a new plan starts without minutes of compilation."""


class VllmSampler:
    """`Sampler` of one rank; `meeting` is where the ranks of its engine find each other."""

    def __init__(self, job: Job, seat: Seat, served: Served, meeting: Path) -> None:
        self._job, self._seat, self._served, self._meeting = job, seat, served, meeting
        self._seeds: Sequence[int] = ()
        self._engine: Any = None
        self._config = config_of(job)

    def ready(self) -> None:
        """Start the engine: its weights are there, and nothing of it is profiled or captured before."""
        job, facts = self._job, load_facts("vllm")
        rows = {kind: facts.rows(job.spec, kind, job.rollout_tp, self._seat.tp) for kind in ("qkv", "gate_up")}
        vocab = job.spec.padded_vocab(job.train_tp)
        memory = self._served.kv
        machine = (undisturbed(), over_gloo()) if job.on_host else (some_kernels_vary(),)
        with ExitStack() as stack:
            for each in (*machine, kv.lent(memory), loader.serving(self._served, rows, vocab)):
                stack.enter_context(each)
            model.register()
            self._meet()
            self._engine = LLMEngine.from_engine_args(EngineArgs(**self._arguments()))
        kv.check(self.runner, memory)

    def begin(self, seeds: Sequence[int]) -> None:
        """Prefixes and encoded images of the old weights go."""
        self._seeds = seeds
        self._engine.reset_mm_cache()
        self._engine.reset_encoder_cache()
        if not self._engine.reset_prefix_cache():
            what = "vLLM keeps prefixes of the old weights: a request of the last step still holds blocks"
            raise EngineError(what, where="vllm", hint="report this: every step ends its own requests")

    def decoding(self, prompts: PromptBatch, begun: Rollout | None, version: int) -> VllmDecoding:
        work, pads = self._job.workload, {kind: self._config.get(f"{kind}_token_id", -1) for kind in ("image", "video")}
        asked = Asked(self._job.group, work.response_tokens, self._job.run.temperature, prompts.eos, pads)
        return VllmDecoding(self._engine, prompts, asked, self._seeds, begun, version, self._served.live)

    def turn(self, prompts: PromptBatch | Histories, version: int) -> Rollout:
        raise AssertionError("plans with turns run on the host engine alone")

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        if self._engine is not None:
            with nothing_collected():
                self._engine.engine_core.shutdown()
        with suppress(AssertionError):  # vLLM has taken the group with it
            if dist.is_initialized():
                dist.destroy_process_group()

    @property
    def runner(self) -> Any:
        """vLLM's model runner of this rank; `runner.model` has the weights."""
        return self._engine.model_executor.driver_worker.worker.model_runner

    def _meet(self) -> None:
        """The default process group of this process is that of its engine's ranks."""
        tp, limit = self._job.rollout_tp, timedelta(seconds=self._job.run.silent_s)
        if not dist.is_initialized():
            store = store_in(self._meeting / f"engine-{self._seat.copy}", tp)
            dist.init_process_group("gloo", store=store, rank=self._seat.tp, world_size=tp, timeout=limit)
        assert dist.get_world_size() == tp, f"this process is in a group of {dist.get_world_size()}, not {tp}"
        local = self._served.kv.device.index or 0  # vLLM's number of its GPU
        where = self._seat.tp if self._job.on_host else local
        os.environ.update(RANK=str(self._seat.tp), LOCAL_RANK=str(where), WORLD_SIZE=str(tp))

    def _arguments(self) -> dict[str, Any]:
        job, rollout, found = self._job, self._job.roles[self._job.policy].rollout, installed()
        assert rollout is not None
        assert found is not None
        captured = {} if job.on_host else {"gpu_memory_utilization": LEAST_SHARE, "compilation_config": GRAPHS}
        return {
            **captured,
            "model": str(self._directory()),
            "skip_tokenizer_init": True,
            "load_format": loader.FORMAT,
            "dtype": job.model.dtype,
            "seed": 0,
            "tensor_parallel_size": job.rollout_tp,
            "distributed_executor_backend": "external_launcher",
            "disable_custom_all_reduce": not found.own_all_reduce,
            "max_model_len": model_length(job),
            "max_num_seqs": min(rollout.max_num_seqs, job.prompts_per_engine * job.group),
            "max_num_batched_tokens": rollout.max_num_batched_tokens,
            "kv_cache_memory_bytes": self._served.kv.numel(),
            "block_size": kv_block_tokens(job),
            "enable_prefix_caching": True,
            # Behind a piece of a prompt vLLM takes back a number drawn from the request's dice, which a CPU's cannot.
            "enable_chunked_prefill": not job.on_host,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            # A step is prepared while the one before runs: when, the clock decides, and ranks have clocks of their own.
            "async_scheduling": not job.on_host and job.rollout_tp == 1,
            "enforce_eager": job.on_host,
            "mm_encoder_tp_mode": rollout.mm_encoder_tp_mode,
            "mm_processor_cache_gb": 0,
            "skip_mm_profiling": True,
            "disable_log_stats": True,
        }

    def _directory(self) -> Path:
        """A directory with the model's config as vLLM reads it, beside where the ranks meet."""
        config = parse_config(self._config, "vllm").to_dict() | {"architectures": [model.NAME]}
        folder = self._meeting / f"vllm-{self._seat.gpu}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder
