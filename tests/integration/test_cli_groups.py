"""Several ranks, and several machines, as a user types them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import glasshouse
from glasshouse.errors import Code, ExitCode
from glasshouse.jobs.define.jobfile import Ranks
from glasshouse.jobs.gates.embedded import Embedded
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.processes import Interrupts
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.supervise.prepare import prepare
from glasshouse.jobs.supervise.supervision import supervise
from glasshouse.providers.place.local import LocalPlace, LocalPlaced
from glasshouse.providers.protocol.order import Order
from glasshouse.providers.serve.runs import Run
from glasshouse.wire.states import Outcome
from simulators.command_line import CANARY, SUM, Answer, Shell
from simulators.command_line import SCRIPT as COMMAND

pytestmark = pytest.mark.slow
# As under torchrun, what is one for all ranks is for rank 0 to do. A rank that is named does not get far.
SCRIPT = COMMAND.replace("job.save_bytes", "os.environ['RANK'] == '0' and job.save_bytes").replace(
    "import", "import os,", 1
)
SCRIPT = SCRIPT.replace("step == 3 and len(sys.argv) > 2", "os.environ['RANK'] in sys.argv[2:]")
SCRIPT = SCRIPT.replace("SystemExit(sys.argv[2])", "SystemExit('not this rank')")


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    made = Shell(tmp_path_factory.mktemp("user"))
    assert made.ask("init").code == 0
    made.job("quick", "5")
    job = made.job("failing", "600", "1").read_text()
    (made.folder / "failing.toml").write_text(job + 'egress = ["group"]\n')
    wide = (made.folder / "quick.toml").read_text() + 'egress = ["group"]\n'
    (made.folder / "wide.toml").write_text(wide)
    (made.folder / "sum.toml").write_text(wide.replace("train.py", "sum.py"))
    (made.folder / "train.py").write_text(SCRIPT)
    (made.folder / "sum.py").write_text(SUM)
    yield made
    assert made.left_running() == []


@pytest.fixture(scope="module")
def several(shell: Shell) -> Answer:
    """A run on two machines; the stories below ask about it."""
    return shell.ask("run", "sum.toml", "--machines", "2", "--ranks", "2", "--json", timeout_s=120)


def test_a_script_runs_in_ranks_on_one_machine(shell: Shell) -> None:
    ended = shell.ask("run", "quick.toml", "--ranks", "2", timeout_s=120)
    assert ended.code == ExitCode.DONE, ended.out + ended.err
    assert "; 2 ranks" in ended.out
    assert "2 ranks on one machine" in ended.out
    assert shell.ask("logs").out.count(f"the first row is {CANARY},0") == 2
    verified = shell.ask("verify", "latest", "--json").object
    assert (verified["status"], verified["group"]["machines"], verified["group"]["ranks"]) == ("good", 1, 2)


def test_ranks_on_two_machines_add_up_over_sealed_connections(shell: Shell, several: Answer) -> None:
    assert several.code == ExitCode.DONE, several.out
    group = several.object["group"]
    assert (group["machines"], group["ranks"], group["blamed"]) == (2, 2, None)
    assert [one["verdict"] for one in group["ended"]] == ["good", "good"]
    said = [
        line
        for machine in ("0", "1")
        for line in shell.ask("logs", several.object["run_id"], "--machine", machine).out.splitlines()
        if line.startswith("rank")
    ]
    assert sorted(said) == [f"rank {rank} of 4 has 15" for rank in range(4)]


def test_every_machine_was_released_to_and_left_a_receipt(shell: Shell, several: Answer) -> None:
    run = several.object["run_id"]
    verified = shell.ask("verify", run, "--json")
    assert verified.code == several.code
    assert (verified.object["kind"], verified.object["status"]) == ("group", "good")
    assert [one["group"]["machine"] for one in verified.object["machines"]] == [0, 1]
    people = shell.ask("verify", run)
    assert "on machine 1:" in people.out
    assert "Authentic and complete on all 2 machines of group" in people.out
    assert "2 ranks on each of 2 machines" in shell.ask("status", run).out


def test_a_run_on_several_machines_is_one_run(shell: Shell, several: Answer) -> None:
    runs = shell.ask("status", "--json").object["runs"]
    [mine] = [run for run in runs if run["run_id"] == several.object["run_id"]]
    assert (mine["machines"], mine["ranks"], mine["outcome"]) == (2, 2, "completed")
    refused = shell.ask("logs", several.object["run_id"], "--machine", "2", "--json")
    assert (refused.code, refused.error["code"]) == (ExitCode.USAGE, "usage")


def test_a_rank_that_fails_ends_the_run_on_every_machine(shell: Shell) -> None:
    ended = shell.ask("run", "failing.toml", "--machines", "2", timeout_s=120)
    assert ended.code == ExitCode.RUN_FAILED
    assert "machine 1: failed (script-failed); because of it the others ended" in ended.out, ended.out
    assert "not this rank" in ended.out, "the last words of the machine to blame"
    assert shell.ask("verify", "latest", "--json").code == ExitCode.RUN_FAILED


def test_a_detached_run_on_several_machines_goes_on_by_itself(shell: Shell) -> None:
    placed = shell.ask("run", "wide.toml", "--machines", "2", "--detach", "--json").object
    attached = shell.ask("attach", placed["run_id"], "--json", timeout_s=120)
    assert attached.code == ExitCode.DONE
    assert [one["outcome"] for one in attached.object["group"]["ended"]] == ["completed", "completed"]
    fetched = shell.ask("fetch", placed["run_id"], "-o", "out", "--json").object
    assert [one["name"] for one in fetched["outputs"]] == ["result.txt"]
    assert shell.ask("fetch", placed["run_id"], "-o", "out-1", "--machine", "1", "--json").object["outputs"] == []


# A runtime that is not quite the owner's: one comment in one file makes it measure to something else.
PATCHED = """
import sys
# Behind the first site directory, before what that adds: in front of it the measurement is refused.
sys.path.insert(1 + next(n for n, path in enumerate(sys.path) if path.endswith("-packages")), {folder!r})
from glasshouse.runtime.__main__ import main
sys.exit(main(sys.argv[1:], sys.stdin.buffer))
"""


class OnePatched(LocalPlace):
    """Places all machines but the first with another runtime than the owner's."""

    def __init__(self, folder: Path) -> None:
        source = Path(glasshouse.__file__).parent
        shutil.copytree(source, folder / "glasshouse", ignore=shutil.ignore_patterns("__pycache__"))
        with (folder / "glasshouse" / "runtime" / "run" / "probes.py").open("a") as probes:
            probes.write("# and so much for looking into memory\n")
        self._program = PATCHED.format(folder=str(folder))
        self._placed = 0

    def run(self, folder: Path, *, max_bytes: int | None = None, relayed: bool = False) -> LocalPlaced:
        placed = super().run(folder)
        self._placed += 1
        if self._placed > 1:
            placed._run = _Patched(folder, self._program)
        return placed


class _Patched(Run):
    def __init__(self, folder: Path, program: str) -> None:
        super().__init__(folder)
        self._program = program

    def _command(self, order: Order, package: Path) -> list[str]:
        words = super()._command(order, package)
        at = words.index("-m")
        return [*words[:at], "-c", self._program, *words[at + 2 :]]


class Quiet:
    def away(self, *_machine: object) -> None:
        pass

    def event(self, *_event: object) -> None:
        pass

    def tick(self, *_seen: object) -> None:
        pass

    def stopping(self, times: int) -> None:
        pass

    def machine(self, *_ended: object, completed: bool) -> None:
        pass


def test_a_refused_machine_ends_the_run_on_all_of_them_with_its_reason(shell: Shell, tmp_path: Path) -> None:
    assert shell.ask("seal", "wide.toml", "-o", "wide.sealed", "--json").code == 0
    home = Home(path=shell.home)
    identity, folder, broker = (
        Identity.parse(home.owner_private.read_bytes(), None),
        RunFolder.create(home),
        Embedded(home),
    )
    package, shape = shell.folder / "wide.sealed", Ranks(each=1, machines=2)
    prepared = prepare(package, home=home, identity=identity, folder=folder, broker=broker, ranks=shape)
    patched = OnePatched(tmp_path)
    ended = supervise(
        folder,
        prepared.launch,
        home=home,
        place=lambda _name: patched,
        broker=broker,
        watcher=Quiet(),
        interrupts=Interrupts(),
        others=prepared.others,
    )
    serving = broker.serving
    assert serving is not None
    assert serving.client().deployment(str(prepared.record.deployment))["releases"] == 0
    broker.give_back()
    conclusion = ended.conclusion
    assert (conclusion.outcome, conclusion.code, conclusion.blamed) == (Outcome.REFUSED, Code.MEASUREMENT_UNKNOWN, 1)
    assert conclusion.machines[0].code is Code.RANK_REFUSED
    assert conclusion.exit_code is ExitCode.REFUSED
    verified = shell.ask("verify", folder.run_id, "--json")
    assert verified.code == ExitCode.INCOMPLETE, "who was never attested has a receipt that nobody countersigned"
    assert shell.ask("attach", folder.run_id).code == ExitCode.REFUSED


@pytest.mark.parametrize(
    "options",
    [("--ranks", "0"), ("--ranks", "65"), ("--machines", "65"), ("--machines", "2", "--raw"), ("--ranks", "two")],
)
def test_numbers_that_no_run_can_have(shell: Shell, options: tuple[str, ...]) -> None:
    before = shell.known()
    refused = shell.ask("run", "quick.toml", *options)
    assert refused.code == ExitCode.USAGE
    assert shell.known() == before


def test_the_raw_leg_runs_in_the_same_ranks(shell: Shell) -> None:
    raw = shell.ask("run", "quick.toml", "--raw", "--ranks", "2", "--json", timeout_s=120)
    assert (raw.code, raw.object["protected"], raw.object["outcome"]) == (ExitCode.DONE, False, "completed")
    assert raw.err.count(f"the first row is {CANARY},0") == 2


def test_machines_that_may_not_talk_are_not_placed(shell: Shell) -> None:
    before = shell.known()
    refused = shell.ask("run", "quick.toml", "--machines", "2", "--json")
    assert (refused.code, refused.error["code"]) == (ExitCode.USAGE, "policy-impossible")
    assert 'egress = ["group"]' in refused.error["hint"]
    assert shell.known() == before


def test_a_workload_of_one_process_runs_in_no_ranks(shell: Shell) -> None:
    job = (shell.folder / "quick.toml").read_text().replace('workload = "script"', 'workload = "mlp"')
    job = job.replace('script = "train.py"\narguments = ["5"]', 'data = "rows.csv"\ntarget = "a"\nepochs = 1')
    (shell.folder / "mlp.toml").write_text(job)
    refused = shell.ask("run", "mlp.toml", "--ranks", "2", "--json")
    assert (refused.code, refused.error["code"]) == (ExitCode.USAGE, "job-invalid")
