"""The broker is killed at every step of an exchange and started again: nothing is lost, nothing doubled."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from glasshouse.broker.client.broker_process import BrokerProcess
from glasshouse.broker.client.owner_client import Reply
from glasshouse.broker.http_api import verify_chain
from glasshouse.errors import Code, PeerError
from glasshouse.handshake.messages import Challenge
from glasshouse.handshake.runtime_side import challenge_request
from glasshouse.tamper.stage import Actor, Owner
from glasshouse.wire.states import State
from simulators.reporting import Reporter

DYING = str(Path(__file__).parent.parent / "tools" / "dying_broker.py")


class Machine:
    """The broker's machine: starts a broker on one data directory and one address, again and again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.bind = f"unix:{directory}/runtime/socket"

    def broker(self, *dying: str) -> BrokerProcess:
        program = (DYING, *dying) if dying else ("-m", "glasshouse.broker.serving")
        return BrokerProcess(self.directory, "--runtime-bind", self.bind, program=program)

    @contextmanager
    def dies(self, path: str, when: str) -> Iterator[Callable[[Actor, bytes], None]]:
        """Yield a way to send a message that the broker does not survive."""
        broker = self.broker(path, when)

        def send(actor: Actor, message: bytes) -> None:
            with pytest.raises(PeerError) as caught:
                actor.post(path, message)
            assert caught.value.code is Code.BROKER_UNREACHABLE

        try:
            yield send
        finally:
            assert broker.stop() == -9

    def count(self, table: str) -> int:
        connection = sqlite3.connect(self.directory / "data" / "broker.sqlite3")
        try:
            [(count,)] = connection.execute(f"SELECT count(*) FROM {table}")
            return int(count)
        finally:
            connection.close()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    tmp_path.chmod(0o700)
    return Machine(tmp_path)


def good(reply: Reply) -> bytes:
    return reply.content()


@pytest.mark.slow
def test_a_runtime_gets_through_a_broker_that_dies_at_every_step(machine: Machine) -> None:
    with machine.broker() as broker:
        owner = Owner(broker)
        actor = Actor.enter(owner)
    request = challenge_request(actor.launch)

    for when, stored in (("arrival", 0), ("uncommitted", 0), ("committed", 1)):
        with machine.dies("/v1/challenge", when) as send:
            send(actor, request)
        assert machine.count("challenges") == stored, f"a challenge request, {when}"

    # The answer was lost with the broker; the same request is answered by the next one with the stored challenge.
    with machine.dies("/v1/evidence", "arrival") as send:
        challenge = Challenge.parse(good(actor.post("/v1/challenge", request)))
        evidence = actor.sign(actor.claims(challenge))
        send(actor, evidence)
    with machine.dies("/v1/evidence", "uncommitted") as send:
        assert owner.releases() == 0
        send(actor, evidence)
    assert machine.count("releases") == 0
    with machine.dies("/v1/evidence", "committed") as send:
        assert owner.releases() == 0
        send(actor, evidence)  # the same challenge still: what was not committed did not happen
    assert machine.count("releases") == 1

    reporter = Reporter(actor)
    with machine.dies("/v1/heads", "committed") as send:
        assert owner.releases() == 1
        assert actor.send(evidence).problem().code is Code.NONCE_REPLAYED
        again = actor.challenge()
        second = actor.sign(actor.claims(again))
        assert actor.open(good(actor.send(second)), again, second) == owner.package_key
        assert owner.releases() == 1, "the same runtime with the same keys is not counted twice"
        submission = reporter.submission()
        send(actor, submission)
    with machine.dies("/v1/receipt", "committed") as send:
        good(reporter.send(submission))
        reporter.go_on(State.HARDENED)
        reporter.end()
        good(reporter.send(reporter.submission()))
        receipt = reporter.receipt()
        send(actor, receipt)
    with machine.broker() as broker:
        good(actor.post("/v1/receipt", receipt))
        run = broker.client().run(actor.launch.run_id)
        assert (run["outcome"], run["state"]) == ("interrupted", "zeroized")
        records = broker.client().audit()
        verify_chain(records)
        events = [record["event"] for record in records if isinstance(record, dict)]
        assert events.count("release") == 2
        assert events.count("receipt") == 1
        assert broker.broker_public == actor.launch.broker_public


@pytest.mark.slow
def test_a_group_gets_through_a_broker_that_dies_while_its_machines_wait(machine: Machine) -> None:
    with machine.broker() as broker:
        owner = Owner(broker, releases=2)
        first, second = (Actor.enter(owner, launch) for launch in owner.group(2))
    with machine.dies("/v1/evidence", "uncommitted") as send:
        challenge = first.challenge()
        evidence = first.sign(first.claims(challenge))
        send(first, evidence)
    with machine.dies("/v1/evidence", "committed") as send:
        send(first, evidence)  # what was not committed did not happen: the same challenge still
    with machine.dies("/v1/evidence", "uncommitted") as send:
        assert first.ask(challenge, evidence).status == 202, "it was accepted, and its answer was lost"
        last = second.challenge()
        its = second.sign(second.claims(last))
        send(second, its)  # released to both, and not committed
    with machine.dies("/v1/evidence", "committed") as send:
        assert first.ask(challenge, evidence).status == 202
        assert owner.releases() == 0
        send(second, its)
    assert machine.count("releases") == 2
    with machine.broker():
        assert owner.releases() == 2
        for actor, asked, sent in ((first, challenge, evidence), (second, last, its)):
            assert actor.open(actor.ask(asked, sent).content(), asked, sent) == owner.package_key
        records = owner.client().audit()
        verify_chain(records)
        events = [record["event"] for record in records if isinstance(record, dict)]
        assert (events.count("accepted"), events.count("release")) == (2, 2)
