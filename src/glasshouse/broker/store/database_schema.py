"""The broker's tables.

What must happen at most once is a unique constraint or a conditional update, never a read followed by
a write: so that the same rules hold between threads, between broker processes and on other databases.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
)

__all__ = [
    "SCHEMA_VERSION",
    "audit",
    "broker",
    "challenges",
    "delegations",
    "deployments",
    "groups",
    "launches",
    "live",
    "members",
    "metadata",
    "own_audit",
    "owners",
    "packages",
    "releases",
    "spent",
    "stopped",
    "stored",
]

SCHEMA_VERSION = 1
_ID = String(32)

metadata = MetaData()

broker = Table(
    "broker",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),  # always 1: there is one
    Column("version", Integer, nullable=False),
    Column("public", LargeBinary(32), nullable=False),
    Column("wrapped_seed", LargeBinary, nullable=False),
)

delegations = Table(
    "delegations",
    metadata,
    Column("owner", LargeBinary(32), primary_key=True),
    Column("envelope", LargeBinary, nullable=False),
    Column("not_before_us", BigInteger, nullable=False),
    Column("not_after_us", BigInteger, nullable=False),
)

packages = Table(
    "packages",
    metadata,
    Column("package_id", _ID, primary_key=True),
    Column("owner", LargeBinary(32), nullable=False),
    Column("manifest_sha256", LargeBinary(32), nullable=False),
    Column("envelope", LargeBinary, nullable=False),
    Column("wrapped_key", LargeBinary, nullable=False),
    Column("revoked_us", BigInteger),
)

# Tables of their own, here too: a database from before is one of a broker that no owner calls over the network.
owners = Table(
    "owners",
    metadata,
    Column("owner", LargeBinary(32), primary_key=True),
    Column("serial_us", BigInteger, nullable=False),  # of the last request that was taken
)

# Packages of which no head is countersigned any more.
stopped = Table(
    "stopped",
    metadata,
    Column("package_id", _ID, ForeignKey("packages.package_id"), primary_key=True),
    Column("stopped_us", BigInteger, nullable=False),
)

deployments = Table(
    "deployments",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("package_id", _ID, ForeignKey("packages.package_id"), nullable=False),
    Column("policy", LargeBinary, nullable=False),  # of an owner over the network, as they signed it
    Column("releases", Integer, nullable=False, default=0),
    Column("decisions", BigInteger, nullable=False, default=0),
    Column("created_us", BigInteger, nullable=False),
)

# Deployments of enrolled owners whose policies are not over, and what each owner made on the last day: see `quota`.
live = Table(
    "live",
    metadata,
    Column("deployment", _ID, ForeignKey("deployments.id"), primary_key=True),
    Column("owner", LargeBinary(32), nullable=False, index=True),
    Column("not_after_us", BigInteger, nullable=False),
)
spent = Table(
    "spent",
    metadata,
    Column("owner", LargeBinary(32), primary_key=True),
    Column("what", String(16), primary_key=True),
    Column("day", BigInteger, nullable=False),
    Column("made", BigInteger, nullable=False),
)

launches = Table(
    "launches",
    metadata,
    Column("jti", _ID, primary_key=True),
    Column("run_id", _ID, nullable=False, unique=True),
    Column("deployment", _ID, ForeignKey("deployments.id"), nullable=False),
    Column("container_id", String(128), nullable=False),
    Column("container_source", String(16), nullable=False),
    Column("launch_public", LargeBinary(32), nullable=False),
    Column("expires_us", BigInteger, nullable=False),
    Column("created_us", BigInteger, nullable=False),
)

# Groups have tables of their own, so that a database from before there were any is one without groups.
groups = Table(
    "groups",
    metadata,
    Column("id", LargeBinary(32), primary_key=True),
    Column("deployment", _ID, ForeignKey("deployments.id"), nullable=False),
    Column("machines", Integer, nullable=False),
    Column("ranks", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("deadline_us", BigInteger),
    Column("culprit", Integer),
    Column("code", String(64)),
    Column("created_us", BigInteger, nullable=False),
    Column("decided_us", BigInteger),
    Index("groups_open", "state", "deadline_us"),
)

# A launch that is one machine of a group. What it was accepted with is set while it waits and afterwards; the
# evidence itself only while it waits.
members = Table(
    "members",
    metadata,
    Column("jti", _ID, ForeignKey("launches.jti"), primary_key=True),
    Column("group_id", LargeBinary(32), ForeignKey("groups.id"), nullable=False),
    Column("machine", Integer, nullable=False),
    Column("nonce", LargeBinary(32)),
    Column("evidence_sha256", LargeBinary(32)),
    Column("evidence_public", LargeBinary(32)),
    Column("hpke_sha256", LargeBinary(32), key="keys_sha256"),
    Column("evidence", LargeBinary),
    UniqueConstraint("group_id", "machine"),
    Index("members_nonce", "nonce"),
)

# A challenge that was used stays as a tombstone until its token can no longer pass check 3: so a second
# use is `nonce-replayed` for as long as it could be anything else.
challenges = Table(
    "challenges",
    metadata,
    Column("nonce", LargeBinary(32), primary_key=True),
    Column("deployment", _ID, ForeignKey("deployments.id"), nullable=False),
    Column("jti", _ID, ForeignKey("launches.jti"), nullable=False),
    Column("request_sha256", LargeBinary(32), nullable=False, unique=True),
    Column("body", LargeBinary, nullable=False),
    Column("expires_us", BigInteger, nullable=False),
    Column("keep_until_us", BigInteger, nullable=False),
    Column("used_us", BigInteger),
    Column("evidence_sha256", LargeBinary(32)),
    Column("status", Integer),
    Column("answer", LargeBinary),
    Column("replays", Integer, nullable=False, default=0),
    Index("challenges_open", "deployment", "used_us", "expires_us"),
    Index("challenges_jti", "jti"),
    Index("challenges_keep", "keep_until_us"),
)

# One row for each distinct pair of keys, HPKE and evidence, that was given a package key, and what its runtime reported
# since. A run has one: one pair of keys, one log, one receipt. The column of the pair's digest kept its first name.
releases = Table(
    "releases",
    metadata,
    Column("deployment", _ID, ForeignKey("deployments.id"), primary_key=True),
    Column("hpke_sha256", LargeBinary(32), key="keys_sha256", primary_key=True),
    Column("evidence_public", LargeBinary(32), nullable=False, unique=True),
    Column("run_id", _ID, nullable=False, unique=True),
    Column("released_us", BigInteger, nullable=False),
    Column("answers", Integer, nullable=False, default=1),
    Column("contact_us", BigInteger, nullable=False),
    Column("head_size", BigInteger, nullable=False, default=0),
    Column("head", LargeBinary),
    Column("receipt_sha256", LargeBinary(32)),
    Column("receipt", LargeBinary),
    Column("outcome", String(16)),
)

# Files of runs that a gate keeps for their owners; a run that its owner had removed has one without a name.
stored = Table(
    "stored",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("owner", LargeBinary(32), nullable=False, index=True),
    Column("bytes", BigInteger, nullable=False),
    Column("counted", BigInteger, nullable=False),
    Column("sha256", LargeBinary(32), nullable=False),
    Column("whole", Boolean, nullable=False),
    Column("stored_us", BigInteger, nullable=False),
)

# What concerns one owner who calls over the network, as a chain of its own: it shows nothing of other owners.
own_audit = Table(
    "own_audit",
    metadata,
    Column("owner", LargeBinary(32), ForeignKey("owners.owner"), primary_key=True),
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("record", LargeBinary, nullable=False),
    Column("sha256", LargeBinary(32), nullable=False),
)

audit = Table(
    "audit",
    metadata,
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("record", LargeBinary, nullable=False),
    Column("sha256", LargeBinary(32), nullable=False),
)
