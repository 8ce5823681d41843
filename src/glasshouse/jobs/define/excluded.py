"""What of a folder input is not packed: what no training needs, and what the job excludes, in gitignore's patterns."""

from __future__ import annotations

from collections.abc import Sequence

from pathspec import GitIgnoreSpec
from pathspec.patterns.gitignore import GitIgnorePatternError

from glasshouse.errors import Code, UsageError

ALWAYS_LEFT_OUT = (".git", ".venv/", "venv/", "__pycache__/", "node_modules/", ".ipynb_checkpoints/")
"""Left out of every folder input, unless the job takes one back (`!.git`) or names it as an input itself."""

_USUAL = GitIgnoreSpec.from_lines(ALWAYS_LEFT_OUT)


class Excluded:
    """A job's patterns, as in a `.gitignore` beside the job file; raises `UsageError` (`job-invalid`)."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        for pattern in patterns:
            try:
                GitIgnoreSpec.from_lines([pattern])
            except GitIgnorePatternError:
                raise UsageError(
                    Code.JOB_INVALID, f"package.exclude in the job file: {pattern!r} is no gitignore pattern"
                ) from None
        self._patterns = GitIgnoreSpec.from_lines(patterns)

    def asked(self, path: str) -> bool | None:
        """Return whether the job leaves a path out (True), takes it back (False) or has no pattern for it (None).

        The path is from the job file's folder; a folder's ends with a slash.
        """
        return self._patterns.check_file(path).include

    @staticmethod
    def usual(path: str) -> bool:
        """Return whether a path, from the input's own folder, is left out where the job has no pattern for it."""
        return _USUAL.check_file(path).include is True
