"""Fine-tunes a packed model to sort letters, with transformers.Trainer, as on any machine: `python train.py`.

It knows nothing of Glasshouse. What it saves to outputs/ comes back sealed; no file there is a pickle.
"""

import json
from pathlib import Path

from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)


def examples(path, tokenizer, label2id):
    letters = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [{**tokenizer(one["text"]), "label": label2id[one["label"]]} for one in letters]


def accuracy(predicted):
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def main():
    tokenizer = AutoTokenizer.from_pretrained("base")
    model = AutoModelForSequenceClassification.from_pretrained("base")
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir="scratch",  # checkpoints of Trainer hold pickles (optimizer.pt, training_args.bin): not outputs/
            save_strategy="no",
            num_train_epochs=6,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=80,
            learning_rate=5e-3,
            warmup_steps=5,
            logging_steps=10,
            eval_strategy="epoch",
            report_to="none",
            seed=0,
        ),
        train_dataset=examples("data/train.jsonl", tokenizer, model.config.label2id),
        eval_dataset=examples("data/eval.jsonl", tokenizer, model.config.label2id),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
    )
    trainer.train()
    metrics = trainer.evaluate()
    print(f"accuracy {metrics['eval_accuracy']:.3f} on {len(trainer.eval_dataset)} letters that it has not seen")

    # Not trainer.save_model, which also writes training_args.bin, a pickle.
    trainer.model.save_pretrained("outputs/model")
    tokenizer.save_pretrained("outputs/model")
    Path("outputs/metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")


if __name__ == "__main__":
    main()
