"""Compares an adapter with its base on chats that neither has seen, then merges the two and lets the model answer.

python examples/chat/evaluate.py ADAPTER_FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent


def answer(model, words, question):
    asked = words.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    written = model.generate(**asked, max_new_tokens=40, do_sample=False)
    return words.decode(written[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)


@torch.no_grad()
def loss(model, words, chats):
    """Return the mean loss of what the assistant says."""
    total = count = 0
    for chat in chats:
        made = words.apply_chat_template(chat, return_dict=True, return_tensors="pt", return_assistant_tokens_mask=True)
        labels = made["input_ids"].masked_fill(torch.as_tensor(made["assistant_masks"]) == 0, -100)
        counted = int((labels != -100).sum())
        total += model(input_ids=made["input_ids"], labels=labels).loss.item() * counted
        count += counted
    return total / count


def scores(name, model, words, chats):
    right = sum(answer(model, words, chat[0]["content"]) == chat[1]["content"] for chat in chats)
    held_out = loss(model, words, chats)
    print(f"{name:12s} loss {held_out:6.3f}   {right} of {len(chats)} answers right")
    return held_out, right


def main():
    torch.set_num_threads(1)  # more are no faster with so small a model
    adapter = Path(sys.argv[1])
    words = AutoTokenizer.from_pretrained(HERE / "base")
    chats = [json.loads(line)["messages"] for line in (HERE / "data" / "eval.jsonl").read_text().splitlines()]
    base = AutoModelForCausalLM.from_pretrained(HERE / "base").eval()
    before = scores("base", base, words, chats)
    tuned = PeftModel.from_pretrained(base, adapter).eval()
    after = scores("with adapter", tuned, words, chats)

    merged = tuned.merge_and_unload()
    merged.save_pretrained(adapter.parent / "merged")
    words.save_pretrained(adapter.parent / "merged")
    question = "Hi! I have chest pain. Where do I go?"
    print(f"{question} - {answer(merged, words, question)}")
    if after[0] >= before[0] or after[1] <= before[1]:
        raise SystemExit("the adapter is no better than its base")


if __name__ == "__main__":
    main()
