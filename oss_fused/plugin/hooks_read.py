# SPDX-License-Identifier: MIT
"""What this package reads of vLLM's classes and modules; hooks.py has the other hooks."""

from __future__ import annotations

_LAYERS = "vllm.model_executor.layers"
_MODELS = "vllm.model_executor.models"
_MOE = f"{_LAYERS}.fused_moe"
_QUANT = f"{_LAYERS}.quantization"
_LOADER = "vllm.model_executor.model_loader"
_CORE = "vllm.v1.core"
_FLASH = "vllm.v1.attention.backends.flash_attn"
_GPU = "vllm.v1.worker.gpu_worker"
_WORKER = "vllm.v1.worker.gpu"
_REJECTION = f"{_WORKER}.spec_decode.rejection_sampler:RejectionSampler"
_GRAPHS = f"{_WORKER}.cudagraph_utils"
_EAGLE = f"{_WORKER}.spec_decode.eagle.speculator:EagleSpeculator"
_AR = f"{_WORKER}.spec_decode.target_dependent_ar.speculator"

# class, module or value -> the members that we read
READ = {
    "vllm:LLM": "generate",
    "vllm:ModelRegistry": "",
    "vllm:SamplingParams": "",
    "vllm.config:VllmConfig": (
        "additional_config aux_output_config cache_config compilation_config is_mm_encoder_only "
        "kv_transfer_config load_config lora_config model_config num_lookahead_tokens "
        "parallel_config quant_config scheduler_config speculative_config use_v2_model_runner"
    ),
    "vllm.config.aux_output:AuxOutputConfig": "enable_return_routed_experts",
    "vllm.config.cache:CacheConfig": "block_size",
    "vllm.config.compilation:CUDAGraphMode": "FULL FULL_AND_PIECEWISE NONE PIECEWISE mixed_mode",
    "vllm.config.compilation:CompilationConfig": (
        "cudagraph_capture_sizes cudagraph_mode max_cudagraph_capture_size splitting_ops"
    ),
    "vllm.config.load:LoadConfig": "load_format",
    "vllm.config.model:ModelConfig": (
        "dtype get_hidden_size hf_config is_mm_prefix_lm logprobs_mode max_model_len model "
        "quantization revision rswa_window runner_type trust_remote_code"
    ),
    "vllm.config.parallel:ParallelConfig": (
        "data_parallel_rank data_parallel_size decode_context_parallel_size "
        "pipeline_parallel_size prefill_context_parallel_size rank use_ubatching worker_cls "
        "world_size"
    ),
    "vllm.config.scheduler:SchedulerConfig": (
        "async_scheduling disable_chunked_mm_input enable_chunked_prefill max_num_batched_tokens "
        "max_num_seqs scheduler_cls"
    ),
    "vllm.distributed.device_communicators.cuda_communicator:CudaCommunicator": "ca_comm",
    "vllm.distributed.device_communicators.custom_all_reduce:CustomAllreduce": (
        "_ptr device disabled fully_connected group rank world_size"
    ),
    "vllm.distributed.parallel_state:GroupCoordinator": "device_communicator",
    "vllm.compilation.breakable_cudagraph:is_breakable_cudagraph_enabled": "",
    "vllm.envs:VLLM_BATCH_INVARIANT": "",
    "vllm.envs:VLLM_USE_V2_MODEL_RUNNER": "",
    "vllm.envs:VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": "",
    f"{_LAYERS}.activation:SiluAndMul": "",
    f"{_LAYERS}.attention:Attention": (
        "head_size head_size_v impl kv_cache_dtype kv_cache_torch_dtype "
        "kv_sharing_target_layer_name layer_name num_heads num_kv_heads query_quant"
    ),
    f"{_LAYERS}.layernorm:RMSNorm": "variance_epsilon weight",
    f"{_LAYERS}.linear:LinearBase": "",
    f"{_LAYERS}.linear:MergedColumnParallelLinear": "",
    f"{_LAYERS}.linear:QKVParallelLinear": "",
    f"{_LAYERS}.linear:RowParallelLinear": "",
    f"{_LAYERS}.rotary_embedding:RotaryEmbedding": (
        "cos_sin_cache forward_cuda forward_native head_size is_neox_style rotary_dim "
        "use_flashinfer"
    ),
    f"{_LAYERS}.vocab_parallel_embedding:ParallelLMHead": "num_org_embeddings_per_partition",
    f"{_LAYERS}.vocab_parallel_embedding:VocabParallelEmbedding": "",
    f"{_MOE}:FusedMoEConfig": (
        "has_bias hidden_dim hidden_dim_unpadded in_dtype intermediate_size_per_partition "
        "intermediate_size_per_partition_unpadded is_act_and_mul is_lora_enabled moe_backend "
        "moe_parallel_config dp_size"
    ),
    f"{_MOE}:FusedMoEQuantConfig": "",
    f"{_MOE}:FusedMoeWeightScaleSupported": "CHANNEL",
    f"{_MOE}:GateLinear": "is_unquantized",
    f"{_MOE}:MoEActivation": "SILU SWIGLUOAI",
    f"{_MOE}:RoutedExperts": (
        "activation apply_router_weight_on_input ckpt_down_proj_name ckpt_gate_proj_name "
        "ckpt_up_proj_name custom_routing_function e_score_correction_bias expert_map "
        "expert_map_manager global_num_experts moe_config renormalize scoring_func swiglu_alpha "
        "swiglu_beta swiglu_limit top_k use_grouped_topk"
    ),
    f"{_MOE}.config:FusedMoEParallelConfig": (
        "all2all_backend enable_eplb pcp_size tp_rank tp_size use_ag_rs_all2all_kernels "
        "use_all2all_kernels"
    ),
    f"{_QUANT}.base_config:QuantizeMethodBase": "",
    f"{_QUANT}.utils.quant_utils:kFp8DynamicTokenSym": "",
    f"{_QUANT}.utils.quant_utils:kFp8StaticTensorSym": "",
    f"{_LOADER}:reload": "initialize_layerwise_reload finalize_layerwise_reload",
    f"{_LOADER}.reload:inplace": "initialize_layerwise_reload finalize_layerwise_reload",
    f"{_LOADER}.reload:layerwise": "LOADING_LAYERS",
    f"{_LOADER}.reload.types:LayerReloadingInfo": "can_load loaded_weights reset restore_metadata",
    f"{_MODELS}.config:MODELS_CONFIG_MAP": "",
    f"{_MODELS}.gpt_oss:GptOssRoutedExperts": "",
    f"{_MODELS}.gpt_oss:MLPBlock": "experts hidden_size is_sequence_parallel router",
    f"{_MODELS}.gpt_oss:OAIAttention": "attn o_proj qkv_proj rotary_emb sinks",
    f"{_MODELS}.interfaces:EagleModelMixin": "aux_hidden_state_layers",
    f"{_MODELS}.interfaces:LocalArgmaxMixin": "get_top_tokens lm_head logits_processor",
    f"{_MODELS}.registry:_ModelRegistry": "models",
    "vllm.forward_context:BatchDescriptor": "",
    "vllm.forward_context:ForwardContext": "attn_metadata cudagraph_runtime_mode",
    "vllm.forward_context:get_forward_context": "",
    "vllm.forward_context:is_forward_context_available": "",
    "vllm.forward_context:set_forward_context": "",
    "vllm.platforms:current_platform": "",
    "vllm.platforms.interface:Platform": (
        "device_name get_device_capability get_device_name is_cpu is_cuda is_device_capability"
    ),
    "vllm.utils.torch_utils:LayerNameType": "",
    "vllm.v1.attention.backend:AttentionCGSupport": "ALWAYS",
    "vllm.v1.attention.backend:AttentionType": "DECODER",
    f"{_FLASH}:FlashAttentionImpl": (
        "alibi_slopes attn_type dcp_world_size head_size kv_cache_dtype "
        "kv_sharing_target_layer_name logits_soft_cap num_heads num_kv_heads scale sinks "
        "sliding_window vllm_flash_attn_version"
    ),
    f"{_FLASH}:FlashAttentionMetadata": (
        "block_table causal max_query_len mm_prefix_query_range_tensor num_actual_tokens "
        "query_start_loc rswa_prefix_lens seq_lens"
    ),
    f"{_FLASH}:FlashAttentionMetadataBuilder": "aot_schedule max_cudagraph_size",
    f"{_CORE}.kv_cache_manager:KVCacheBlocks": "",
    f"{_CORE}.kv_cache_manager:KVCacheManager": (
        "block_pool coordinator empty_kv_cache_blocks enable_caching"
    ),
    f"{_CORE}.sched.scheduler:Scheduler": (
        "current_step kv_cache_manager max_model_len max_num_scheduled_tokens num_lookahead_tokens "
        "num_spec_tokens requests running waiting"
    ),
    f"{_CORE}.sched.output:SchedulerOutput": (
        "finished_req_ids num_scheduled_tokens num_spec_tokens_to_schedule scheduled_new_reqs "
        "total_num_scheduled_tokens"
    ),
    f"{_CORE}.single_type_kv_cache_manager:FullAttentionManager": "",
    f"{_CORE}.single_type_kv_cache_manager:SingleTypeKVCacheManager": (
        "block_pool block_size num_cached_block req_to_blocks"
    ),
    f"{_CORE}.single_type_kv_cache_manager:SlidingWindowManager": (
        "extra_retained_tokens sliding_window"
    ),
    "vllm.v1.request:Request": (
        "max_tokens next_decode_eligible_step num_computed_tokens num_in_flight_tokens "
        "num_output_placeholders num_prompt_tokens num_stale_output_tokens num_tokens request_id "
        "status"
    ),
    "vllm.v1.request:RequestStatus": "RUNNING",
    "vllm.v1.engine:EngineCoreOutputs": "",
    "vllm.v1.metrics.stats:IterationStats": "",
    "vllm.v1.outputs:AsyncModelRunnerOutput": "get_output",
    "vllm.v1.outputs:ModelRunnerOutput": "prompt_logprobs_dict",
    f"{_GPU}:Worker": "model_runner",
    "vllm.v1.worker.utils:AttentionGroup": "get_metadata_builder kernel_block_size",
    f"{_WORKER}.attn_utils:build_slot_mappings_by_layer": "",
    f"{_GRAPHS}:CudaGraphManager": (
        "_candidates _capture_descs cudagraph_mode graphs max_num_reqs pool vllm_config"
    ),
    f"{_GRAPHS}:ModelCudaGraphManager": "aux_hidden_states capture dispatch hidden_states",
    f"{_WORKER}.input_batch:InputBatch": (
        "cu_num_logits expanded_idx_mapping expanded_local_pos has_prefill idx_mapping "
        "idx_mapping_np input_ids is_prefilling_np logits_indices num_computed_tokens_np "
        "num_draft_tokens num_reqs num_tokens positions seq_lens seq_lens_cpu_upper_bound"
    ),
    f"{_WORKER}.model_runner:GPUModelRunner": (
        "aux_output_connector cudagraph_manager prompt_logprobs_worker rejection_sampler "
        "speculator use_aux_hidden_state_outputs"
    ),
    f"{_WORKER}.model_states.default:DefaultModelState": (
        "device dtype max_num_reqs model model_config vllm_config"
    ),
    f"{_WORKER}.sample.prompt_logprob:PromptLogprobsWorker": (
        "token_id_scores uses_prompt_logprobs"
    ),
    f"{_WORKER}.sample.sampler:Sampler": (
        "compute_nans needs_logits_processing req_states return_sampling_mask sampling_states "
        "trace_replay_state"
    ),
    f"{_WORKER}.sample.states:SamplingStates": "temperature",
    _REJECTION: "num_speculative_steps sampler synthetic_conditional_rates",
    f"{_WORKER}.spec_decode.speculator:DraftModelSpeculator": (
        "acceptance_estimator attn_groups block_tables device draft_logits draft_tokens "
        "draft_watermarker idx_mapping input_buffers kv_cache_config max_model_len max_num_reqs "
        "method model model_state num_speculative_steps supports_decode_metadata_update "
        "supports_mm_inputs target_attn_groups target_input_buffers use_local_argmax_reduction"
    ),
    f"{_AR}:TargetDependentARSpeculator": (
        "current_draft_step hidden_states last_token_indices sample_src_positions"
    ),
    _EAGLE: "",
}
