# SPDX-License-Identifier: MIT
"""A byte-level BPE tokenizer built from nothing, for random models on machines without a hub.

Its vocabulary is the 256 bytes, then a space with one, two and three lower-case letters while there
is room. Random token ids therefore decode to text that encodes to the same ids, apart from stray
bytes, which is what `vllm bench serve --dataset-name random` needs for prompts of exact length.
"""

from __future__ import annotations

import itertools
import string
from pathlib import Path

# one header, one end-of-turn and one end-of-text token per family, as the real tokenizers have
SPECIALS: dict[str, list[str]] = {
    "gpt-oss": [
        *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|start|>", "<|message|>"),
        *("<|end|>", "<|channel|>", "<|call|>"),
    ],
    "llama": [
        *("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>"),
        "<|end_header_id|>",
    ],
    "qwen": ["<|endoftext|>", "<|im_end|>", "<|im_start|>"],
}
TEMPLATES: dict[str, str] = {
    "gpt-oss": "{% for m in messages %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    "llama": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}"
    "<|end_header_id|>\n\n{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "qwen": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}


def vocabulary(size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Tokens with ids, and merges, of at most ``size`` tokens (256 bytes at least)."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = sorted(ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    for length in (1, 2, 3):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            if len(tokens) >= size:
                break
            word = "Ġ" + "".join(letters)  # Ġ stands for the space
            tokens.append(word)
            merges.append((word[:-1], word[-1]))
    return {token: number for number, token in enumerate(tokens)}, merges


def save_tokenizer(folder: Path, family: str, vocab_size: int, max_length: int) -> dict[str, int]:
    """Write tokenizer files for ``family`` (a key of SPECIALS) that AutoTokenizer and vLLM load.

    Args:
        folder: the checkpoint folder.
        family: decides the special tokens and the chat template.
        vocab_size: the model's vocabulary; the tokenizer never exceeds it.
        max_length: the model's context length.

    Returns:
        The ids of "bos", "pad" and "eos" (end of turn).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = SPECIALS[family]
    vocab, merges = vocabulary(vocab_size - len(specials))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    bos, pad = specials[0], specials[1] if family != "qwen" else specials[0]
    eos = specials[1] if family == "qwen" else specials[2]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATES[family],
    )
    fast.save_pretrained(folder)
    names = {"bos": bos, "pad": pad, "eos": eos}
    return {role: int(fast.convert_tokens_to_ids(text)) for role, text in names.items()}
