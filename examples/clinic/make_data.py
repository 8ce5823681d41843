"""Writes data/ from the Wisconsin breast-cancer records that scikit-learn ships: 569 patients, 30 measurements each.

    python examples/clinic/make_data.py

The same files come out every time; they are part of the repository, so the example needs no scikit-learn.
"""

import csv
import json
from pathlib import Path

from sklearn.datasets import load_breast_cancer

# A few of the thirty measurements, for the text; all of them go into the table.
SHOWN = {
    "radius": "mean radius",
    "texture": "mean texture",
    "concavity": "mean concavity",
    "worst perimeter": "worst perimeter",
}


def main(folder: Path = Path(__file__).parent / "data") -> None:
    """Write the table and the instruction file into `folder`."""
    folder.mkdir(exist_ok=True)
    records = load_breast_cancer()
    names = [str(name) for name in records.feature_names]
    labels = [str(records.target_names[label]) for label in records.target]
    patients = [[float(value) for value in row] for row in records.data]

    with (folder / "patients.csv").open("w", newline="") as out:
        table = csv.writer(out, lineterminator="\n")
        table.writerow([name.replace(" ", "_") for name in names] + ["diagnosis"])
        table.writerows(
            [*(f"{value:.4g}" for value in row), label] for row, label in zip(patients, labels, strict=True)
        )

    with (folder / "train.jsonl").open("w") as out:
        for row, label in zip(patients, labels, strict=True):
            measured = dict(zip(names, row, strict=True))
            record = {
                "instruction": "Classify the tumour.",
                "input": ", ".join(f"{short} {measured[name]:.3g}" for short, name in SHOWN.items()),
                "output": label,
            }
            out.write(json.dumps(record, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
