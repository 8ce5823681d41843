"""A script that would write a pickle is known before its training is paid for; nothing of it is run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasshouse.workloads.builtin.script_files import pickle_hints


@pytest.mark.parametrize(
    ("source", "called"),
    [
        ("import torch\ntorch.save(m.state_dict(), 'outputs/m.pt')", "torch.save"),
        ("import torch as t\nt.save(m, p)", "torch.save"),
        ("from torch import save as keep\nkeep(m, p)", "torch.save"),
        ("import torch.nn\ntorch.save(m, p)", "torch.save"),
        ("import pickle\nwith open('a', 'wb') as f: pickle.dump(m, f)", "pickle.dump"),
        ("from pickle import Pickler\nPickler(f).dump(m)", "pickle.Pickler"),
        ("import joblib\nclass A:\n    def f(self):\n        joblib.dump(self, 'a')", "joblib.dump"),
        ("frame.to_pickle('a')", "to_pickle"),
        ("from transformers import Trainer\nTrainer(model=m).train()", "transformers.Trainer"),
    ],
)
def test_each_way_to_write_a_pickle_is_found_with_its_line(source: str, called: str) -> None:
    line = next(number for number, text in enumerate(source.splitlines(), 1) if "import" not in text and "(" in text)
    expected = source.splitlines()[line - 1 :]
    line += next(offset for offset, text in enumerate(expected) if called.rpartition(".")[2] in text or "keep" in text)
    hints = pickle_hints({"train.py": source})
    assert len(hints) == 1
    assert hints[0].startswith(f"train.py line {line}: {called} writes ")


@pytest.mark.parametrize(
    "source",
    [
        "from safetensors.torch import save_file\nsave_file(m, 'a')",
        "torch.save(m, 'a')",  # some other name: the module is not imported
        "import pickle\npickle.load(f)",
        "import json\njson.dump(m, f)",
        "from .pickle import dump\ndump(m)",
        "# import torch; torch.save(1)\n'torch.save(m)'",
        "def",
        b"\xff\xfe",
        "\x00",
        "(" * 5000,
    ],
)
def test_what_writes_none_or_is_no_python_gives_no_hint(source: str | bytes) -> None:
    assert pickle_hints({"train.py": source}) == []


def test_every_python_file_is_read_in_order_and_nothing_else() -> None:
    saves = "import torch\n\ntorch.save(1, 'a'); torch.save(2, 'b')\n'\\d'\ntorch.save(3, 'c')"
    files = {"z.py": saves.encode(), "lib/a.py": "import dill\ndill.dump(1, f)", "notes.txt": saves, "data.pt": b"\x80"}
    assert pickle_hints(files) == [
        "lib/a.py line 2: dill.dump writes a pickle",
        "z.py line 3: torch.save writes a pickle",
        "z.py line 5: torch.save writes a pickle",
    ]


def test_nothing_is_run() -> None:
    assert pickle_hints({"a.py": "raise SystemExit('run')\nimport torch\ntorch.save(1, 'x')"}) != []


@given(st.binary(max_size=200) | st.text(max_size=200))
def test_no_source_crashes_it(source: bytes | str) -> None:
    assert isinstance(pickle_hints({"a.py": source}), list)
