"""Rows of a table as the objects that a file of JSON lines would have: Parquet, and Arrow streams as `datasets` saves.

Laws: a file is read in batches from the stream that is given, and nothing is written; pyarrow is all that is imported,
and this module only where there is a table to read.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any, BinaryIO

from pyarrow import ArrowException, BaseExtensionType, JsonType, ipc, types
from pyarrow.parquet import ParquetFile

from glasshouse.workloads.job_keys import job_invalid

# At a time: rows as objects, and what of a file is in memory for them, beside one page of each column.
_ROWS = 256
_BATCH_BYTES = 16 << 20
_READ_BYTES = 1 << 20


def rows(stream: BinaryIO, name: str, columns: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the object of each row, and where it stands, such as ``train.parquet row 3``.

    A table has every column in every row, and every member in each object of a column: null where a record had none.
    So null is absent here, but for the content of a message, which is null where a tool is called. What a table holds
    as JSON keeps its nulls. Other columns are not read: an object has their names, and None.

    Raises:
        UsageError: `job-invalid` for a file that cannot be read, or a column that is neither text nor of JSON's types.
    """
    number = 0
    try:
        schema, batches = _opened(stream, name, columns)
        kinds = {field.name: field.type for field in schema if field.name in columns}
        for column, kind in kinds.items():
            if (bad := _not_json(kind)) is not None:
                raise job_invalid(f"{name}: the column {column!r} holds {bad}: only text is trained on")
        others = dict.fromkeys(set(schema.names) - kinds.keys())
        if not kinds:
            yield f"{name} row 1", others
        for batch in batches:
            for start in range(0, batch.num_rows, _ROWS):
                for row in batch.select([*kinds]).slice(start, _ROWS).to_pylist():
                    number += 1
                    values = {key: _value(value, kinds[key]) for key, value in row.items() if value is not None}
                    yield f"{name} row {number}", others | values
    except (ArrowException, OSError, ValueError, RecursionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise job_invalid(f"{name} cannot be read behind its row {number}: {reason}") from None


def _opened(stream: BinaryIO, name: str, columns: Collection[str]) -> tuple[Any, Iterator[Any]]:
    """Return a table's schema and its batches, with these columns at least."""
    if not name.endswith(".parquet"):
        reader = ipc.open_stream(stream)
        return reader.schema, reader
    # A column's pages as they are needed: by default, a whole group of rows is in memory, compressed.
    file = ParquetFile(stream, pre_buffer=False, buffer_size=_READ_BYTES)
    schema = file.schema_arrow
    read = [column for column in schema.names if column in columns]
    groups = (file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups))
    count = _BATCH_BYTES * file.metadata.num_rows // max(1, sum(groups))
    batches = file.iter_batches(max(1, min(_ROWS, count)), columns=read, use_threads=False)
    return schema, batches if read else iter(())


def _not_json(kind: Any) -> Any:
    """Return the type within a type that no JSON has, None where there is none."""
    if isinstance(kind, BaseExtensionType):
        return None if isinstance(kind, JsonType) else kind
    if types.is_struct(kind):
        return next((bad for field in kind if (bad := _not_json(field.type)) is not None), None)
    if types.is_dictionary(kind) or _is_list(kind):
        return _not_json(kind.value_type)
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    plain = is_text or types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return None if plain or types.is_null(kind) else kind


def _is_list(kind: Any) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _value(value: Any, kind: Any) -> Any:
    if value is None:
        return None
    if isinstance(kind, BaseExtensionType):
        return json.loads(value)
    if _is_list(kind):
        return [_value(item, kind.value_type) for item in value]
    if types.is_struct(kind):
        members = ((field.name, _value(value[field.name], field.type)) for field in kind)
        return {key: member for key, member in members if member is not None or key == "content"}
    return value
