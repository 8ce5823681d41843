"""The one error tree, and the refusal codes.

GlasshouseError                 code, message, hint; `fault` says whose it is
├── UsageError                  the user's: a command, a job file or an option
├── FormatError                 the sender's: bytes that are not of their format
├── PackageError                the package's: wrong key, tampered, truncated, hostile
├── VerificationError           the document's: a chain that does not hold
├── RefusedError                the gate refused this runtime (numbered checks of spec/key-release.md)
├── PeerError                   the peer's: broker or runtime away, slow or lying
├── PlatformError               the machine's: it lacks what was asked for
├── RunError                    the job's: the worker failed, was killed or was interrupted
├── CollectiveError             a rank's or the network's: a sealed collective that cannot be trusted or finished
├── ResidueError                ours or the machine's: something stayed behind after zeroization
└── InternalError               ours: a defect in Glasshouse

Libraries raise these; only `glasshouse.cli` prints them and turns them into exit codes.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any, ClassVar

__all__ = [
    "Code",
    "CollectiveError",
    "ExitCode",
    "FormatError",
    "GlasshouseError",
    "InternalError",
    "PackageError",
    "PeerError",
    "PlatformError",
    "RefusedError",
    "ResidueError",
    "RunError",
    "UsageError",
    "VerificationError",
]


class Code(StrEnum):
    """Every machine-readable reason: the same word in code, vectors, audit log and CLI."""

    # wire and formats
    TOO_LARGE = "too-large"
    NOT_CANONICAL = "not-canonical"
    SCHEMA = "schema-invalid"
    SIGNATURE = "signature-invalid"
    WRONG_TYPE = "wrong-type"
    UNSUPPORTED = "unsupported"

    # sealed packages and sealed outputs
    PACKAGE_MAGIC = "package-not-recognised"
    PACKAGE_TRUNCATED = "package-truncated"
    PACKAGE_TAMPERED = "package-tampered"
    PACKAGE_LIMIT = "package-limit"
    PACKAGE_PATH = "package-path"
    PACKAGE_OWNER = "package-owner-mismatch"
    KEY_COMMITMENT = "key-commitment-mismatch"
    ASSET_UNKNOWN = "asset-unknown"
    ASSET_DIGEST = "asset-digest-mismatch"
    SOURCE_CHANGED = "source-changed"
    DISK_FULL = "disk-full"
    OUTPUT_TAMPERED = "output-tampered"
    OUTPUT_UNNAMED = "output-unnamed"

    # the gate, in the order of its checks (spec/key-release.md)
    MESSAGE_TOO_LARGE = "message-too-large"  # 1
    MESSAGE_INVALID = "message-invalid"  # 1
    NONCE_UNKNOWN = "nonce-unknown"  # 2
    NONCE_EXPIRED = "nonce-expired"  # 2
    NONCE_REPLAYED = "nonce-replayed"  # 2
    TOKEN_SIGNATURE = "token-signature-invalid"  # 3
    TOKEN_TYPE = "token-type-mismatch"  # 3
    TOKEN_EXPIRED = "token-expired"  # 3
    TOKEN_KEY = "token-key-mismatch"  # 3
    TOKEN_CLAIM = "token-claim-mismatch"  # 3
    EVIDENCE_SIGNATURE = "evidence-signature-invalid"  # 4
    EVIDENCE_STALE = "evidence-stale"  # 5
    MANIFEST_MISMATCH = "manifest-mismatch"  # 6
    CONTAINER_MISMATCH = "container-mismatch"  # 7
    MEASUREMENT_UNKNOWN = "measurement-unknown"  # 8
    COMPOSITE_MISMATCH = "composite-mismatch"  # 9
    STATE_MISMATCH = "state-mismatch"  # 10
    ANTI_DEBUG_DISABLED = "anti-debug-disabled"  # 11a
    ANTI_DEBUG_DOWNGRADED = "anti-debug-downgraded"  # 11b
    ANTI_DEBUG_INCONSISTENT = "anti-debug-inconsistent"  # 11c
    ASSURANCE_TOO_LOW = "assurance-too-low"  # 12
    # the rest of check 12 (spec/hardware-evidence.md)
    HARDWARE_MISSING = "hardware-missing"
    HARDWARE_UNEXPECTED = "hardware-unexpected"
    HARDWARE_LENGTH = "hardware-length"
    HARDWARE_DIGEST = "hardware-digest"
    HARDWARE_MALFORMED = "hardware-malformed"
    HARDWARE_VERIFIER = "hardware-verifier-missing"
    HARDWARE_BINDING = "hardware-binding"
    HARDWARE_SIGNATURE = "hardware-signature"
    HARDWARE_CERTIFICATE = "hardware-certificate"
    HARDWARE_REVOKED = "hardware-revoked"
    HARDWARE_DEBUG = "hardware-debug"
    HARDWARE_TCB = "hardware-tcb"
    REFERENCE_VALUE = "reference-value-unknown"
    COLLATERAL_MISSING = "collateral-missing"
    COLLATERAL_EXPIRED = "collateral-expired"
    COLLATERAL_INVALID = "collateral-invalid"
    CHAIN_MISSING = "chain-missing"
    TPM_ENDORSEMENT = "tpm-endorsement"
    TPM_KEY = "tpm-key"
    TPM_ACTIVATION = "tpm-activation"
    TPM_QUOTE = "tpm-quote"
    TPM_LOG = "tpm-log"
    AZURE_KEY = "azure-key"
    SNP_REPORT = "snp-report"
    SNP_POLICY = "snp-policy"
    SNP_PRODUCT = "snp-product"
    SNP_CHIP = "snp-chip"
    SNP_VMPL = "snp-vmpl"
    TDX_ATTRIBUTES = "tdx-attributes"
    TDX_MODULE = "tdx-module"
    TDX_LOG = "tdx-log"
    DSTACK_EVENT = "dstack-event"
    GPU_COUNT = "gpu-count"
    GPU_IDENTITY = "gpu-identity"
    GPU_MANIFEST = "gpu-manifest"
    GPU_MEASUREMENT = "gpu-measurement"
    GPU_MODE = "gpu-mode"
    GPU_TOPOLOGY = "gpu-topology"
    GCP_TOKEN = "gcp-token"
    RELEASE_BUDGET = "release-budget-exhausted"  # 13
    DEPLOYMENT_UNKNOWN = "deployment-unknown"
    DEPLOYMENT_EXPIRED = "deployment-expired"
    PACKAGE_REVOKED = "package-revoked"
    TOO_MANY_CHALLENGES = "too-many-challenges"
    HEAD_INCONSISTENT = "head-inconsistent"
    POLICY_LOOSENED = "policy-loosened"
    OWNER_REQUEST = "owner-request-invalid"
    OWNER_STALE = "owner-request-stale"
    OWNER_QUOTA = "owner-quota"

    # the runtime's own refusals
    BROKER_UNTRUSTED = "broker-untrusted"
    RELEASE_INVALID = "release-invalid"
    BROKER_UNREACHABLE = "broker-unreachable"
    BROKER_PROTOCOL = "broker-protocol"
    HARDENING_MISSING = "hardening-missing"
    DEBUGGER = "debugger-attached"
    LEASE_LOST = "lease-lost"
    DURATION_EXCEEDED = "duration-exceeded"

    HARDWARE_UNAVAILABLE = "hardware-unavailable"

    # the run
    WORKER_FAILED = "worker-failed"
    WORKER_KILLED = "worker-killed"
    OUT_OF_MEMORY = "out-of-memory"
    NONFINITE_LOSS = "nonfinite-loss"
    MODEL_NOT_FOUND = "model-not-found"
    DEVICE_MISSING = "device-missing"
    REQUIREMENT_MISSING = "requirement-missing"
    SCRIPT_FAILED = "script-failed"
    OUTPUT_REFUSED = "output-refused"
    INTERRUPTED = "interrupted"
    RESIDUE_FOUND = "residue-found"

    # sealed collectives (spec/sealed-collectives.md)
    COLLECTIVE_TAMPERED = "collective-tampered"
    COLLECTIVE_MISMATCH = "collective-mismatch"
    COLLECTIVE_TIMEOUT = "collective-timeout"
    COLLECTIVE_ABORTED = "collective-aborted"
    COLLECTIVE_UNSEALED = "collective-unsealed"
    RANK_LOST = "rank-lost"
    RANK_REFUSED = "rank-refused"
    GROUP_SECRET = "group-secret-missing"
    GROUP_MISMATCH = "group-mismatch"

    # lines and their checkpoints (spec/checkpoints.md)
    LINE_BUSY = "line-busy"  # 15
    LINE_FORKED = "line-forked"  # 15
    LINE_SUPERSEDED = "line-superseded"
    LINE_ORDER = "line-order-missing"  # 15
    RESUME_WORLD = "resume-world-mismatch"  # 15
    CHECKPOINT_STALE = "checkpoint-stale"  # 15
    CHECKPOINT_INCOMPLETE = "checkpoint-incomplete"
    CHECKPOINT_FOREIGN = "checkpoint-foreign"
    CHECKPOINT_TAMPERED = "checkpoint-tampered"
    CHECKPOINT_REFUSED = "checkpoint-refused"

    # verification of receipts, logs and artifacts
    CHAIN_DELEGATION = "delegation-invalid"
    CHAIN_MANIFEST = "manifest-invalid"
    CHAIN_TOKEN = "token-invalid"
    CHAIN_EVIDENCE = "evidence-invalid"
    CHAIN_EAR = "ear-invalid"
    CHAIN_HEAD = "head-invalid"
    CHAIN_RECEIPT = "receipt-invalid"
    CHAIN_COUNTERSIGNATURE = "countersignature-invalid"
    CHAIN_INCOMPLETE = "incomplete"
    OWNER_UNKNOWN = "owner-mismatch"
    LOG_INVALID = "log-invalid"
    STATE_ILLEGAL = "state-illegal"
    ARTIFACT_INVALID = "artifact-invalid"
    ARTIFACT_CANARY = "artifact-canary"

    # rented machines
    NO_OFFER = "no-offer"
    CAP_REACHED = "cap-reached"
    BOOT_FAILED = "boot-failed"
    PROVIDER_KEY = "provider-key"
    PROVIDER_MONEY = "provider-money"
    PROVIDER_UNREACHABLE = "provider-unreachable"
    PROVIDER_PROTOCOL = "provider-protocol"
    RENTAL_UNCERTAIN = "rental-uncertain"
    RENTAL_LEFT = "rental-left"

    # the user's side
    USAGE = "usage"
    JOB_INVALID = "job-invalid"
    FILE_MISSING = "file-missing"
    POLICY_IMPOSSIBLE = "policy-impossible"
    IDENTITY = "identity"
    RUN_UNKNOWN = "run-unknown"
    PLATFORM = "platform-unsupported"
    PLACE_UNREACHABLE = "place-unreachable"
    PLACE_OUTDATED = "place-outdated"
    UPLOAD_BUSY = "upload-busy"
    UPLOAD_DAMAGED = "upload-damaged"
    RUN_EXISTS = "run-exists"
    INTERNAL = "internal"


class ExitCode(IntEnum):
    """What the command line exits with."""

    DONE = 0
    INTERNAL = 1
    USAGE = 2
    REFUSED = 3
    RUN_FAILED = 4
    VERIFICATION_FAILED = 5
    RESIDUE = 6
    UNREACHABLE = 7
    INCOMPLETE = 8
    INTERRUPTED = 130


class GlasshouseError(Exception):
    """Something went wrong: what, whose fault, and what to do next.

    Args:
        code: the machine-readable reason.
        message: one sentence for a person; never carries a secret.
        hint: what to do next, or empty.
    """

    fault: ClassVar[str] = "glasshouse"
    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL

    def __init_subclass__(cls, *, fault: str = "", exit_code: ExitCode | None = None) -> None:
        cls.fault, cls.exit_code = fault or cls.fault, exit_code or cls.exit_code  # its base's, where it names none

    def __init__(self, code: Code, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        if hint:
            self.add_note(hint)  # where the CLI does not print it, a traceback does

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"

    def __reduce__(self) -> tuple[Any, ...]:
        # As it is: torch, multiprocessing and futures bring errors from one process to another.
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[GlasshouseError], args: tuple[Any, ...], state: dict[str, Any]) -> GlasshouseError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class UsageError(GlasshouseError, fault="user", exit_code=ExitCode.USAGE):
    """The user's: a command, a job file, an option or a file that they named."""


class FormatError(GlasshouseError, fault="sender", exit_code=ExitCode.VERIFICATION_FAILED):
    """Bytes that are not of their format."""


class PackageError(GlasshouseError, fault="package", exit_code=ExitCode.VERIFICATION_FAILED):
    """A sealed package or a sealed output that cannot be trusted or opened."""


class VerificationError(GlasshouseError, fault="document", exit_code=ExitCode.VERIFICATION_FAILED):
    """A receipt, log or artifact whose chain does not hold."""


class RefusedError(GlasshouseError, fault="runtime", exit_code=ExitCode.REFUSED):
    """The gate refused; nothing was released."""


class PeerError(GlasshouseError, fault="peer", exit_code=ExitCode.UNREACHABLE):
    """The other end is away, slow, or answers what it must not."""


class PlatformError(GlasshouseError, fault="machine", exit_code=ExitCode.RUN_FAILED):
    """This machine lacks what was asked for."""


class RunError(GlasshouseError, fault="job", exit_code=ExitCode.RUN_FAILED):
    """The job itself failed, was killed or was interrupted."""


class CollectiveError(GlasshouseError, RuntimeError, fault="peer", exit_code=ExitCode.RUN_FAILED):
    """A sealed collective that cannot be trusted or finished; the group is over on every rank.

    Also a RuntimeError, as those that torch raises for its own backends are: scripts that catch one catch this.

    Args:
        rank: the rank in the group whose frames or silence it is about, if it is about one.
    """

    def __init__(self, code: Code, message: str, *, hint: str = "", rank: int | None = None) -> None:
        super().__init__(code, message, hint=hint)
        self.rank = rank


class ResidueError(GlasshouseError, fault="machine", exit_code=ExitCode.RESIDUE):
    """Something of the owner's was found after zeroization."""


class InternalError(GlasshouseError):
    """A defect in Glasshouse itself."""
