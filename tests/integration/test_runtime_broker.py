"""The broker in the middle of a run: away, back, gone for good, and lying."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from glasshouse.broker.client.broker_process import BrokerProcess
from glasshouse.broker.client.owner_client import request
from glasshouse.errors import Code, ExitCode
from glasshouse.handshake.messages import Challenge
from glasshouse.wire.crypto import RecipientKey, hpke_seal
from simulators.key_release_world import World as KeyReleaseWorld
from tools.runtime_proxy import Act, Proxy, Reply
from tools.runtime_world import Broken, World, ended, script_world

QUICK = "print('done')\n"
SECONDS = "import time\nfor _ in range({}):\n    time.sleep(0.05)\n"


@pytest.fixture
def through(tmp_path: Path, broker: BrokerProcess) -> Iterator[Callable[..., tuple[World, Proxy]]]:
    """Return a world whose runtime reaches its broker only through somebody."""
    with ExitStack() as made:

        def make(act: Act, script: str = QUICK, **options: object) -> tuple[World, Proxy]:
            proxy = Proxy(tmp_path / "proxy", broker.runtime_url, act)
            made.callback(proxy.close)  # after the world: nobody asks it any more then
            world = script_world(tmp_path, script, broker=broker, **options)  # type: ignore[arg-type]
            return made.enter_context(world), proxy

        yield make


def once(act: Act) -> Act:
    """Do something to the first request that it applies to, and let the others pass."""
    done: list[str] = []

    def first(path: str, body: bytes, ask: Callable[[], Reply]) -> Reply | None:
        if done:
            return ask()
        reply = act(path, body, ask)
        if reply != (0, b""):
            done.append(path)
            return reply
        return ask()

    return first


def only(wanted: str, act: Act) -> Act:
    return lambda path, body, ask: act(path, body, ask) if path == wanted else (0, b"")


def changed(wanted: str, change: Callable[[dict[str, object]], object]) -> Act:
    """Alter the broker's answers to one kind of request."""

    def act(path: str, body: bytes, ask: Callable[[], Reply]) -> Reply:
        status, content = ask()
        if path != wanted or status != 200:
            return status, content
        value = json.loads(content)
        change(value)
        return status, json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

    return act


def lost(_path: str, _body: bytes, ask: Callable[[], Reply]) -> None:
    """The broker answers, and nobody hears it."""
    ask()


@pytest.mark.parametrize("path", ["/v1/challenge", "/v1/evidence", "/v1/heads", "/v1/receipt"])
def test_an_answer_that_is_lost_loses_nothing_and_doubles_nothing(
    through: Callable[..., tuple[World, Proxy]], path: str
) -> None:
    world, proxy = through(once(only(path, lost)))  # type: ignore[arg-type]
    verdict = ended(
        world.start(world.launch(broker_url=proxy.url)), exit_code=ExitCode.DONE, outcome="completed", code=None
    )
    assert verdict.exit_code == ExitCode.DONE
    assert world.broker.client().deployment(world.deployment)["releases"] == 1


def test_the_answer_to_the_last_head_may_be_lost_too(through: Callable[..., tuple[World, Proxy]]) -> None:
    """It comes after the end of the log, which has no place for a note of that."""

    def of_the_end(path: str, body: bytes, ask: Callable[[], Reply]) -> Reply | None:
        head = json.loads(body)["head"] if path == "/v1/heads" else {"payload": ""}
        if b'"zeroized"' not in base64.b64decode(head["payload"]):
            return 0, b""
        return lost(path, body, ask)  # type: ignore[func-returns-value]

    world, proxy = through(once(of_the_end))  # type: ignore[arg-type]
    agent = world.start(world.launch(broker_url=proxy.url))
    assert ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None).exit_code == ExitCode.DONE


def test_a_reader_who_posts_garbage_for_every_nonce_ends_no_run(through: Callable[..., tuple[World, Proxy]]) -> None:
    posted: list[Code] = []

    def sniff(path: str, _body: bytes, ask: Callable[[], Reply]) -> Reply:
        answer = ask()
        if path == "/v1/challenge":
            stranger = KeyReleaseWorld()
            stranger.challenge = Challenge.parse(answer[1])
            reply = request(world.broker.runtime_url, "POST", "/v1/evidence", stranger.message())
            posted.append(reply.problem().code)
        return answer

    world, proxy = through(sniff)
    ended(world.start(world.launch(broker_url=proxy.url)), exit_code=ExitCode.DONE, outcome="completed", code=None)
    assert posted == [Code.EVIDENCE_SIGNATURE]
    assert proxy.seen.count("/v1/evidence") == 1


def test_a_broker_that_is_busy_is_asked_again(through: Callable[..., tuple[World, Proxy]]) -> None:
    world, proxy = through(once(only("/v1/challenge", lambda *_: (503, b"later"))))
    agent = world.start(world.launch(broker_url=proxy.url))
    ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None)
    assert proxy.seen.count("/v1/challenge") == 2


@pytest.mark.parametrize(
    ("act", "code"),
    [
        (changed("/v1/challenge", lambda value: value.update(deployment="00" * 16)), Code.BROKER_PROTOCOL),
        (lambda *_: (200, b"<html>"), Code.BROKER_PROTOCOL),
        (lambda *_: (404, b"not found"), Code.BROKER_PROTOCOL),
        (
            changed("/v1/evidence", lambda value: value.update(ear=str(value["ear"])[:-20] + "A" * 20)),
            Code.BROKER_UNTRUSTED,
        ),
        (
            changed(
                "/v1/evidence",
                lambda value: value.update(sealed_key=_sealed_to_somebody(len(str(value["sealed_key"])))),
            ),
            Code.RELEASE_INVALID,
        ),
        (changed("/v1/evidence", lambda value: value.pop("ear")), Code.RELEASE_INVALID),
    ],
    ids=["other challenge", "rubbish", "nothing there", "other signature", "other key", "half a release"],
)
def test_a_broker_that_lies_gets_no_run(through: Callable[..., tuple[World, Proxy]], act: Act, code: Code) -> None:
    world, proxy = through(act)
    agent = world.start(world.launch(broker_url=proxy.url))
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=code)
    assert "opened" not in agent.states()


def _sealed_to_somebody(chars: int) -> str:
    from glasshouse.wire.canonical import b64encode

    sealed = hpke_seal(os.urandom(32), recipient=RecipientKey.generate().public, info=b"")
    text = b64encode(sealed)
    assert len(text) == chars
    return text


def test_a_forged_countersignature_is_no_contact_and_no_receipt(through: Callable[..., tuple[World, Proxy]]) -> None:
    def forge(path: str, _body: bytes, ask: Callable[[], Reply]) -> Reply:
        status, content = ask()
        return (status, content.replace(b'"sig":"', b'"sig":"AAAA', 1)) if path == "/v1/heads" else (status, content)

    world, proxy = through(forge, SECONDS.format(200), broken=Broken(lease_s=2))
    agent = world.start(world.launch(broker_url=proxy.url))
    verdict = ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.LEASE_LOST)
    assert verdict.exit_code == ExitCode.INCOMPLETE
    assert not (agent.out / "heads.log").read_bytes()


def test_a_broker_that_comes_back_finds_its_run_again(tmp_path: Path) -> None:
    home = tmp_path / "broker"
    with script_world(tmp_path, SECONDS.format(60)) as world:
        address = world.broker.runtime_url.removeprefix("http://")
        agent = world.start()
        agent.wait_for_state("running")
        world.broker.kill()
        with BrokerProcess(home, "--runtime-bind", address) as again:
            verdict = ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None)
            assert verdict.exit_code == ExitCode.DONE
            assert again.client().deployment(world.deployment)["releases"] == 1


def test_a_broker_that_is_gone_for_good_ends_the_lease(tmp_path: Path) -> None:
    with script_world(tmp_path, SECONDS.format(600), broken=Broken(lease_s=2)) as world:
        agent = world.start()
        agent.wait_for_state("running")
        world.broker.kill()
        verdict = ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.LEASE_LOST)
        assert verdict.status == "incomplete"


def test_a_quiet_run_keeps_its_lease(tmp_path: Path, broker: BrokerProcess) -> None:
    with script_world(tmp_path, "import time\ntime.sleep(3)\n", broken=Broken(lease_s=2), broker=broker) as world:
        ended(world.start(), exit_code=ExitCode.DONE, outcome="completed", code=None)


def test_an_interruption_is_heard_while_nobody_answers(through: Callable[..., tuple[World, Proxy]]) -> None:
    world, proxy = through(lambda *_: None)
    agent = world.start(world.launch(broker_url=proxy.url))
    agent.wait_for(lambda: proxy.seen)
    agent.process.send_signal(signal.SIGTERM)
    ended(agent, exit_code=ExitCode.INTERRUPTED, outcome="interrupted", code=Code.INTERRUPTED)
