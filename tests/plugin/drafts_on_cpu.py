# SPDX-License-Identifier: MIT
"""EAGLE-3 drafts in vLLM's model runner V2 on a CPU: as vLLM makes and verifies them, and ours.

`python drafts_on_cpu.py MODEL HEAD [[SPECULATIVE, PADDED], ...]`. vLLM's own Triton kernels run
under the interpreter. A CPU has no CUDA graphs: what one of ours would replay is run, for PADDED
requests. Prints [{"vllm": [tokens, drafts], "ours": ..., "replays": number}, ...] as the last line.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

PROMPTS = ([9, 10, 11, 12] * 5, list(range(5, 30)), [3])

os.environ |= {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
# it would win over the size that is given below
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)


def interpret_vllm() -> None:
    """Make vLLM believe that Triton runs on this CPU; import nothing of vLLM before."""
    from triton.backends import backends

    driver = SimpleNamespace(is_active=lambda: True)
    backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)
    from tests.interpreter import spare_lookups

    spare_lookups()


class Passes:
    """Stands for the graphs of all passes."""

    def __init__(self, speculator: Any, padded: int) -> None:
        self.speculator, self.padded, self.replays = speculator, padded, 0
        self.batch: Any = None
        self.first: Any = None

    def dispatch(self, requests: int, tokens: int, queries: int, loras: int) -> Any:
        from vllm.config.compilation import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

        assert tokens == requests * queries and loras == 0
        return BatchExecutionDescriptor(
            CUDAGraphMode.FULL, self.padded * queries, self.padded, queries
        )

    def run_fullgraph(self, desc: Any) -> None:
        self.replays += 1
        self.speculator._run_passes(desc.num_reqs, desc.num_tokens, self.first, (None, None))

    def later_passes(self, requests: int, *_: Any) -> None:
        """vLLM's passes that plan their attention one by one, as a CPU must."""
        from vllm.config.compilation import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

        desc = BatchExecutionDescriptor(CUDAGraphMode.NONE, requests, requests)
        lengths = self.batch.seq_lens_cpu_upper_bound
        lengths = lengths.new_zeros(requests).index_put_(
            (lengths.new_tensor(range(len(lengths))).long(),), lengths
        )
        drafts = self.speculator.num_speculative_steps
        self.speculator._multi_step_decode(requests, False, desc, None, lengths, drafts)


def use_ours(runner: Any, padded: int) -> Passes:
    """Verify and draft as plugin/rejection.py and draft_graphs.py do."""
    import torch

    from oss_fused.plugin.draft_graphs import OssEagleSpeculator
    from oss_fused.plugin.drafts import pick_from_own_vocabulary
    from oss_fused.plugin.model_state import OssModelState
    from oss_fused.plugin.rejection import OssRejectionSampler, shorten_verification

    OssModelState.custom_sampler(runner.model_state, runner.sampler)
    shorten_verification(runner)
    assert type(runner.rejection_sampler) is OssRejectionSampler
    speculator = runner.speculator
    pick_from_own_vocabulary(speculator)
    assert speculator.use_local_argmax_reduction
    speculator.__class__ = OssEagleSpeculator
    speculator.rejected = torch.zeros(speculator.max_num_reqs, dtype=torch.int32)
    passes = speculator.passes = Passes(speculator, padded)
    speculator._generate_fused_drafts = passes.later_passes
    propose = speculator.propose

    def proposed(
        batch: Any, metadata: Any, slots: Any, hidden: Any, seen: Any, *rest: Any, **o: Any
    ) -> Any:
        passes.batch, passes.first = batch, (metadata, slots)
        # a graph leaves hidden states where they were, with padding behind the step's
        tokens = len(seen[0])
        room = max(tokens, padded * (1 + speculator.num_speculative_steps))
        seen = [torch.cat([x, x.new_zeros(room - tokens, x.shape[1])]) for x in seen]
        speculator.target_graphs = SimpleNamespace(aux_hidden_states=seen)
        return propose(batch, metadata, slots, hidden, [x[:tokens] for x in seen], *rest, **o)

    speculator.propose = proposed
    return passes


def answers(model: str, head: str, options: dict[str, Any], padded: int) -> dict[str, Any]:
    """Ask a new engine twice, first vLLM's way."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    drafts = {"method": "eagle3", "model": head, "num_speculative_tokens": 3}
    llm = LLM(
        model, quantization="oss_fp8", enforce_eager=True, max_model_len=128, max_num_seqs=4,
        enable_prefix_caching=False, seed=0, speculative_config=drafts | options,
        kv_cache_memory_bytes=2**26,
    )  # fmt: skip
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    noted: list[Any] = []
    keep = runner.draft_tokens_handler.set_draft_tokens

    def note(batch: Any, tokens: Any) -> None:
        noted.append(tokens.tolist())
        keep(batch, tokens)

    runner.draft_tokens_handler.set_draft_tokens = note

    def ask() -> list[Any]:
        noted.clear()
        sampling = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, seed=5)
        prompts = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        return [[list(answer.outputs[0].token_ids) for answer in answers], list(noted)]

    first = ask()
    passes = use_ours(runner, padded)
    found = {"vllm": first, "ours": ask(), "replays": passes.replays}
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    return found


def main() -> None:
    interpret_vllm()
    model, head, runs = sys.argv[1:]
    print(json.dumps([answers(model, head, *each) for each in json.loads(runs)]))


if __name__ == "__main__":
    main()
