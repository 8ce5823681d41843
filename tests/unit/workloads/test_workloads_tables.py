"""Records in tables: Parquet, and what `datasets` saved, are read as the same records in JSON lines are."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, GlasshouseError, RunError, UsageError
from glasshouse.workloads.lora import data_forms
from glasshouse.workloads.lora.data_forms import Record, data_files, read_records
from glasshouse.workloads.registry import examine, load, parse
from tools.plain_files import Packed

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CALL = [*CHAT[:1], {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"mg": 5}}]}]
JOB = {"model": "config:qwen2-tiny", "data": "t.parquet"}


def parquet(table: Any, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table if isinstance(table, pa.Table) else pa.Table.from_pylist(table), sink, **options)
    return sink.getvalue()


def stream(rows: list[dict[str, Any]]) -> bytes:
    """Return rows as `datasets` saves them."""
    sink, table = io.BytesIO(), pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue()


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def read(files: dict[str, bytes], data: str) -> list[tuple[str, Record]]:
    return list(read_records(lambda name: io.BytesIO(files[name]), files, data))


def refused(table: Any) -> UsageError:
    with pytest.raises(UsageError) as found:
        read({"t.parquet": table if isinstance(table, bytes) else parquet(table)}, "t.parquet")
    assert found.value.code is Code.JOB_INVALID
    return found.value


@pytest.mark.parametrize(
    "rows",
    [
        [{"messages": CHAT}, {"messages": CALL, "tools": [{"name": "f"}]}, {"messages": CHAT[:1]}],
        [{"prompt": CHAT[:1], "completion": CHAT[1:]}],
        [{"prompt": "a", "completion": "é \u2028"}, {"prompt": "", "completion": "b"}],
        [{"text": "a"}] * 600,
        [{"instruction": "a", "output": "b"}, {"instruction": "a", "input": "c", "output": "b"}],
        [{"messages": CHAT, "chat_template_kwargs": {"x": 1}}, {"messages": CHAT, "source": "ward"}],
    ],
)
def test_tables_give_the_records_that_json_lines_give(rows: list[dict[str, Any]]) -> None:
    """Whatever a table fills up with nulls."""
    expected = [record for _, record in read({"t": lines(rows)}, "t")]
    keys = {key: None for row in rows for key in row}
    rows = [keys | row for row in rows]
    for name, data in {
        "t.parquet": parquet(rows),
        "u.parquet": parquet(rows, row_group_size=2, compression="zstd", use_dictionary=False),
        "t.arrow": stream(rows),
    }.items():
        found = read({name: data}, name)
        assert [record for _, record in found] == expected
        assert [where for where, _ in found] == [f"{name} row {number}" for number in range(1, len(rows) + 1)]


def test_what_a_table_holds_as_json_keeps_its_nulls() -> None:
    """As `datasets` writes what has different members from record to record."""
    calls = [{"name": "f", "arguments": {"mg": None}}, {"name": "g", "arguments": {"by": "mouth"}}]
    message = CALL[1] | {"tool_calls": calls}
    chats = pa.array([[json.dumps(one) for one in (CHAT[0], message)]], pa.list_(pa.string()))
    table = pa.table({"messages": chats.cast(pa.list_(pa.json_()))})
    [(_, record)] = read({"t.parquet": parquet(table)}, "t.parquet")
    assert record == Record(None, [CHAT[0], message])


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([{"text": "a"}, {"text": None}], "t.parquet row 2 has no 'text', only: nothing"),
        ([{"text": 3}], "t.parquet row 1: text must be a text"),
        ([{"messages": CHAT}, {"messages": []}], "t.parquet row 2: messages must be a text, or a list of messages"),
        ([{"messages": CHAT, "images": None}], "t.parquet row 1 has 'images': only text is trained on"),
        ([{"question": "a", "answer": "b"}], "t.parquet row 1 has none of the forms of a record, only: answer, quest"),
        ([{"messages": [{"role": "user", "content": b"a"}]}], "t.parquet: the column 'messages' holds binary: only"),
        (pa.table({"text": pa.array([0], pa.timestamp("us"))}), "t.parquet: the column 'text' holds timestamp[us]"),
        (pa.table({"text": pa.array([1], pa.decimal128(3))}), "t.parquet: the column 'text' holds decimal128(3, 0)"),
        (pa.table({"text": pa.array([], pa.string())}), "t.parquet has no usable record: it is empty"),
        (b"", "t.parquet cannot be read behind its row 0: "),
        (b"PAR1" + bytes(100) + b"PAR1", "t.parquet cannot be read behind its row 0: "),
    ],
)
def test_a_row_that_is_no_record_is_refused_with_the_place(table: Any, words: str) -> None:
    assert words in refused(table).message


def test_a_file_that_is_damaged_further_on_is_refused_and_not_cut() -> None:
    data = bytearray(parquet([{"text": "a" * 1000 + str(number)} for number in range(2000)], row_group_size=1000))
    data[len(data) * 3 // 4 : len(data) * 3 // 4 + 200] = bytes(200)
    assert "cannot be read behind its row 768: Corrupt" in refused(bytes(data)).message
    whole = stream([{"text": str(number)} for number in range(9)])
    with pytest.raises(UsageError, match=r"t\.arrow cannot be read behind its row [1-9]"):
        read({"t.arrow": whole[:-200]}, "t.arrow")


def test_what_the_package_has_to_say_of_its_own_file_is_said() -> None:
    """A chunk that does not open is no mistake of the owner's job."""

    class Tampered(io.BytesIO):
        def read(self, _size: int | None = -1) -> bytes:
            raise GlasshouseError(Code.PACKAGE_TAMPERED, "chunk 3 does not open")

    with pytest.raises(GlasshouseError, match="chunk 3 does not open"):
        list(read_records(lambda _: Tampered(bytes(9000)), ["t.parquet"], "t.parquet"))


PARTS = ["a/train-00000-of-00002.parquet", "a/train-00001-of-00002.parquet"]
ONE = ["c/train/data-00000-of-00001.arrow"]
SAVED = ["b/data-00000-of-00002.arrow", "b/data-00001-of-00002.arrow"]


@pytest.mark.parametrize(
    ("names", "data", "chosen"),
    [
        (PARTS, "a", PARTS),
        ([*PARTS, "a/test-00000-of-00001.parquet"], "a/train", PARTS),
        ([*SAVED, "b/state.json", "b/dataset_info.json", "b/cache-1f.arrow"], "b/", SAVED),
        (
            ["c/dataset_dict.json", "c/train/data-00000-of-00001.arrow"],
            "c/train",
            ["c/train/data-00000-of-00001.arrow"],
        ),
        (["d/0000.parquet", "d/0001.parquet", "d/README.md"], "d", ["d/0000.parquet", "d/0001.parquet"]),
        (["e/train.jsonl"], "e", ["e/train.jsonl"]),
        (["records"], "records", ["records"]),
    ],
)
def test_a_folder_stands_for_its_parts_in_order(names: list[str], data: str, chosen: list[str]) -> None:
    assert data_files(reversed(names), data) == chosen


@pytest.mark.parametrize(
    ("names", "data", "words", "hint"),
    [
        (PARTS[:1], "a", "'a' has 1 of its 2 parts", ""),
        ([*PARTS, "a/test.parquet"], "a", "more than one set of records: a/test.parquet, a/train.parquet", "'a/test'"),
        (["a/train.jsonl", "a/train.parquet"], "a", "more than one set of records", "'a/train"),
        (ONE, "c", "names the records 'c', a folder of several", "of its folders: c/train"),
        (["a.jsonl"], "train.jsonl", "'train.jsonl', which are not among the [inputs]: a.jsonl", ""),
    ],
)
def test_a_folder_that_does_not_say_what_to_train_on_is_refused(
    names: list[str], data: str, words: str, hint: str
) -> None:
    with pytest.raises(UsageError) as found:
        data_files(names, data)
    assert words in found.value.message
    assert hint in found.value.hint


def test_parts_are_one_input_of_one_form() -> None:
    good = {PARTS[0]: parquet([{"text": "a"}]), PARTS[1]: parquet([{"text": "b"}, {"text": "c"}])}
    assert [where for where, _ in read(good, "a")] == [f"{PARTS[0]} row 1", f"{PARTS[1]} row 1", f"{PARTS[1]} row 2"]
    with pytest.raises(UsageError, match="row 1 has no 'text', only: completion, prompt"):
        read(good | {PARTS[1]: parquet([{"prompt": "a", "completion": "b"}])}, "a")


def test_a_large_file_is_read_with_little_memory() -> None:
    """Of a hundred mebibytes in one group of rows, a small part is in memory at a time."""
    table = pa.table({"text": [chr(97 + number % 26) * (1 << 20) for number in range(100)]})
    data = parquet(table, use_dictionary=False, compression="zstd", write_batch_size=4)
    del table
    before = pa.total_allocated_bytes()
    found = read_records(lambda _: io.BytesIO(data), ["t.parquet"], "t.parquet")
    taken = [pa.total_allocated_bytes() - before for _ in found]
    assert len(taken) == 100
    assert max(taken) < 64 << 20


def test_where_pyarrow_is_missing_sealing_says_so_and_a_run_ends_with_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_forms, "_PYARROW", "no-such-dist>=1")
    files = {"t.parquet": Packed(parquet([{"text": "a"}]))}
    assert examine("lora", parse("lora", JOB), files) == [
        "the records of t.parquet were not read: no-such-dist>=1 is not installed"
    ]
    with pytest.raises(RunError, match=r"lacks what t\.parquet is read with: no-such-dist>=1") as ended:
        read({"t.parquet": b""}, "t.parquet")
    assert ended.value.code is Code.REQUIREMENT_MISSING
    assert "JSON, one object a line" in ended.value.hint


def test_a_job_requires_pyarrow_where_it_has_tables() -> None:
    requirements: Callable[..., Any] = load("lora").requirements
    assert [*requirements(parse("lora", JOB), ["t.parquet"])] == ["pyarrow>=19"]
    assert requirements(parse("lora", JOB | {"data": "t.jsonl"}), ["t.jsonl"]) == {}
    assert [*requirements(parse("lora", JOB | {"data": "b"}), SAVED)] == ["pyarrow>=19"]


def test_json_lines_are_read_without_pyarrow_and_tables_without_pandas(tmp_path: Path) -> None:
    code = (
        "import io, sys; sys.modules['pandas'] = sys.modules['datasets'] = None\n"
        "from glasshouse.workloads.lora.data_forms import read_records\n"
        "for name in ('t.jsonl', 't.parquet', 't.arrow'):\n"
        "    print(len(list(read_records(lambda name: open(name, 'rb'), [name], name))), 'pyarrow' in sys.modules)"
    )
    for name, data in {
        "t.jsonl": lines([{"text": "a"}]),
        "t.parquet": parquet([{"text": "a"}]),
        "t.arrow": stream([{"text": "a"}]),
    }.items():
        (tmp_path / name).write_bytes(data)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["1 False", "1 True", "1 True"]
