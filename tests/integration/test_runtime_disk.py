"""What a hostile dependency of the owner's script leaves on the rented machine's disk: nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from glasshouse.attestation.claims import CheckResult
from glasshouse.errors import Code
from glasshouse.evidence.events import ProbeResult
from glasshouse.wire.policy import Profile
from tools.fuse import alone, needs_fuse, recorded
from tools.machine import needs_landlock, needs_namespaces, needs_secret_memory
from tools.runtime_world import CANARY, Broken, script_world

# With the plaintext in hand, on every descriptor that leads out of the workspace and on every file it can see.
HOSTILE = """
import fcntl, os
canary = open('train.csv', 'rb').read()
numbers = int.from_bytes(canary[:7], 'little'), int.from_bytes(canary[7:14], 'little')
for number in map(int, os.listdir('/proc/self/fd')):
    for act in (
        lambda: os.setxattr(number, 'user.canary', canary),
        lambda: os.setxattr(number, 'user.canary', canary * 70, os.XATTR_CREATE),
        lambda: os.utime(number, ns=numbers),
        lambda: os.fchmod(number, 0o600 | canary[0] & 0o77),
        lambda: os.fchown(number, os.getuid(), os.getgid()),
        lambda: fcntl.fcntl(number, fcntl.F_SETLEASE, fcntl.F_RDLCK),
        lambda: fcntl.ioctl(number, 0x40086602, (0x80).to_bytes(8, 'little')),
        lambda: os.write(os.open(f'/proc/self/fd/{number}', os.O_RDWR), canary) if number > 3 else None,
    ):
        try:
            act()
        except OSError:
            pass
print('done')
"""


def test_a_script_leaves_nothing_in_the_attributes_of_its_package(tmp_path: Path) -> None:
    with script_world(tmp_path, HOSTILE, {"train.csv": CANARY}) as world:
        before = world.package.path.stat()
        agent = world.start()
        assert agent.wait() == 0, agent.stderr.read_text()
        after = world.package.path.stat()
        checks = [event["body"] for event in agent.events() if event["type"] == "check"]
    assert "done" in agent.log()
    assert os.listxattr(world.package.path) == []
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert after.st_ctime_ns == before.st_ctime_ns
    assert {"name": "metadata-closed", "process": "worker", "result": CheckResult.PASSED.value} in checks
    assert ProbeResult.FOUND.value not in str(agent.events())


FILES = "import os\nfor name in 'abc': open(f'outputs/{name}', 'w').write('x' * 100)\n"

# Past the handle that counts: as the worker itself speaks to the agent.
FRAMES = """
import hashlib, json, os
def control(**message):
    data = json.dumps(message, sort_keys=True, separators=(',', ':')).encode()
    os.write(3, len(data).to_bytes(4, 'big') + b'\\x01' + data)
for number in range(3):
    control(type='output', name=f'o{number}', kind='output', bytes=100, **{'class': 'file'})
    os.write(3, (100).to_bytes(4, 'big') + b'\\x02' + bytes(100))
    control(type='output-end', sha256=hashlib.sha256(bytes(100)).hexdigest())
"""


@pytest.mark.parametrize(
    ("script", "limits", "kept"),
    [
        (FILES, {"max_outputs": 2}, 2),
        (FILES, {"max_output_bytes": 250}, 2),
        (FRAMES, {"max_outputs": 2}, 2),
        (FRAMES, {"max_output_bytes": 250}, 2),
        (FILES, {"max_outputs": 3, "max_output_bytes": 300}, 3),
    ],
    ids=["too many files", "too large files", "too many frames", "too large frames", "within"],
)
def test_a_script_returns_no_more_than_its_owner_allowed(
    tmp_path: Path, script: str, limits: dict[str, int], kept: int
) -> None:
    with script_world(tmp_path, script, {}, **limits) as world:
        agent = world.start()
        code = agent.wait()
        last = agent.events()[-1]["body"]
    assert len(list((agent.out / "outputs").glob("*.sealed"))) == kept
    if kept == 3:
        assert code == 0
        return
    assert (last["outcome"], last["code"]) == ("failed", Code.OUTPUT_REFUSED.value)
    assert script is FRAMES or next(iter(limits)) in agent.log()


# No file has these names, and nothing is written.
LOOK_UP = """
import os
canary = open('train.csv', 'rb').read()
for number in range(8):
    try:
        os.stat(f'{os.environ["HF_HUB_CACHE"]}/{number}.{canary.hex()}')
    except OSError as error:
        print(error.strerror)
"""


@needs_fuse
@needs_namespaces
@needs_landlock
@needs_secret_memory
def test_strict_releases_nothing_where_a_server_would_see_the_names_that_a_script_looks_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def story() -> None:
        with recorded(tmp_path / "hub", tmp_path / "told") as hub:
            monkeypatch.setenv("HF_HUB_CACHE", str(hub))
            with script_world(tmp_path, LOOK_UP, {"train.csv": CANARY}, broken=Broken(profile=Profile.STRICT)) as world:
                agent = world.start()
                assert agent.wait() != 0
                said = agent.stderr.read_text()
        assert Code.HARDENING_MISSING.value in said
        assert "worker.landlock (shown-remote-fuse: a server" in said
        assert "on a local disk of this machine" in said
        assert CANARY.hex().encode() not in (tmp_path / "told").read_bytes()

    alone(story)


@needs_fuse
@needs_namespaces
@needs_landlock
def test_a_server_beneath_what_is_shown_is_asked_for_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hub").mkdir()

    def story() -> None:
        with recorded(tmp_path / "hub" / "models", tmp_path / "told") as models:
            monkeypatch.setenv("HF_HUB_CACHE", str(models.parent))
            script = LOOK_UP.replace('["HF_HUB_CACHE"]}', '["HF_HUB_CACHE"]}/models')
            with script_world(tmp_path, script, {"train.csv": CANARY}) as world:
                agent = world.start()
                assert agent.wait() == 0, agent.stderr.read_text()
                assert agent.log().count("No such file or directory") == 8
                checks = [event["body"] for event in agent.events() if event["type"] == "check"]
        assert {"name": "landlock", "process": "worker", "result": CheckResult.PASSED.value} in checks
        assert CANARY.hex().encode() not in (tmp_path / "told").read_bytes()

    alone(story)
