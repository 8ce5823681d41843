"""What to do about what ssh, or a machine, prints before its connection ends."""

from __future__ import annotations

_PYTHON = "name an interpreter of that machine that has it: glasshouse machine add --python"
_OVER = (
    "the job is over, and nothing runs there any more: submit another; for a run that it had: glasshouse stop --give-up"
)
_HINTS = (
    ("pending execution", "wait until the job runs: squeue"),
    ("batch script is at", "its job has to run what `glasshouse machine slurm` prints, with the same --folder here"),
    ("Invalid job id", _OVER),
    ("has expired", _OVER),
    ("already completing", _OVER),
    ("node configuration is not available", "name a node that the job has: squeue --format='%i %N'"),
    ("srun: command not found", "name the cluster's login node: glasshouse machine list"),
    ("No module named", f"install this version of Glasshouse there, or {_PYTHON}"),
    ("SyntaxError", f"that Python is too old, Glasshouse needs 3.11: {_PYTHON}"),
    ("IDENTIFICATION HAS CHANGED", "the machine has another host key than before: find out why before you go on"),
    ("Host key verification failed", "compare the machine's host key once by hand, with ssh and the same name"),
    ("Permission denied", "log in once by hand with ssh and the same name: the user, or the key, is not accepted"),
    ("cannot be used", "make room there, or name another folder: glasshouse machine add --folder"),
    ("not found", _PYTHON),
    ("No such file or directory", _PYTHON),
    ("Could not resolve hostname", "look at the address: glasshouse machine list"),
    ("Connection refused", "see that sshd runs there, and at this port"),
    ("timed out", "see that the machine is up, and that ssh with the same name reaches it"),
    ("unreachable", "see that this machine has a network, and that ssh with the same name reaches the other"),
)
SILENT = (
    "log in by hand with ssh and the same name; if that hangs too, end a shared connection that is dead: ssh -O exit"
)
ELSE = (
    "see that the machine is up and stays up: log in by hand with ssh and the same name; one that is rented has its "
    "log on the provider's page"
)


def hint_of(printed: str, otherwise: str) -> str:
    """Return what to do about what a command printed before its connection ended."""
    return next((hint for word, hint in _HINTS if word in printed), otherwise)
