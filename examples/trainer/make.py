"""Writes base/, a small BERT with random weights and a tokenizer, and data/, 400 letters to a clinic.

    python examples/trainer/make.py

base/ stands for the folder of a model that you have from a hub: `hf download ORGANISATION/MODEL --local-dir base`.
"""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

LABELS = ["appointment", "prescription", "bill"]
ASKED = {
    "appointment": ["may I come on {day}", "please move my visit to {day}", "is the doctor there on {day}"],
    "prescription": ["I need {drug} again", "my {drug} is used up", "how much {drug} may my {who} take"],
    "bill": ["the amount of {day} is wrong", "who pays for the {drug} of my {who}", "I was charged twice on {day}"],
}
WORDS = {
    "day": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"],
    "drug": ["insulin", "ibuprofen", "aspirin", "iron"],
    "who": ["son", "daughter", "mother", "father"],
}
OPENINGS = ["Dear doctor,", "Good morning,", "Hello,", "A question:", ""]
CLOSINGS = ["Thank you!", "Kind regards", "My {who} says hello.", "I was there on {day}.", ""]


def letters(count: int, seed: int) -> list[dict[str, str]]:
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        label = draw.choice(LABELS)
        text = " ".join([draw.choice(OPENINGS), draw.choice(ASKED[label]) + ".", draw.choice(CLOSINGS)]).strip()
        made.append(
            {"text": text.format(**{name: draw.choice(words) for name, words in WORDS.items()}), "label": label}
        )
    return made


def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    )
    made.post_processor = processors.BertProcessing(
        ("[SEP]", made.token_to_id("[SEP]")), ("[CLS]", made.token_to_id("[CLS]"))
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def main(folder: Path = Path(__file__).parent) -> None:
    (folder / "data").mkdir(exist_ok=True)
    for name, count, seed in (("train", 320, 1), ("eval", 80, 2)):
        lines = [json.dumps(letter) + "\n" for letter in letters(count, seed)]
        (folder / "data" / f"{name}.jsonl").write_text("".join(lines))

    words = tokenizer([letter["text"] for letter in letters(320, 1)])
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        id2label=dict(enumerate(LABELS)),
        label2id={label: number for number, label in enumerate(LABELS)},
    )
    BertForSequenceClassification(config).save_pretrained(folder / "base")
    words.save_pretrained(folder / "base")


if __name__ == "__main__":
    main()
