"""The table of assurance levels: the kinds of hardware evidence that complete them.

Lists and texts elsewhere follow from it. Nothing here appraises: `root_table` does, at the gate and where receipts are
verified. Source: spec/hardware-evidence.md.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from glasshouse.attestation.roots.kinds import KINDS, NVIDIA
from glasshouse.wire.policy import Assurance

_PROCESSORS = frozenset({"azure", "dstack", "sev-snp", "tdx"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """A level of assurance, as a rule of completeness."""

    assurance: Assurance  # its name
    one_of: frozenset[str] = frozenset()  # exactly one of these kinds
    beside: frozenset[str] = frozenset()  # and all of these
    stands: str  # what stands behind the evidence, and what a host can still do
    proves: str  # what a verified receipt shows to whom

    def complete(self, kinds: Collection[str]) -> bool:
        """Return whether these kinds are exactly what the level wants, each once."""
        found = set(kinds)
        return (
            len(found) == len(kinds)
            and len(found & self.one_of) == bool(self.one_of)
            and (found - self.one_of == self.beside)
        )


LEVELS = {
    level.assurance: level
    for level in (
        Level(
            assurance=Assurance.SOFTWARE,
            stands="measurements signed in the runtime; a host with root could read the run's memory and forge them",
            proves="To its owner it shows what the runtime said, unchanged since the broker countersigned it; to "
            "others it is the owner's word: at this level an owner can sign a run that never happened.",
        ),
        Level(
            assurance=Assurance.TPM,
            one_of=frozenset({"gcp", "tpm"}),
            stands="a TPM quote over boot chain and runtime, or of the kind gcp Google's word alone; a host with root "
            "could read the run's memory",
            proves="To its owner it shows that a machine whose TPM the policy trusts booted what the policy lists and "
            "ran this; the host could have read the run's memory. To others it is the owner's word: that the key "
            "lies in that TPM is the word of the gate, which is the owner's.",
        ),
        Level(
            assurance=Assurance.CPU_TEE,
            one_of=_PROCESSORS,
            stands="a CPU report binds the runtime; what crosses to the GPU is visible to the host",
            proves="It shows to everyone who trusts the CPU's maker, and what the owner's policy lists, that this ran "
            "in a confidential machine of that list; what crossed to a GPU was visible to the host.",
        ),
        Level(
            assurance=Assurance.GPU_TEE,
            one_of=_PROCESSORS,
            beside=frozenset({NVIDIA}),
            stands="CPU and GPU reports bind the runtime; physical attacks remain",
            proves="It shows to everyone who trusts the makers of CPU and GPU, and what the owner's policy lists, that "
            "this ran in a confidential machine of that list with confidential GPUs. That these GPUs are in this "
            "machine is the word of measured code.",
        ),
    )
}


def level_of(kinds: Collection[str]) -> Assurance | None:
    """Return the level that exactly these kinds complete, None where there is none."""
    return next((level.assurance for level in LEVELS.values() if level.complete(kinds)), None)


def proves_of(assurance: Assurance, kinds: Collection[str]) -> str:
    """Return what a verified receipt at a level shows to whom, where these kinds of evidence completed it."""
    return next((KINDS[kind].proves for kind in words_among(kinds)), LEVELS[assurance].proves)


def words_among(kinds: Collection[str]) -> list[str]:
    """Return which of these, kinds or not, are somebody's word: weaker than what else completes their level."""
    return [kind for kind in kinds if kind in KINDS and KINDS[kind].word]
