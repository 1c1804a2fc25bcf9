"""What the backend uses of vLLM, a line each: where it is, its name, and the parameters that it is given by name.

vllm.v1.worker.gpu_model_runner     GPUModelRunner.kv_caches           an attribute that its methods set
vllm.v1.core.sched.scheduler        Scheduler.requests                 of what `engine_core.scheduler` is
vllm.engine.arg_utils               EngineArgs                         a class: what its constructor takes

All of it is in vLLM 0.20 to 0.33 in the same form, `CPU_CALLS` on CPUs alone.
"""

from __future__ import annotations

from typing import NamedTuple


class Call(NamedTuple):
    """A function, class or attribute of vLLM; `takes` are parameters by name."""

    module: str
    name: str
    takes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


_RUNNER, _CORE, _INPUTS = "vllm.v1.worker.gpu_model_runner", "vllm.v1.engine.core", "vllm.multimodal.inputs"
_ENGINE, _QWEN = "vllm.v1.engine.llm_engine", "vllm.model_executor.models.qwen2_5_vl"
_LOADER, _LAYERS = "vllm.model_executor.model_loader", "vllm.model_executor.layers"

ARGUMENTS = (
    "model", "skip_tokenizer_init", "load_format", "dtype", "seed", "tensor_parallel_size",
    "distributed_executor_backend", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes",
    "block_size", "enable_prefix_caching", "enable_chunked_prefill", "logprobs_mode", "generation_config",
    "async_scheduling", "enforce_eager", "mm_encoder_tp_mode", "mm_processor_cache_gb", "skip_mm_profiling",
    "disable_log_stats", "gpu_memory_utilization", "compilation_config", "disable_custom_all_reduce",
)  # fmt: skip
SAMPLING = (
    "temperature",
    "seed",
    "max_tokens",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "detokenize",
    "output_kind",
)

CALLS = (
    # An engine, and what lies in it (sampler.py, decoding.py).
    Call("vllm.envs", "VLLM_ENABLE_V1_MULTIPROCESSING"),
    Call("vllm.envs", "VLLM_USE_V2_MODEL_RUNNER"),
    Call("vllm.envs", "VLLM_ALLREDUCE_USE_SYMM_MEM"),
    Call("vllm.engine.arg_utils", "EngineArgs", ARGUMENTS),
    Call("vllm.config.compilation", "CompilationConfig", ("mode", "cudagraph_mode")),
    Call("vllm.config.compilation", "CompilationMode.NONE"),
    Call("vllm.config.compilation", "CUDAGraphMode.FULL_DECODE_ONLY"),
    Call(_ENGINE, "LLMEngine.from_engine_args", ("engine_args",)),
    Call(_ENGINE, "LLMEngine.add_request", ("request_id", "prompt", "params")),
    Call(_ENGINE, "LLMEngine.abort_request", ("request_ids",)),
    Call(_ENGINE, "LLMEngine.step"),
    Call(_ENGINE, "LLMEngine.reset_mm_cache"),
    Call(_ENGINE, "LLMEngine.reset_encoder_cache"),
    Call(_ENGINE, "LLMEngine.reset_prefix_cache"),
    Call(_ENGINE, "LLMEngine.engine_core"),
    Call(_ENGINE, "LLMEngine.model_executor"),
    Call("vllm.v1.engine.core_client", "InprocClient.engine_core"),
    Call("vllm.v1.engine.core_client", "InprocClient.shutdown"),
    Call(_CORE, "EngineCore.scheduler"),
    Call(_CORE, "EngineCore.batch_queue"),
    Call("vllm.v1.core.sched.scheduler", "Scheduler.requests"),
    Call("vllm.v1.request", "Request.num_preemptions"),
    Call("vllm.v1.executor.uniproc_executor", "ExecutorWithExternalLauncher.driver_worker"),
    Call("vllm.v1.worker.worker_base", "WorkerWrapperBase.worker"),
    Call("vllm.v1.worker.gpu_worker", "Worker.model_runner"),
    Call("vllm.sampling_params", "SamplingParams", SAMPLING),
    Call("vllm.sampling_params", "RequestOutputKind.DELTA"),
    Call("vllm.outputs", "RequestOutput", ("request_id", "outputs", "finished")),
    Call("vllm.outputs", "CompletionOutput", ("token_ids", "logprobs")),
    Call("vllm.logprobs", "Logprob", ("logprob",)),
    # Keys and values (kv.py).
    Call(_RUNNER, "GPUModelRunner.initialize_kv_cache_tensors", ("kv_cache_config", "kernel_block_sizes")),
    Call(_RUNNER, "GPUModelRunner.kv_caches"),
    Call(_RUNNER, "GPUModelRunner.compilation_config"),
    Call(_RUNNER, "GPUModelRunner.model"),
    Call("vllm.config.compilation", "CompilationConfig", ("static_forward_context",)),
    # Weights (loader.py).
    Call(_LOADER, "register_model_loader", ("load_format",)),
    Call(f"{_LOADER}.base_loader", "BaseModelLoader.download_model", ("model_config",)),
    Call(f"{_LOADER}.base_loader", "BaseModelLoader.load_weights", ("model", "model_config")),
    Call(f"{_LOADER}.base_loader", "BaseModelLoader.load_model", ("vllm_config", "model_config", "prefix")),
    Call(f"{_LOADER}.utils", "initialize_model", ("vllm_config", "model_config", "prefix")),
    Call(f"{_LOADER}.utils", "process_weights_after_loading", ("model", "model_config", "target_device")),
    Call(f"{_LAYERS}.linear", "UnquantizedLinearMethod.create_weights"),
    Call(f"{_LAYERS}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod.create_weights"),
    Call(f"{_LAYERS}.vocab_parallel_embedding", "pad_vocab_size", ("vocab_size", "pad_to")),
    Call("vllm.utils.torch_utils", "set_default_torch_dtype", ("dtype",)),
    # The model and its prompts (model.py, inputs.py).
    Call("vllm.model_executor.models", "ModelRegistry.get_supported_archs"),
    Call("vllm.model_executor.models", "ModelRegistry.register_model", ("model_arch", "model_cls")),
    Call(_QWEN, "Qwen2_5_VLDummyInputsBuilder"),
    Call(_QWEN, "Qwen2_5_VLForConditionalGeneration.get_mrope_input_positions", ("input_tokens", "mm_features")),
    Call(_QWEN, "Qwen2_5_VLMultiModalProcessor"),
    Call(_QWEN, "Qwen2_5_VLProcessingInfo.get_supported_mm_limits"),
    Call(_QWEN, "Qwen2_5_VLProcessingInfo.get_mm_max_tokens_per_item", ("seq_len", "mm_counts")),
    Call("vllm.multimodal", "MULTIMODAL_REGISTRY.register_processor", ("processor", "info", "dummy_inputs")),
    Call(_INPUTS, "MultiModalFieldConfig.flat_from_sizes", ("modality", "size_per_item")),
    Call(_INPUTS, "MultiModalFieldConfig.batched", ("modality", "keep_on_cpu")),
    Call(_INPUTS, "MultiModalKwargsItems.from_hf_inputs", ("hf_inputs", "config_by_key")),
    Call(_INPUTS, "PlaceholderRange", ("offset", "length")),
    Call(_INPUTS, "MultiModalFeatureSpec", ("data",)),
)

CPU_CALLS = (
    Call(
        "vllm.distributed.device_communicators.cpu_communicator",
        "CpuCommunicator._all_group_ranks_share_shm_group_name",
    ),
)
