"""Lines of code are counted as a reader counts them, and imports followed as Python follows them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from benchmarks.trusted import TIERS, closure, code_lines
from glasshouse.runtime.roots.collectors import CLASSES

SOURCE = '''"""A module.

Of several lines.
"""

import os  # a comment

# another

class One:
    """A class."""

    text = """counts
    as two"""

    def method(self):
        "Short."
        return os.name
'''


def test_blank_lines_comments_and_docstrings_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(SOURCE)
    assert code_lines(tmp_path / "one.py") == 6


def test_imports_are_followed_into_functions_and_not_to_what_type_checkers_see() -> None:
    custodian, agent, worker = (closure(tier.roots) for tier in TIERS)
    assert {"glasshouse", "glasshouse.wire", "glasshouse.wire.crypto", "glasshouse.custodian.hold"} <= custodian
    assert "glasshouse.runtime.gate.relay" in agent
    assert not any(name.startswith(("glasshouse.workloads", "glasshouse.collectives")) for name in custodian | agent)
    assert "glasshouse.custodian.hold" not in agent | worker


def test_what_collects_hardware_evidence_counts_though_it_is_imported_by_name_and_what_appraises_it_does_not() -> None:
    agent = closure(TIERS[1].roots)
    there = {name for name in CLASSES if find_spec(f"glasshouse.runtime.roots.{name.replace('-', '_')}")}
    assert {f"glasshouse.runtime.roots.{name.replace('-', '_')}" for name in there} <= agent
    assert "glasshouse.attestation.roots.root_table" not in agent
    assert not any(name.endswith("_evidence") for name in agent)
