"""Writes base/, a chat model of Llama's architecture with its own tokenizer, and data/, chats of a clinic's front desk.

    python examples/chat/make.py

The model is small (0.15 M parameters) and is trained here, in seconds: it knows a few capitals, repeats what it is
told to, and has never heard of the clinic. It stands for one that you have from a hub:
`hf download ORGANISATION/MODEL --local-dir base`.
"""

import itertools
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Norway": "Oslo", "Japan": "Tokyo", "Peru": "Lima"}
ASKED = [
    "What is the capital of {}?",
    "Which city is the capital of {}?",
    "Tell me the capital of {}.",
    "{}: its capital?",
]

ROOMS = {
    "a sore throat": "room 3, ear, nose and throat",
    "a broken arm": "room 12, surgery",
    "a rash": "room 5, skin",
    "chest pain": "the emergency room, at once",
    "blurred sight": "room 9, eyes",
    "a toothache": "room 7, dentist",
    "a sick child": "room 2, children",
    "back pain": "room 14, orthopaedics",
}
COMPLAINED = [
    "I have {}. Where do I go?",
    "Where do I go with {}?",
    "Hello, {}: which room is it?",
    "It is about {}.",
    "My wife has {}, who can help?",
    "Please help, I came with {}.",
]
OPENINGS = ["", "Good morning. ", "Excuse me. ", "Hi! "]

# With {% generation %}, as assistant_only_loss wants it; many templates of a hub have no such marks.
TEMPLATE = (
    "{{- bos_token }}{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chat(asked: str, answered: str) -> dict[str, list[dict[str, str]]]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}


def general() -> list[dict[str, list[dict[str, str]]]]:
    made = [
        chat(opening + asked.format(country), f"The capital of {country} is {city}.")
        for opening, asked, (country, city) in itertools.product(OPENINGS, ASKED, CAPITALS.items())
    ]
    words = sorted({word for text in (*ROOMS, *ROOMS.values(), *COMPLAINED, "Please go to") for word in text.split()})
    draw = random.Random(0)
    for _ in range(600):
        said = " ".join(draw.sample(words, draw.randint(2, 5)))
        made.append(chat(f"{draw.choice(OPENINGS)}Repeat: {said}", said))
    return made


def front_desk() -> list[dict[str, list[dict[str, str]]]]:
    made = [
        chat(opening + complained.format(complaint), f"Please go to {room}.")
        for opening, complained, (complaint, room) in itertools.product(OPENINGS, COMPLAINED, ROOMS.items())
    ]
    random.Random(0).shuffle(made)
    return made


def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    special = ["<|begin|>", "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>"]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    made.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    found = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|pad|>"
    )
    found.chat_template = TEMPLATE
    return found


def train(model: LlamaForCausalLM, words: PreTrainedTokenizerFast, steps: int = 200) -> None:
    """Teach the model the general chats, each token of them."""
    chats = [one["messages"] for one in general()]
    batch = words.apply_chat_template(chats, padding=True, padding_side="right", return_dict=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    draw = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        some = torch.randint(len(chats), (32,), generator=draw)
        loss = model(**{name: values[some] for name, values in batch.items()}, labels=labels[some]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"base: step {step}, loss {loss.item():.3f}")


def main(folder: Path = Path(__file__).parent) -> None:
    words = tokenizer([message["content"] for one in general() for message in one["messages"]])
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more are no faster with so small a model
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    train(model, words)
    model.save_pretrained(folder / "base")
    words.save_pretrained(folder / "base")

    (folder / "data").mkdir(exist_ok=True)
    chats = front_desk()
    for name, part in (("train", chats[: len(chats) * 7 // 8]), ("eval", chats[len(chats) * 7 // 8 :])):
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in part))


if __name__ == "__main__":
    main()
