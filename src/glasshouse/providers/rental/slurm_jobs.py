"""Rents nodes of a Slurm cluster: a job that runs `batch_script` is the machine, and has no price.

Laws: a job has its tag as its name from the request that makes it; what Slurm does not list as waiting, running or
completing does not exist any more, and a command that fails is never such a listing.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

from glasshouse.errors import Code, GlasshouseError, PeerError, PlatformError, UsageError
from glasshouse.providers.place.ways import NODE_FOLDER, batch_script, login_of
from glasshouse.providers.rental.provider import Offer, Options, Provider, Rented, RentedState, Start, UncertainError
from glasshouse.providers.rental.rest import shown, unknown

_CONNECT_S, _ANSWER_S = 10, 60.0
_MOST_CHARS = 64 << 10
_GPUS = re.compile(r"gpu:(?:([A-Za-z][^:(,]*):)?([0-9]+)")
_ANY = "gpu"
_STARTING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD")
_RUNNING = ("RUNNING", "RESIZING", "SIGNALING", "SUSPENDED")
_STATES = dict.fromkeys(_STARTING, RentedState.STARTING) | dict.fromkeys(_RUNNING, RentedState.RUNNING)
# What shows that no job was made; after anything else one may have been.
_REFUSED = re.compile(
    r"(?i)invalid (partition|account|qos|feature|generic|trackable|job name|--|directive|time)|node configuration|"
    r"node count|violates|not permitted|access.*denied|unrecognized option|exceeds|(sbatch|ssh): (command )?not found"
)
_AWAY = re.compile(r"(?i)unable to contact|socket timed out|connection|could not resolve|timed out|unreachable")


class Slurm(Provider):
    """A user of a cluster; see `Provider`.

    Args:
        login: ``[user@]host[:port]`` of the login node; empty where this machine is one.
        options: further arguments of ssh, as of `SshHost`.
        words: further arguments of sbatch: ``--account=…``, ``--qos=…``.
        nodes: how many nodes a job has; each is a place of its own, and what is asked for is had on each.
        python, folder: as of `batch_script`.
    """

    name = "slurm"
    # A controller that was busy answers late, and lists at once.
    settles_s = 60.0
    user = ""
    has_sshd = False

    def __init__(
        self,
        login: str = "",
        *,
        options: tuple[str, ...] = (),
        words: tuple[str, ...] = (),
        nodes: int = 1,
        python: str = "python3",
        folder: str = NODE_FOLDER,
    ) -> None:
        self._address, self._login = login, login_of(login, options=options)
        self._words, self._nodes = words, nodes
        self._script = batch_script(python=python, folder=folder)

    def offers(self, options: Options) -> list[Offer]:
        """Return partitions that have such nodes, whether or not one is free now; `Options.regions` names them.

        Which room a node's disk has is not known before a job is there.
        """
        asked = ("--noheader", "--exact", "--states=idle,mixed,allocated,completing", "--format=%R|%a|%m|%G")
        found: dict[str, Offer] = {}
        for line in self._ask("sinfo", *asked).splitlines():
            partition, up, megabytes, resources = _columns(line, 4)
            memory_gb = int(_whole(megabytes) * (1 << 20) / 10**9)
            for kind, count in _gpus(resources) if options.gpus else [("", 0)]:
                offer = Offer(
                    id=f"{partition}/{kind}",
                    gpu=kind,
                    gpus=options.gpus,
                    memory_gb=memory_gb,
                    disk_gb=options.disk_gb,
                    region=partition,
                    usd_per_hour=Decimal(0),
                )
                if up == "up" and count >= options.gpus and memory_gb >= options.memory_gb:
                    found[offer.id] = offer
        there = list(found.values())
        regions = _nearest_or_all(options.regions, {one.region for one in there}, "partition")
        kinds = _nearest_or_all(options.gpu if options.gpus else (), {one.gpu for one in there}, "kind of GPU")
        return [one for one in there if one.region in regions and one.gpu in kinds]

    def rent(self, offer: Offer, start: Start) -> str:
        """Submit a job and return its number; it runs when Slurm finds room.

        Where it has not begun in time for a minute before its end, Slurm takes it out of the queue.
        """
        kind = "" if offer.gpu in ("", _ANY) else f"{offer.gpu}:"
        arguments = [
            *("sbatch", "--parsable", f"--job-name={start.tag}", f"--nodes={self._nodes}"),
            *(f"--partition={offer.region}", f"--output={_output('%j')}"),
            *(f"--time={max(1, start.ends_s // 60)}", "--time-min=1", f"--deadline=now+{start.ends_s}"),
            *((f"--gpus-per-node={kind}{offer.gpus}",) if offer.gpus else ()),
            *((f"--mem={start.options.memory_gb * 10**9 >> 20}M",) if start.options.memory_gb else ()),
            *self._words,
        ]
        code, out, err = self._run(arguments, self._script)
        if code == 0 and (job := re.fullmatch(r"([1-9][0-9]*)(;.*)?\s*", out)):
            return job[1]
        if code and _REFUSED.search(err) and not _AWAY.search(err):
            raise PlatformError(
                Code.NO_OFFER, f"Slurm takes no such job: {shown(err)}", hint="name another partition, or ask for less"
            )
        raise UncertainError("Slurm", shown(err) or "sbatch did not name a job")

    def find(self, machine: str) -> Rented | None:
        return next((one for one in self._jobs() if one.id == machine), None)

    def tagged(self, prefix: str) -> list[Rented]:
        return [one for one in self._jobs() if one.tag.startswith(prefix)]

    def places(self, machine: str) -> tuple[str, ...]:
        """Return the addresses of a job's places, one a node, as `place_of` takes them; none until all are up."""
        ready = set(re.findall(r"^glasshouse-node ([A-Za-z0-9_.-]+) ", self.output(machine), re.MULTILINE))
        if len(ready) < self._nodes:
            return ()
        return tuple(f"slurm://{self._address}/{machine}/{node}" for node in sorted(ready))

    def output(self, machine: str) -> str:
        code, out, err = self._run(["head", "-c", str(_MOST_CHARS), "--", _output(machine)])
        if code and "No such file" not in err:
            raise self._failed("head", err)
        return out if code == 0 else ""

    def give_back(self, machine: str) -> None:
        """Cancel a job; its runs are sealed and wiped within KillWait. One that is over is fine."""
        code, _, err = self._run(["scancel", "--", machine])
        if code and "Invalid job id" not in err:
            raise self._failed("scancel", err)
        self._run(["rm", "-f", "--", _output(machine)])

    def bill(self, machine: str) -> Decimal | None:
        """Return None: a cluster sends no bill."""

    def _jobs(self) -> list[Rented]:
        found = []
        for line in self._ask("squeue", "--me", "--noheader", "--format=%i|%T|%r|%j").splitlines():
            job, state, why, tag = _columns(line, 4)
            at = _STATES.get(state, RentedState.STOPPED)
            found.append(Rented(id=job, tag=tag, state=at, usd_per_hour=Decimal(0), why=f"{state}: {why}"))
        return found

    def _ask(self, *command: str) -> str:
        code, out, err = self._run(list(command))
        if code:
            raise self._failed(command[0], err)
        return out

    def _run(self, command: Sequence[str], text: str = "") -> tuple[int, str, str]:
        """Return how one of Slurm's commands ended on the login node, and what it printed."""
        there = self._login.command(command, connect_s=_CONNECT_S)
        try:
            # From the home, as over ssh.
            done = subprocess.run(
                there,
                input=text,
                capture_output=True,
                errors="replace",
                check=False,
                timeout=_ANSWER_S,
                cwd=Path.home(),
            )
        except subprocess.TimeoutExpired:
            return 255, "", f"timed out after {_ANSWER_S:g} s"
        except OSError as error:
            return 127, "", f"{there[0]}: command not found ({error.strerror})"
        return done.returncode, done.stdout, done.stderr

    def _failed(self, command: str, err: str) -> GlasshouseError:
        where = self._address or "this machine"
        if "Permission denied" in err:
            hint = "log in once by hand with ssh and the same name: the user, or the key, is not accepted"
            return UsageError(Code.PROVIDER_KEY, f"{where} refuses the login: {shown(err)}", hint=hint)
        if _AWAY.search(err):
            hint = "see that the login node is up, and that `sinfo` answers there"
            return PeerError(Code.PROVIDER_UNREACHABLE, f"Slurm at {where} does not answer: {shown(err)}", hint=hint)
        hint = "name the cluster's login node, where Slurm's commands are found"
        return PeerError(Code.PROVIDER_PROTOCOL, f"{command} failed at {where}: {shown(err)}", hint=hint)


def _output(job: str) -> str:
    """Return the batch script's output file, in the user's home."""
    return f".glasshouse-slurm-{job}.out"


def _columns(line: str, count: int) -> list[str]:
    found = line.split("|", count - 1)
    if len(found) != count:
        raise PeerError(Code.PROVIDER_PROTOCOL, f"Slurm lists otherwise than it was asked to: {shown(line)}")
    return found


def _whole(number: str) -> int:
    if not re.fullmatch(r"[0-9]+\+?", number):
        raise PeerError(Code.PROVIDER_PROTOCOL, f"Slurm lists no size: {shown(number)}")
    return int(number.rstrip("+"))


def _gpus(resources: str) -> list[tuple[str, int]]:
    return [(kind or _ANY, int(count)) for kind, count in _GPUS.findall(resources)]


def _nearest_or_all(wanted: Sequence[str], there: set[str], what: str) -> set[str]:
    """Return those of `there` that are meant; all for none. Raises `UsageError` for one that is not there."""
    chosen: set[str] = set()
    for word in wanted:
        here = {one for one in there if _plain(word) in _plain(one) or (_plain(one) and _plain(one) in _plain(word))}
        if not here:
            raise unknown("the cluster", what, word, there)
        chosen |= here
    return chosen or there


def _plain(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower())
