# SPDX-License-Identifier: MIT
"""A byte-level BPE tokenizer built from nothing, for random models on machines without a hub.

Its vocabulary is the 256 bytes, then a space with one to four lower-case letters until the model's
vocabulary is full. Random token ids therefore decode to text that encodes to the same ids, apart
from stray bytes, which is what `vllm bench serve --dataset-name random` needs for prompts of exact
length, and every token that a random model samples is a piece of text, as with a real one.
"""

from __future__ import annotations

import itertools
import string
from pathlib import Path

# start of text, padding and end of turn come first: see save_tokenizer
SPECIALS: dict[str, list[str]] = {
    "gpt-oss": [
        *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>"),
        *("<|start|>", "<|end|>", "<|message|>", "<|call|>"),
    ],
    "llama": [
        *("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>"),
        "<|end_header_id|>",
    ],
    "qwen": ["<|startoftext|>", "<|endoftext|>", "<|im_end|>", "<|im_start|>"],
}
# ids of gpt-oss's special tokens in its own vocabulary, which vLLM's chat endpoint relies on
_HARMONY_VOCAB = 201088
_HARMONY_FIRST = 199998
_HARMONY_IDS = (199998, 199999, 200002, 200003, 200005, 200006, 200007, 200008, 200012)
TEMPLATES: dict[str, str] = {
    "gpt-oss": "{% for m in messages %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    "llama": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}"
    "<|end_header_id|>\n\n{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "qwen": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}


def special_tokens(family: str, vocab_size: int) -> list[str]:
    """Special tokens of ``family``, which take the last ids of a vocabulary of ``vocab_size``."""
    if family != "gpt-oss" or vocab_size != _HARMONY_VOCAB:
        return SPECIALS[family]
    named = dict(zip(_HARMONY_IDS, SPECIALS[family]))
    ids = range(_HARMONY_FIRST, _HARMONY_VOCAB)
    return [named.get(number, f"<|reserved_{number}|>") for number in ids]


def vocabulary(size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Tokens with ids, and merges, of at most ``size`` tokens (256 bytes at least)."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = sorted(ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    for length in (1, 2, 3, 4):
        words = itertools.product(string.ascii_lowercase, repeat=length)
        for letters in itertools.islice(words, size - len(tokens)):
            word = "Ġ" + "".join(letters)  # Ġ stands for the space
            tokens.append(word)
            merges.append((word[:-1], word[-1]))
    return {token: number for number, token in enumerate(tokens)}, merges


def save_tokenizer(folder: Path, family: str, vocab_size: int, max_length: int) -> dict[str, int]:
    """Write tokenizer files for ``family`` (a key of SPECIALS) that AutoTokenizer and vLLM load.

    Args:
        folder: the checkpoint folder.
        family: decides the special tokens and the chat template.
        vocab_size: the model's vocabulary; the tokenizer fills it.
        max_length: the model's context length.

    Returns:
        The ids of "bos", "pad" and "eos" (end of turn).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = special_tokens(family, vocab_size)
    vocab, merges = vocabulary(vocab_size - len(specials))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    bos, pad, eos = SPECIALS[family][:3]
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
