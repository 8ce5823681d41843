"""What never enters a package: our private keys, and the folders in which they and the runs are kept.

Laws: a key is recognised by its content, under any name, through a hard link, or copied into another text; a folder by
what lies in it, and the keys of rentals by where they lie. What cannot be read counts as a key. A key inside a
compressed or encrypted file is not found (docs/security/threat-model.md).
"""

from __future__ import annotations

import base64
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from pathspec import GitIgnoreSpec
from pathspec.patterns.gitignore import GitIgnorePatternError

from glasshouse.errors import Code, UsageError
from glasshouse.providers.rental.known import PROVIDERS
from glasshouse.wire import own_state

_PEM_LABELS = (b"BEGIN PRIVATE KEY", b"BEGIN EC PRIVATE KEY", b"BEGIN ENCRYPTED PRIVATE KEY")
# Line ends as another text may write them, and what it puts before each line.
_NOT_BASE64 = re.compile(rb"\\+[nrt]|[^A-Za-z0-9+/=]")
ALWAYS_LEFT_OUT = (".git", ".venv/", "venv/", "__pycache__/", "node_modules/", ".ipynb_checkpoints/")
"""Left out of every folder input, unless the job takes one back (`!.git`) or names it as an input itself."""
_USUAL = GitIgnoreSpec.from_lines(ALWAYS_LEFT_OUT)


def key_kind(data: bytes) -> str | None:
    """Return the kind of private key of ours in a file's first `own_state.LOOKED_AT_BYTES`; None without one."""
    if kind := own_state.key_kind(data):
        return kind
    if b"PRIVATE KEY-----" not in data:
        return None
    parts = data.split(b"-----")
    blocks = zip(parts, parts[1:], parts[2:], strict=False)
    return next(filter(None, (_pem_kind(*block) for block in blocks)), None)


def is_state(folder: Path) -> bool:
    """Return whether a folder keeps our state: a project's `.glasshouse`, a home, or what is left of one."""
    if folder.name == own_state.PROJECT or holds_keys(folder):
        return True
    records = [run / "run.json" for run in _below(folder / "runs")]
    return any(own_state.is_run_record(str(path)) and path.is_file() for path in records)


def holds_keys(folder: Path) -> bool:
    """Return whether a folder is a state home with keys in it."""
    ours = [folder / "owner.key", *(path for inner in own_state.KEY_FOLDERS for path in _below(folder / inner))]
    # Of accounts and of rented machines by their place: the former are mere text, the latter OpenSSH's.
    others = [folder / "accounts" / provider for provider in PROVIDERS]
    others += [rental / "key" for rental in _below(folder / "rentals") if os.path.lexists(rental / "rental.json")]
    return any(map(_is_key, ours)) or any(map(os.path.lexists, others))


def _is_key(path: Path) -> bool:
    try:
        # Not blocking: a pipe in this place would wait for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    with os.fdopen(descriptor, "rb") as file:
        return stat.S_ISREG(os.fstat(descriptor).st_mode) and key_kind(file.read(own_state.LOOKED_AT_BYTES)) is not None


def _below(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _pem_kind(begin: bytes, body: bytes, end: bytes) -> str | None:
    """Return which of our kinds a PEM key is; None for another's, and for what is none."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, mlkem, x25519
    from cryptography.hazmat.primitives.serialization import load_der_private_key

    if begin not in _PEM_LABELS or end != begin.replace(b"BEGIN", b"END"):
        return None
    if b"Proc-Type" in body:
        return "an encrypted private key"
    try:
        key = load_der_private_key(base64.b64decode(_NOT_BASE64.sub(b"", body), validate=True), None)
    except TypeError:  # it wants a passphrase: which key it is cannot be seen
        return "an encrypted private key"
    except (ValueError, UnsupportedAlgorithm):
        return None
    match key:
        case ed25519.Ed25519PrivateKey():
            return "an Ed25519 private key"
        case mlkem.MLKEM768PrivateKey() | x25519.X25519PrivateKey():
            return "a private key to unseal with"
        case ec.EllipticCurvePrivateKey() if isinstance(key.curve, ec.SECP256R1):
            return "a P-256 private key"
    return None


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
        """Return whether the job leaves out a path, a folder's with a slash at its end; None without a pattern."""
        return self._patterns.check_file(path).include

    @staticmethod
    def usual(path: str) -> bool:
        """Return whether a path, from the input's own folder, is left out where the job has no pattern for it."""
        return _USUAL.check_file(path).include is True
