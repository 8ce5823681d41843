"""Published figures that ours stand beside, with where they are from; none of them was measured here."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

__all__ = ["PUBLISHED", "SOURCE", "TESTBED", "Published"]

SOURCE = "Lee et al., Characterization of GPU TEE Overheads in Distributed Data Parallel ML Training, arXiv:2501.11771"
TESTBED = "four GPUs in TEEs, ring all-reduce that encrypts and authenticates every hop; as reported by the authors"


@dataclass(frozen=True, slots=True)
class Published:
    """One published figure.

    Args:
        what: it says.
        shown: the figure as its source writes it.
        times: iteration time as a multiple of the unprotected one; None where the source says it in another way.
        testbed: where it was measured.
        source: who says so.
    """

    _: KW_ONLY
    what: str
    shown: str
    times: float | None
    testbed: str
    source: str


PUBLISHED = (
    Published(what="average over the models", shown="8.68×", times=8.68, testbed=TESTBED, source=SOURCE),
    Published(what="GPT-2 XL, the largest", shown="41.6×", times=41.6, testbed=TESTBED, source=SOURCE),
    Published(what="GPT-2 XL with larger buckets", shown="3.03×", times=3.03, testbed=TESTBED, source=SOURCE),
    Published(
        what="training on real confidential machines",
        shown="11 to 32 % loss",
        times=None,
        testbed="machines with eight GPUs in confidential mode",
        source="reported for such machines",
    ),
)
