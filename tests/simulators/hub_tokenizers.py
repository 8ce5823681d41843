"""Tokenizers as models on a hub have them, trained here: how each begins and ends a text, and writes a chat."""

from __future__ import annotations

from typing import Any

__all__ = ["KINDS", "TEXT", "tokenizer"]

TEXT = """\
The ward opens at seven. Is Müller's blood pressure 120 over 80? Yes: 12.5 mg in the morning, 5 mg at night.
def dose(weight): return weight * 0.2  # mg
user assistant system model What comes after 4711? It is 4712, and then 4713, as everyone knows.
Übergabe um 19:30 Uhr, Zimmer 12 – bitte läuten. ¿Cuántas pastillas? 三片。
"""

_LLAMA = """\
{{- bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>

{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim }}<|eot_id|>{% endgeneration %}\
{% else %}{{ message['content'] | trim }}<|eot_id|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

# Ends a prompt with an empty thought that a whole chat does not have; writes tools; and has no markers.
_QWEN = """\
{% if tools or ward %}<|im_start|>system
{{ ward }} Tools: {{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

_GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}\
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}<start_of_turn>{{ role }}
{% if role == 'model' %}{% generation %}{{ message['content'] | trim }}<end_of_turn>
{% endgeneration %}{% else %}{{ message['content'] | trim }}<end_of_turn>
{% endif %}{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

KINDS = ("llama", "qwen", "gemma", "gpt2")


def tokenizer(kind: str) -> Any:
    """Return a tokenizer of transformers: one of `KINDS`, of which `gpt2` has neither a template nor padding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = {
        "llama": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|pad|>"},
        "qwen": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        "gemma": {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"},
        "gpt2": {"eos_token": "<|endoftext|>"},
    }[kind]
    marks = {
        "llama": ["<|start_header_id|>", "<|end_header_id|>"],
        "qwen": ["<|im_start|>"],
        "gemma": ["<start_of_turn>", "<end_of_turn>"],
        "gpt2": [],
    }[kind]
    named = [*special.values(), *marks]
    made = Tokenizer(models.BPE(unk_token=special.get("unk_token"), byte_fallback=kind == "gemma"))
    if kind == "gemma":
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*named, *alphabet], show_progress=False)
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=named,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    made.train_from_iterator([TEXT], trainer)
    if bos := special.get("bos_token"):
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, made.token_to_id(bos))]
        )
    found = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    found.chat_template = {"llama": _LLAMA, "qwen": _QWEN, "gemma": _GEMMA, "gpt2": None}[kind]
    return found
