"""What the page of the gate prints is what happens: its owner's commands, and the options of its unit and container."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path

import pytest

from simulators.command_line import Shell
from tools.ports import free_port

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "gate.md").read_text()
ADVERTISED = "https://gate.example.org:8443"


def block(kind: str) -> str:
    [found] = re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


def test_the_unit_and_the_container_start_a_gate_as_it_is_started(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    options = set(re.findall(r"--[a-z-]+", shell.ask("broker", "serve", "--help").out))
    [unit] = re.findall(r"^ExecStart=(.*?)\n(?!  )", block("ini"), re.DOTALL | re.MULTILINE)
    started = shlex.split(unit.replace("\\\n", " "))
    assert started[:3] == ["/opt/glasshouse/bin/glasshouse", "broker", "serve"]
    contained = re.findall(r'"(--[a-z-]+)"', block("dockerfile"))
    assert {*(word for word in started if word.startswith("--")), *contained} <= options
    assert {"--home", "--bind", "--advertise", "--owner"} <= {*started} & {*contained}


@pytest.mark.slow
def test_an_owner_runs_at_a_gate_as_the_page_says(tmp_path: Path) -> None:
    for name in ("owner", "server"):
        (tmp_path / name).mkdir()
    owner, server = Shell(tmp_path / "owner"), Shell(tmp_path / "server")
    assert owner.ask("init").code == 0
    owner.job("job", "24")
    port = free_port()
    url = f"https://127.0.0.1:{port}"
    where = ("--bind", f"127.0.0.1:{port}", "--advertise", url, "--owner", str(owner.home / "owner.pub"))
    gate = server.start("broker", "serve", *where)
    try:
        assert gate.stdout is not None
        # The line that it prints is what an owner types.
        line = next(text for text in gate.stdout if text.startswith("glasshouse gate add NAME"))
        pinned = dict(zip(("KEY", "CERTIFICATE"), re.findall(r"\b[0-9a-f]{64}\b", line), strict=True))
        typed = [text[2:] for text in block("console").splitlines() if text.startswith("$ ")]
        shown = [text for text in block("console").splitlines() if not text.startswith("$ ")]
        assert typed[0].replace("small", "NAME").replace(ADVERTISED, url) == re.sub(
            r"\b[0-9a-f]{64}\b", lambda found: {value: key for key, value in pinned.items()}[found[0]], line.strip()
        )
        said = ""
        for command in typed:
            for name, value in (*pinned.items(), (ADVERTISED, url)):
                command = command.replace(name, value)
            ran = owner.ask(*shlex.split(command)[1:])
            assert ran.code == 0, f"{command}\n{ran.out}\n{ran.err}"
            said += ran.out.replace(url, ADVERTISED)
        assert all(text in said for text in shown)
    finally:
        gate.send_signal(signal.SIGTERM)
        gate.communicate(timeout=20)
    assert owner.left_running() == []
