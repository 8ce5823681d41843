"""A sealed run on a machine that only a test has, in this process, from its job file to its end."""

from __future__ import annotations

from glasshouse.jobs.gates.embedded import Embedded
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.processes import Interrupts
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.supervise.follow import Watcher
from glasshouse.jobs.supervise.prepare import prepare
from glasshouse.jobs.supervise.supervision import supervise
from glasshouse.jobs.verify.conclusion import Conclusion
from glasshouse.providers.place.local import LocalPlace
from simulators.command_line import Shell

__all__ = ["run_on"]


def run_on(shell: Shell, name: str, machine: LocalPlace) -> tuple[RunFolder, Conclusion]:
    """Seal a job file of the shell's, and run it on the machine."""
    sealed = shell.ask("seal", f"{name}.toml", "-o", f"{name}.sealed", "--force", "--json")
    assert sealed.code == 0, sealed.out + sealed.err
    home = Home(path=shell.home)
    identity, broker = Identity.parse(home.owner_private.read_bytes(), None), Embedded(home)
    folder = RunFolder.create(home)
    try:
        prepared = prepare(
            shell.folder / f"{name}.sealed",
            home=home,
            identity=identity,
            folder=folder,
            broker=broker,
            places=[machine],
        )
        ended = supervise(
            folder,
            prepared.launch,
            home=home,
            place=lambda _name: machine,
            broker=broker,
            watcher=Watcher(),
            interrupts=Interrupts(),
        )
    finally:
        broker.give_back()
    return folder, ended.conclusion
