"""The broker's tables.

What must happen at most once is a unique constraint or a conditional update, never a read followed by a write: so that
the same rules hold between threads, between broker processes and on other databases.
"""

from __future__ import annotations

from typing import Any

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
from sqlalchemy.schema import SchemaItem

SCHEMA_VERSION = 1
_ID = String(32)
_DIGEST = LargeBinary(32)  # or a key

metadata = MetaData()


def _table(name: str, *parts: SchemaItem) -> Table:
    return Table(name, metadata, *parts)


def _key(name: str, *kind: Any, **options: Any) -> Column[Any]:
    return Column(name, *kind, primary_key=True, **options)


def _set(name: str, *kind: Any, **options: Any) -> Column[Any]:
    return Column(name, *kind, nullable=False, **options)


broker = _table(
    "broker",
    _key("id", Integer, autoincrement=False),  # always 1: there is one
    _set("version", Integer),
    _set("public", _DIGEST),
    _set("wrapped_seed", LargeBinary),
)

delegations = _table(
    "delegations",
    _key("owner", _DIGEST),
    _set("envelope", LargeBinary),
    _set("not_before_us", BigInteger),
    _set("not_after_us", BigInteger),
)

packages = _table(
    "packages",
    _key("package_id", _ID),
    _set("owner", _DIGEST),
    _set("manifest_sha256", _DIGEST),
    _set("envelope", LargeBinary),
    _set("wrapped_key", LargeBinary),
    Column("revoked_us", BigInteger),
)

# Enrolled owners, with the serial of the last request that was taken. Tables of their own, here and below: a database
# from before is one of a broker that no owner calls over the network.
owners = _table("owners", _key("owner", _DIGEST), _set("serial_us", BigInteger))

# Packages of which no head is countersigned any more.
stopped = _table("stopped", _key("package_id", _ID, ForeignKey("packages.package_id")), _set("stopped_us", BigInteger))

deployments = _table(
    "deployments",
    _key("id", _ID),
    _set("package_id", _ID, ForeignKey("packages.package_id")),
    _set("policy", LargeBinary),  # of an owner over the network, as they signed it
    _set("releases", Integer, default=0),
    _set("decisions", BigInteger, default=0),
    _set("created_us", BigInteger),
)

# Deployments of enrolled owners whose policies are not over, and what each owner made on the last day: see `quota`.
live = _table(
    "live",
    _key("deployment", _ID, ForeignKey("deployments.id")),
    _set("owner", _DIGEST, index=True),
    _set("not_after_us", BigInteger),
)
spent = _table(
    "spent", _key("owner", _DIGEST), _key("what", String(16)), _set("day", BigInteger), _set("made", BigInteger)
)

launches = _table(
    "launches",
    _key("jti", _ID),
    _set("run_id", _ID, unique=True),
    _set("deployment", _ID, ForeignKey("deployments.id")),
    _set("container_id", String(128)),
    _set("container_source", String(16)),
    _set("launch_public", _DIGEST),
    _set("expires_us", BigInteger),
    _set("created_us", BigInteger),
)

groups = _table(
    "groups",
    _key("id", _DIGEST),
    _set("deployment", _ID, ForeignKey("deployments.id")),
    _set("machines", Integer),
    _set("ranks", Integer),
    _set("state", String(16)),
    Column("deadline_us", BigInteger),
    Column("culprit", Integer),
    Column("code", String(64)),
    _set("created_us", BigInteger),
    Column("decided_us", BigInteger),
    Index("groups_open", "state", "deadline_us"),
)

# A launch that is one machine of a group. What it was accepted with is set while it waits and afterwards; the
# evidence itself only while it waits.
members = _table(
    "members",
    _key("jti", _ID, ForeignKey("launches.jti")),
    _set("group_id", _DIGEST, ForeignKey("groups.id")),
    _set("machine", Integer),
    Column("nonce", _DIGEST),
    Column("evidence_sha256", _DIGEST),
    Column("evidence_public", _DIGEST),
    Column("hpke_sha256", _DIGEST, key="keys_sha256"),
    Column("evidence", LargeBinary),
    UniqueConstraint("group_id", "machine"),
    Index("members_nonce", "nonce"),
)

# A challenge that was used stays as a tombstone until its token can no longer pass check 3: so a second
# use is `nonce-replayed` for as long as it could be anything else.
challenges = _table(
    "challenges",
    _key("nonce", _DIGEST),
    _set("deployment", _ID, ForeignKey("deployments.id")),
    _set("jti", _ID, ForeignKey("launches.jti")),
    _set("request_sha256", _DIGEST, unique=True),
    _set("body", LargeBinary),
    _set("expires_us", BigInteger),
    _set("keep_until_us", BigInteger),
    Column("used_us", BigInteger),
    Column("evidence_sha256", _DIGEST),
    Column("status", Integer),
    Column("answer", LargeBinary),
    _set("replays", Integer, default=0),
    Index("challenges_open", "deployment", "used_us", "expires_us"),
    Index("challenges_jti", "jti"),
    Index("challenges_keep", "keep_until_us"),
)

# The keys of a TPM that a challenge was given for, and the secret in its credential, which rests wrapped.
activations = _table(
    "activations",
    _key("nonce", _DIGEST),
    _set("ak", LargeBinary),
    _set("ek", LargeBinary),
    Column("secret", LargeBinary),
)

# What an owner gave to check hardware evidence by; it is not trusted.
collateral = _table(
    "collateral",
    _key("owner", _DIGEST),
    _set("pack", LargeBinary),
    _set("sha256", _DIGEST),
    _set("stored_us", BigInteger),
)

# One row for each distinct pair of keys, HPKE and evidence, that was given a package key, and what its runtime reported
# since. A run has one: one pair of keys, one log, one receipt. The column of the pair's digest kept its first name.
releases = _table(
    "releases",
    _key("deployment", _ID, ForeignKey("deployments.id")),
    _key("hpke_sha256", _DIGEST, key="keys_sha256"),
    _set("evidence_public", _DIGEST, unique=True),
    _set("run_id", _ID, unique=True),
    _set("released_us", BigInteger),
    _set("answers", Integer, default=1),
    _set("contact_us", BigInteger),
    _set("head_size", BigInteger, default=0),
    Column("head", LargeBinary),
    Column("receipt_sha256", _DIGEST),
    Column("receipt", LargeBinary),
    Column("outcome", String(16)),
)

# Files of runs that a gate keeps for their owners; a run that its owner had removed has one without a name.
stored = _table(
    "stored",
    _key("run_id", _ID),
    _key("name", String(64)),
    _set("owner", _DIGEST, index=True),
    _set("bytes", BigInteger),
    _set("counted", BigInteger),
    _set("sha256", _DIGEST),
    _set("whole", Boolean),
    _set("stored_us", BigInteger),
)

# What concerns one owner who calls over the network, as a chain of its own: it shows nothing of other owners.
own_audit = _table(
    "own_audit",
    _key("owner", _DIGEST, ForeignKey("owners.owner")),
    _key("sequence", BigInteger, autoincrement=False),
    _set("record", LargeBinary),
    _set("sha256", _DIGEST),
)

audit = _table(
    "audit",
    _key("sequence", BigInteger, autoincrement=False),
    _set("record", LargeBinary),
    _set("sha256", _DIGEST),
)

# Trainings that go on over several machines, here and below (spec/checkpoints.md): the last leg that was released, its
# holder, the newest ticket and the checkpoint that the next leg goes on from. An older database gains empty tables.
lines = _table(
    "lines",
    _key("id", _DIGEST),
    _set("deployment", _ID, ForeignKey("deployments.id"), index=True),
    _set("machines", Integer),
    _set("ranks", Integer),
    _set("leg", Integer, default=0),
    Column("holder", _ID),  # key id; None where a gate that was put back from a backup does not know it
    _set("lost", Boolean, default=False),
    _set("since_us", BigInteger),  # when that leg was released, or this gate came to know of it
    _set("head_seq", BigInteger, default=0),
    _set("head_step", BigInteger, default=0),
    Column("head", _DIGEST),
    Column("ticket", LargeBinary),
    _set("order_us", BigInteger, default=0),
)

# What a launch of a leg begins from, as its token has it.
line_launches = _table(
    "line_launches",
    _key("jti", _ID, ForeignKey("launches.jti")),
    _set("line", _DIGEST, ForeignKey("lines.id")),
    _set("leg", Integer),
    _set("seq", BigInteger),
    _set("counted", BigInteger),
    Column("checkpoint", _DIGEST),
    _set("rewind", Boolean),
    Column("order", LargeBinary),
)

# The machines that a leg was released to.
legs = _table(
    "legs",
    _key("line", _DIGEST, ForeignKey("lines.id")),
    _key("leg", Integer, autoincrement=False),
    _key("machine", Integer, autoincrement=False),
    _set("run_id", _ID, unique=True),
    _set("jti", _ID, ForeignKey("launches.jti")),
    Column("previous", _ID),  # key id of the holder of the leg before
)

# Legs that ended without a receipt of each machine, as the gate stated it.
abandoned = _table(
    "abandoned",
    _key("line", _DIGEST, ForeignKey("lines.id")),
    _key("leg", Integer, autoincrement=False),
    _set("envelope", LargeBinary),
)
