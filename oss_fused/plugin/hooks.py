# SPDX-License-Identifier: MIT
"""What this package calls, replaces and overrides of vLLM; hooks_read.py has what it reads.

compat.py compares the lists of both files with the installed vLLM. CONTRIBUTING.md says how to take
a new release in. A path is ``package.module:Class.member``,
spelled as this package imports it.
"""

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
_PARAMETER = "vllm.model_executor.parameter"
_REJECTION = f"{_WORKER}.spec_decode.rejection_sampler:RejectionSampler"
_GRAPHS = f"{_WORKER}.cudagraph_utils"
_EAGLE = f"{_WORKER}.spec_decode.eagle.speculator:EagleSpeculator"
_AR = f"{_WORKER}.spec_decode.target_dependent_ar.speculator"
_OSS = "oss_fused.layers.vllm"
_COMMUNICATORS = "vllm.distributed.device_communicators"
_CUSTOM = f"{_COMMUNICATORS}.custom_all_reduce:CustomAllreduce"
_AUTHENTICATION = "vllm.entrypoints.serve.middleware.authenticate:AuthenticationMiddleware"

# what vLLM's engine gives a scheduler class, and make_scheduler passes on
_SCHEDULER = (
    "vllm_config=0, kv_cache_config=0, structured_output_manager=0, block_size=0, "
    "hash_block_size=0, include_finished_set=0, log_stats=0"
)

# function, method or class -> the arguments with which we call it
CALLED = {
    "vllm.config:get_current_vllm_config": "",
    "vllm.config:set_current_vllm_config": "vllm_config",
    "vllm.distributed:get_tensor_model_parallel_rank": "",
    "vllm.distributed:get_tensor_model_parallel_world_size": "",
    f"{_COMMUNICATORS}.cuda_wrapper:CudaRTLibrary": "",
    f"{_COMMUNICATORS}.cuda_wrapper:CudaRTLibrary.cudaMemset": "pointer, value, bytes",
    f"{_CUSTOM}.create_shared_buffer": "size, group=0",
    f"{_CUSTOM}.free_shared_buffer": "pointers, rank=0",
    f"{_COMMUNICATORS}.pynccl_wrapper:NCCLLibrary": "",
    "vllm.distributed.parallel_state:get_pp_group": "",
    "vllm.distributed.parallel_state:get_tp_group": "",
    "vllm.distributed.parallel_state:model_parallel_is_initialized": "",
    _AUTHENTICATION: "app, tokens",
    f"{_AUTHENTICATION}.verify_token": "headers",
    "vllm.logger:init_logger": "name",
    "vllm.vllm_flash_attn:flash_attn_varlen_func": (
        "q=0, k=0, v=0, out=0, cu_seqlens_q=0, max_seqlen_q=0, cu_seqlens_k=0, max_seqlen_k=0, "
        "softmax_scale=0, causal=0, window_size=0, fa_version=0, s_aux=0"
    ),
    f"{_LAYERS}.attention.attention:get_attention_context": "layer_name",
    f"{_LAYERS}.attention.attention:unified_attention_with_output": "q, k, v, output, layer_name",
    f"{_LAYERS}.fusion.quant_activation:QuantizedActivation": (
        "data=0, scale=0, orig_dtype=0, orig_shape=0, quant_key=0"
    ),
    f"{_LAYERS}.fusion.quant_activation:get_input_quant_key": "layer",
    f"{_LAYERS}.linear:register_weight_loader_v2_supported_method": "cls",
    f"{_MOE}:FusedMoEMethodBase": "moe",
    f"{_MOE}:RoutedExperts._expert_routing_tables": "",
    f"{_MOE}:RoutedExperts._map_global_expert_id_to_local_expert_id": "expert",
    f"{_MOE}.all2all_utils:maybe_make_prepare_finalize": (
        "moe=0, quant_config=0, routing_tables=0, allow_new_interface=0, use_monolithic=0"
    ),
    f"{_MOE}.config:fp8_w8a8_moe_quant_config": (
        "w1_scale=0, w2_scale=0, w1_bias=0, w2_bias=0, per_act_token_quant=0, per_out_ch_quant=0"
    ),
    f"{_MOE}.experts.triton_moe:TritonExperts": "moe_config=0, quant_config=0",
    f"{_MOE}.modular_kernel:FusedMoEKernel": "prepare_finalize, experts",
    f"{_MOE}.modular_kernel:FusedMoEKernel.apply": (
        "hidden_states=0, w1=0, w2=0, topk_weights=0, topk_ids=0, activation=0, "
        "apply_router_weight_on_input=0, global_num_experts=0, expert_map=0, shared_experts=0, "
        "shared_experts_input=0"
    ),
    f"{_MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod": "moe",
    f"{_LAYERS}.logits_processor:LogitsProcessor._apply_head": "head, hidden_states, bias",
    f"{_QUANT}:register_quantization_config": "name",
    f"{_QUANT}.kv_cache:BaseKVCacheMethod": "quant_config",
    f"{_QUANT}.kv_cache:KVCacheScaleParameter": "",
    f"{_QUANT}.mxfp4:GptOssMxfp4MoEMethod": "moe",
    f"{_LAYERS}.vocab_parallel_embedding:ParallelLMHead": "vocab, hidden, quant_config=0, prefix=0",
    f"{_LOADER}.reload.layerwise:_get_original_loader": "tensor",
    f"{_LOADER}.reload.layerwise:get_layerwise_info": "layer",
    f"{_LOADER}.reload.utils:get_layer_tensors": "layer",
    f"{_LOADER}.weight_utils:default_weight_loader": "param, weight",
    f"{_LOADER}.weight_utils:remap_moe_expert_weights": "weights, params",
    f"{_MODELS}.config:VerifyAndUpdateConfig.verify_and_update_config": "vllm_config",
    f"{_MODELS}.gpt_oss:GptOssForCausalLM": "vllm_config=0, prefix=0",
    f"{_MODELS}.gpt_oss:GptOssForCausalLM.load_weights": "weights",
    f"{_MODELS}.gpt_oss:GptOssModel._try_load_streamed_expert": "name, weight, params, loaded",
    f"{_MODELS}.interfaces:EagleModelMixin._maybe_add_hidden_state": (
        "aux_hidden_states, layer_idx, hidden_states, residual"
    ),
    f"{_MODELS}.llama:LlamaForCausalLM": "vllm_config=0, prefix=0",
    f"{_MODELS}.mistral:MistralForCausalLM": "vllm_config=0, prefix=0",
    f"{_MODELS}.qwen2:Qwen2ForCausalLM": "vllm_config=0, prefix=0",
    f"{_MODELS}.qwen3:Qwen3ForCausalLM": "vllm_config=0, prefix=0",
    f"{_MODELS}.registry:_ModelRegistry.register_model": "architecture, model_class",
    f"{_MODELS}.utils:is_pp_missing_parameter": "name, model",
    f"{_PARAMETER}:ChannelQuantScaleParameter": "data=0, output_dim=0, weight_loader=0",
    f"{_PARAMETER}:ModelWeightParameter": "data=0, input_dim=0, output_dim=0, weight_loader=0",
    f"{_PARAMETER}:PerTensorScaleParameter": "data=0, weight_loader=0",
    "vllm.model_executor.utils:replace_parameter": "layer, name, tensor",
    "vllm.model_executor.utils:set_weight_attrs": "weight, attributes",
    "vllm.transformers_utils.repo_utils:get_hf_file_to_dict": "file_name, model, revision",
    "vllm.transformers_utils.config:get_config": "model, trust_remote_code=0, revision=0",
    "vllm.utils.import_utils:resolve_obj_by_qualname": "name",
    "vllm.utils.torch_utils:_encode_layer_name": "name",
    "vllm.utils.torch_utils:_resolve_layer_name": "name",
    "vllm.utils.torch_utils:direct_register_custom_op": (
        "name, function, mutates_args=0, fake_impl=0, target_lib=0"
    ),
    f"{_CORE}.kv_cache_manager:KVCacheManager.allocate_slots": (
        "request, num_new_tokens, num_lookahead_tokens=0"
    ),
    f"{_CORE}.kv_cache_manager:KVCacheManager.cache_blocks": "request, num_computed_tokens",
    f"{_CORE}.sched.async_scheduler:AsyncScheduler": _SCHEDULER,
    f"{_CORE}.sched.scheduler:Scheduler": _SCHEDULER,
    f"{_CORE}.sched.output:NewRequestData": (
        "req_id=0, prompt_token_ids=0, mm_features=0, sampling_params=0, pooling_params=0, "
        "block_ids=0, num_computed_tokens=0, lora_request=0, prefill_token_ids=0"
    ),
    f"{_CORE}.sched.output:SchedulerOutput.make_empty": "",
    "vllm.v1.kv_cache_interface:is_quantized_kv_cache": "kv_cache_dtype",
    f"{_GPU}:Worker.execute_model": "scheduler_output",
    f"{_GPU}:Worker.sample_tokens": "grammar_output",
    f"{_WORKER}.attn_utils:get_attn_cg_support": "attn_groups, vllm_config",
    f"{_GRAPHS}:BatchExecutionDescriptor": (
        "cg_mode=0, num_tokens=0, num_reqs=0, uniform_token_count=0, num_active_loras=0, "
        "num_ubatches=0"
    ),
    f"{_GRAPHS}:CudaGraphManager": "config, device, mode, decode_query_len",
    f"{_GRAPHS}:CudaGraphManager.capture": "create_forward_fn, progress_bar_desc",
    f"{_GRAPHS}:CudaGraphManager.dispatch": "reqs, tokens, uniform_token_count, loras",
    f"{_GRAPHS}:CudaGraphManager.run_fullgraph": "desc",
    f"{_GRAPHS}:prepare_inputs_to_capture": (
        "reqs, tokens, model_state, buffers, block_tables, attn_groups, kv_cache_config, "
        "full_cudagraph=0, max_query_len=0"
    ),
    f"{_AR}:TargetDependentARSpeculator._generate_fused_drafts": (
        "reqs, tokens, attn_metadata, slots, tokens_across_dp, mode, num_speculative_steps"
    ),
    f"{_AR}:TargetDependentARSpeculator._prefill": (
        "reqs, tokens, attn_metadata, slots, tokens_across_dp"
    ),
    f"{_AR}:prepare_decode_inputs": (
        "draft_tokens, seq_lens, num_rejected, buffers, sample_src_positions, max_model_len, reqs"
    ),
    f"{_AR}:prepare_prefill_inputs": (
        "last_token_indices, current_draft_step, buffers, input_batch, num_sampled, "
        "num_rejected, last_sampled, next_prefill_tokens, max_num_reqs"
    ),
    f"{_WORKER}.sample.output:SamplerOutput": (
        "sampled_token_ids=0, logprobs_tensors=0, num_nans=0, num_sampled=0, num_rejected=0"
    ),
    f"{_WORKER}.sample.sampler:Sampler.get_logprobs_dims": "idx_mapping_np",
    f"{_WORKER}.sample.sampler:Sampler.sample": (
        "logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, input_ids, "
        "expanded_local_pos, seq_lens"
    ),
}

_PLUGIN = "oss_fused.plugin"
_METHOD = "process_weights_after_loading"

# class of vLLM, class of ours in its place -> the methods of ours, which must take its arguments
OVERRIDDEN = {
    (_CUSTOM, f"{_OSS}.all_reduce:OssAllReduce"): "close custom_all_reduce should_custom_ar",
    (f"{_MOE}:FusedMoEMethodBase", f"{_OSS}.experts.fp8:OssFp8MoEMethod"): (
        f"apply apply_monolithic create_weights get_fused_moe_quant_config is_monolithic {_METHOD}"
    ),
    (f"{_MOE}:FusedMoEMethodBase", f"{_OSS}.experts.mxfp4:OssMxfp4MoEMethod"): (
        "apply_monolithic create_weights get_fused_moe_quant_config is_monolithic "
        f"maybe_roundup_sizes {_METHOD}"
    ),
    (
        f"{_MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        f"{_OSS}.experts.choice:VllmBf16MoEMethod",
    ): f"create_weights {_METHOD}",
    (
        f"{_MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        f"{_OSS}.unquantized:OssUnquantizedMoEMethod",
    ): f"create_weights {_METHOD}",
    (
        f"{_QUANT}.mxfp4:GptOssMxfp4MoEMethod",
        f"{_OSS}.experts.choice:VllmMxfp4MoEMethod",
    ): f"create_weights {_METHOD}",
    (f"{_LAYERS}.linear:LinearMethodBase", f"{_OSS}.linear:OssFp8LinearMethod"): (
        f"apply create_weights tie_weights {_METHOD}"
    ),
    (
        f"{_LAYERS}.linear:UnquantizedLinearMethod",
        f"{_OSS}.unquantized:OssUnquantizedLinearMethod",
    ): f"create_weights {_METHOD}",
    (
        f"{_LAYERS}.vocab_parallel_embedding:UnquantizedEmbeddingMethod",
        f"{_OSS}.unquantized:OssUnquantizedEmbeddingMethod",
    ): "create_weights",
    (f"{_QUANT}.base_config:QuantizationConfig", f"{_PLUGIN}.config:OssFp8Config"): (
        "from_config get_config_filenames get_min_capability get_name get_quant_method "
        "get_supported_act_dtypes maybe_update_config override_quantization_method"
    ),
    (f"{_QUANT}.base_config:QuantizeMethodBase", f"{_PLUGIN}.models:_BeforeLayers"): (
        f"apply create_weights {_METHOD}"
    ),
    (f"{_QUANT}.kv_cache:BaseKVCacheMethod", f"{_OSS}.kv_cache:OssFp8KVCacheMethod"): (
        f"create_weights {_METHOD}"
    ),
    (f"{_FLASH}:FlashAttentionImpl", f"{_OSS}.attention:OssAttentionImpl"): f"forward {_METHOD}",
    (f"{_MODELS}.gpt_oss:GptOssForCausalLM", f"{_PLUGIN}.models:OssGptOssForCausalLM"): (
        "compute_logits load_weights"
    ),
    (f"{_MODELS}.gpt_oss:GptOssModel", f"{_PLUGIN}.models:OssGptOssModel"): "load_weights",
    (f"{_MODELS}.interfaces:EagleModelMixin", f"{_PLUGIN}.models:OssGptOssModel"): (
        "_maybe_add_hidden_state"
    ),
    (f"{_MODELS}.gpt_oss:OAIAttention", f"{_OSS}.rope_attention:OssOAIAttention"): "forward",
    (f"{_MODELS}.gpt_oss:TransformerBlock", f"{_OSS}.decoder:OssTransformerBlock"): "forward",
    (f"{_MODELS}.llama:LlamaAttention", f"{_OSS}.rope_attention:OssLlamaAttention"): "forward",
    (f"{_MODELS}.llama:LlamaDecoderLayer", f"{_OSS}.decoder:OssLlamaDecoderLayer"): "forward",
    (f"{_MODELS}.llama:LlamaForCausalLM", f"{_PLUGIN}.models:OssLlamaForCausalLM"): (
        "compute_logits load_weights"
    ),
    (f"{_MODELS}.mistral:MistralAttention", f"{_OSS}.rope_attention:OssMistralAttention"): (
        "forward"
    ),
    (f"{_MODELS}.mistral:MistralDecoderLayer", f"{_OSS}.decoder:OssMistralDecoderLayer"): "forward",
    (f"{_MODELS}.mistral:MistralForCausalLM", f"{_PLUGIN}.models:OssMistralForCausalLM"): (
        "compute_logits load_weights"
    ),
    (f"{_MODELS}.qwen2:Qwen2Attention", f"{_OSS}.rope_attention:OssQwen2Attention"): "forward",
    (f"{_MODELS}.qwen2:Qwen2DecoderLayer", f"{_OSS}.decoder:OssQwen2DecoderLayer"): "forward",
    (f"{_MODELS}.qwen2:Qwen2ForCausalLM", f"{_PLUGIN}.models:OssQwen2ForCausalLM"): (
        "compute_logits load_weights"
    ),
    (f"{_MODELS}.qwen3:Qwen3Attention", f"{_OSS}.rope_attention:OssQwen3Attention"): "forward",
    (f"{_MODELS}.qwen3:Qwen3DecoderLayer", f"{_OSS}.decoder:OssQwen3DecoderLayer"): "forward",
    (f"{_MODELS}.qwen3:Qwen3ForCausalLM", f"{_PLUGIN}.models:OssQwen3ForCausalLM"): (
        "compute_logits load_weights"
    ),
    (f"{_MODELS}.registry:_LazyRegisteredModel", f"{_PLUGIN}.model_entry:ModelEntry"): (
        "inspect_model_cls"
    ),
    (_AUTHENTICATION, f"{_PLUGIN}.api_key:KeyForAllPaths"): "__call__",
    (
        f"{_CORE}.kv_cache_manager:KVCacheManager",
        f"{_PLUGIN}.scheduler:StepKVCacheManager",
    ): "allocate_slots cache_blocks",
    (
        f"{_WORKER}.model_states.default:DefaultModelState",
        f"{_PLUGIN}.model_state:OssModelState",
    ): "capture_inner_cudagraphs custom_sampler prepare_attn",
    (f"{_WORKER}.sample.sampler:Sampler", f"{_PLUGIN}.model_state:OssSampler"): "__call__",
    (_REJECTION, f"{_PLUGIN}.rejection:OssRejectionSampler"): "__call__",
    (_EAGLE, f"{_PLUGIN}.draft_graphs:OssEagleSpeculator"): "capture propose",
    (
        f"{_CORE}.sched.async_scheduler:AsyncScheduler",
        f"{_PLUGIN}.burst:BurstScheduler",
    ): "_free_request _update_after_schedule add_request schedule update_from_output",
    (f"{_WORKER}.model_runner:GPUModelRunner", f"{_PLUGIN}.burst_runner:BurstRunner"): (
        "execute_model initialize_kv_cache prepare_attn prepare_inputs sample sample_tokens"
    ),
    (f"{_GPU}:Worker", f"{_PLUGIN}.burst_runner:BurstWorker"): "_make_model_runner",
}

# function that we replace, and the function that runs in its place: it gets the original first
REPLACED = {
    f"{_LOADER}.reload.layerwise:initialize_layerwise_reload": f"{_OSS}.reload:_initialize",
    f"{_LOADER}.reload.layerwise:finalize_layerwise_reload": f"{_OSS}.reload:_finalize",
    f"{_LOADER}.reload.layerwise:materialize_layer": f"{_OSS}.reload:_materialize",
    f"{_LOADER}.utils:record_metadata_for_reloading": f"{_OSS}.reload:_record",
    "vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model": (
        f"{_PLUGIN}.self_check:_warm_up"
    ),
    f"{_GPU}:Worker.compile_or_warm_up_model": f"{_PLUGIN}.self_check:_warm_up",
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.reset_weight_update_target": (
        f"{_OSS}.reload:_reset_target"
    ),
}
