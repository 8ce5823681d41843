"""Prints what a job costs in privacy, by Opacus's accountant: it follows from the options, and needs no data.

pip install opacus
python examples/private/epsilon.py
"""

import sys
import tomllib
from pathlib import Path

from opacus.accountants import RDPAccountant

DELTA = 1e-5  # far below one in the number of patients


def epsilon(arguments: list[str]) -> float:
    """Return epsilon for DELTA, where neighbours differ by one patient more or less."""
    given = dict(zip(arguments[::2], map(float, arguments[1::2]), strict=True))
    accountant = RDPAccountant()
    accountant.history = [(given["--noise"], given["--batch"] / given["--records"], int(given["--steps"]))]
    return float(accountant.get_epsilon(delta=DELTA))


def main() -> None:
    job = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "job.toml"
    arguments = tomllib.loads(job.read_text())["params"]["arguments"]
    print(f"epsilon {epsilon(arguments):.2f} at delta {DELTA:g}")


if __name__ == "__main__":
    main()
