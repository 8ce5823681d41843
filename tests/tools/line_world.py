"""The world of one line: a job with checkpoints, a broker that keeps them, and the legs that the owner launches."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from glasshouse.broker.client.broker_process import BrokerProcess
from glasshouse.broker.http_api import LineRequest, LineView
from glasshouse.handshake.launch import LaunchFile
from glasshouse.wire.group import Group
from glasshouse.wire.lines.statements import LegLost, ResumeOrder
from tools.runtime_world import AgentProcess, Broken, World, script_world

PROGRAM = (str(Path(__file__).with_name("agent_of_lines.py")),)
LIMITS = {"bytes": 1 << 26, "every_s": 10, "most": 100}


class LineWorld:
    """One line, whose legs are the agents that `start` starts."""

    def __init__(
        self,
        folder: Path,
        script: str,
        files: Mapping[str, bytes] | None = None,
        *,
        broken: Broken | None = None,
        **params: Any,
    ) -> None:
        home = folder / "home"
        home.mkdir(mode=0o700)
        self.store = home / "store"
        self._home = home
        # By a name, so that one that was started again is found.
        self._options = ("--store", str(self.store), "--runtime-bind", f"unix:{home / 'runtime'}")
        broker = BrokerProcess(home, *self._options)
        params = {"checkpoints": LIMITS, **params}
        try:
            broken = broken or Broken(max_legs=9)
            self.world: World = script_world(folder, script, files, broken=broken, broker=broker, **params)
        except BaseException:
            broker.stop()
            raise
        self.world.own_broker = broker
        self.line: bytes | None = None

    def launch(
        self,
        *,
        broker_url: str | None = None,
        ranks: int | None = None,
        group: Group | None = None,
        **changes: Any,
    ) -> LaunchFile:
        """Launch the next leg, from the head of the line."""
        request = LineRequest()
        if self.line is not None:
            view = self.view()
            request = LineRequest(
                id=self.line, leg=view.leg + 1, seq=view.head_seq, checkpoint=view.head, ticket=view.ticket
            )
        launch = self.world.launch(line=replace(request, **changes), broker_url=broker_url, ranks=ranks, group=group)
        line = launch.claims().line
        assert line is not None
        self.line = line.id
        return launch

    def start(self, launch: LaunchFile | None = None, *, ranks: int | None = None) -> AgentProcess:
        """Start the agent of a leg."""
        return self.world.start(launch or self.launch(ranks=ranks), program=PROGRAM, ranks=ranks)

    def start_machines(self, count: int) -> list[AgentProcess]:
        """Start the agents of a leg on several machines, with a rank each."""
        with ExitStack() as held:
            sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
            ports = [int(one.getsockname()[1]) for one in sockets]
        peers = ",".join(f"127.0.0.1:{port}" for port in ports)
        options = ("--ranks", "1", "--peers", peers)
        launches = [self.launch(group=place) for place in self.world.group(count)]
        return [self.world.start(launch, options=options, program=PROGRAM) for launch in launches]

    def restart_gate(self) -> None:
        """End the gate at once, as a crash would, and start it again."""
        self.world.broker.kill()
        self.world.broker = self.world.own_broker = BrokerProcess(self._home, *self._options)

    def rewound(self, seq: int, digest: bytes) -> LaunchFile:
        """Launch the next leg from an older checkpoint, by the owner's order."""
        assert self.line is not None
        order = ResumeOrder(
            deployment=self.world.deployment,
            digest=digest,
            leg=self.view().leg + 1,
            line=self.line,
            rewind=True,
            seq=seq,
            serial_us=time.time_ns() // 1000,
        )
        return self.launch(seq=seq, checkpoint=digest, rewind=True, order=order.sign(self.world.package.owner))

    def view(self) -> LineView:
        """Return how the line stands at its gate."""
        assert self.line is not None
        return self.world.broker.client().line(self.line)

    def lost(self) -> LineView:
        """Report that the machines of the current leg are gone."""
        assert self.line is not None
        lost = LegLost(
            deployment=self.world.deployment, leg=self.view().leg, line=self.line, serial_us=time.time_ns() // 1000
        )
        return self.world.broker.client().leg_lost(self.line, lost.sign(self.world.package.owner))

    def close(self) -> None:
        self.world.close()


def checkpoints(agent: AgentProcess) -> list[dict[str, Any]]:
    """Return what an agent's log says of counted checkpoints."""
    return [event["body"] for event in agent.events() if event["type"] == "checkpoint"]


def notices(agent: AgentProcess) -> list[str]:
    """Return the codes of an agent's notices."""
    return [event["body"]["code"] for event in agent.events() if event["type"] == "notice"]
