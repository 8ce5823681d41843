"""A checkpoint laid out again where its files were, before the job begins.

Law: nothing of it is used unless all of it is whole. Source: spec/checkpoints.md section 7.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

from glasshouse.errors import Code, PackageError
from glasshouse.package.checkpoints.part_content import PartFile, PartReader
from glasshouse.package.grant import Resume
from glasshouse.package.streams import Positioned
from glasshouse.task.checkpoints import MARKER, Restored
from glasshouse.task.inputs import write_file


def restore(resume: Resume, source: int, folder: Path) -> dict[int, Restored]:
    """Lay a checkpoint out where its files were, and return it as each rank sees it, by the rank's number in the job.

    Args:
        source: descriptor of the file with the parts of this machine's ranks.
        folder: the job's.

    Raises:
        PackageError: `checkpoint-tampered`; nothing of it may be used then.
        PlatformError: `out-of-memory`.
    """
    files: set[str] = set()
    saved: dict[int, list[str]] = {}
    with os.fdopen(source, "rb", buffering=0) as stream:
        for part in resume.parts:
            reader = PartReader(Positioned(stream), part)
            for name, file in reader.files.items():
                if name == MARKER:
                    data = bytearray(file.bytes)
                    reader.read_into(file, 0, data)
                    saved[part.rank] = _paths(data)
                    continue
                if name in files:
                    raise _tampered(f"{name!r} is in two parts")
                files.add(name)
                write_file(folder / name, file.bytes, partial(_read, reader, file))
            # The files' chunks were opened as they were laid out.
            reader.verify(max((file.offset + file.bytes for file in reader.files.values()), default=0))
            reader.close()
            if part.rank not in saved:
                raise _tampered("a part does not say what it is of")
    return {
        rank: Restored(step=resume.step, path=folder / paths[0] if paths else None, files=frozenset(files))
        for rank, paths in saved.items()
    }


def _read(reader: PartReader, file: PartFile, view: memoryview, offset: int) -> None:
    reader.read_into(file, offset, view)


def _paths(data: bytearray) -> list[str]:
    try:
        found = json.loads(data)["paths"]
    except (ValueError, TypeError, KeyError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(path, str) for path in found):
        raise _tampered("a part does not say what it is of")
    return found


def _tampered(why: str) -> PackageError:
    return PackageError(Code.CHECKPOINT_TAMPERED, f"a checkpoint that cannot be restored: {why}")
