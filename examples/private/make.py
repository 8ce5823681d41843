"""Writes data/: what 2,000 patients answered (ten questions, 0 to 10 each) and whether they came again; and 500 others.

python examples/private/make.py
"""

import csv
import random
from pathlib import Path

QUESTIONS = [f"question_{number}" for number in range(1, 11)]
WEIGHTS = (0.9, -0.7, 0.5, 0.0, -0.4, 0.0, 0.8, -0.6, 0.0, 0.3)


def write(path: Path, count: int, seed: int) -> None:
    draw = random.Random(seed)
    with path.open("w", newline="") as out:
        table = csv.writer(out, lineterminator="\n")
        table.writerow([*QUESTIONS, "came_again"])
        for _ in range(count):
            answers = [draw.randint(0, 10) for _ in QUESTIONS]
            leaning = sum(weight * (answer - 5) for weight, answer in zip(WEIGHTS, answers, strict=True))
            table.writerow([*answers, int(leaning + draw.gauss(0, 1) > 0)])


def main(folder: Path = Path(__file__).parent / "data") -> None:
    folder.mkdir(exist_ok=True)
    write(folder / "patients.csv", 2000, seed=1)
    write(folder / "others.csv", 500, seed=2)


if __name__ == "__main__":
    main()
