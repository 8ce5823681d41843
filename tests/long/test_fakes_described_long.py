"""Fakes of providers answer requests that are made up from their published descriptions as those say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from simulators.api_description import described, needs_description
from simulators.fake_runpod import fake_runpod
from simulators.fake_vast import CALLS, fake_vast
from simulators.vast_market import Paper, Time

RUNPOD = "runpod-rest-v2.openapi.json"
_NAMED = '[[operations]]\ninclude-operation-id = "{}"\nparameters = {{ id = "{}"{} }}\n'
# A header that is never sent, and that the fake does not look at.
_RESUMED = ', "Last-Event-ID" = "2026-06-01T12:02:03Z"'
# What a valid body may still be refused for (no such GPU, cross-field rules), and calls that are not used.
_NOT_HELD_TO = "positive_data_acceptance,allow_header_conformance"
_USED = (
    *("listPods", "createPod", "getPod", "deletePod", "getPodLogs", "listGpuTypes", "getGpuType"),
    *("listCpuTypes", "getCpuType", "listDataCenters", "listPodBilling"),
)


@needs_description(RUNPOD)
def test_a_fake_runpod_answers_as_runpod_is_described(tmp_path: Path) -> None:
    description = described(RUNPOD)
    with fake_runpod(tmp_path, machines=False, description=description, stream_s=0) as fake:
        body = {"name": "x", "image": "x", "cpu": {"id": "cpu5m", "vcpuCount": 2}}
        pods = [fake.create_pod(query={}, body=body).value["id"] for _ in range(3)]
        there = dict(zip(("getPod", "getPodLogs", "deletePod"), pods, strict=True))
        there |= {"getGpuType": "NVIDIA H100 80GB HBM3", "getCpuType": "cpu3c"}
        named = "".join(_NAMED.format(*each, _RESUMED if each[0] == "getPodLogs" else "") for each in there.items())
        (tmp_path / "schemathesis.toml").write_text(named)
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run"),
            *(str(Path(os.environ["GLASSHOUSE_TEST_DATA"]) / "providers" / RUNPOD), "--url", fake.url),
            *("-H", f"Authorization: Bearer {fake.key}", "--exclude-checks", _NOT_HELD_TO, "--max-examples", "100"),
            *("--generation-deterministic", "--continue-on-failure", "--no-color"),
        ]
        for operation in _USED:
            command += ["--include-operation-id", operation]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
        assert len(fake.exchanges) > 1000
        done_well = {each.reply.call for each in fake.exchanges if each.reply.status in (200, 201, 204)}
    assert len(done_well) == len(_USED)


VAST = "vast.openapi.yaml"
# A valid body may be refused here for more, as above; a stranger is answered 404 by some calls, as described; and some
# calls have no answer for a wrong request.
_NOT_HELD_TO_AT_VAST = f"{_NOT_HELD_TO},ignored_auth,missing_required_header,negative_data_rejection"
_USED_AT_VAST = (
    *("searchOffersSlash", "createInstanceSlash", "showInstanceSlash", "destroyInstanceSlash", "showLogsSlash"),
    *("showInstancesSlash", "showGpuMetricsSlash", "showGpuLocationsSlash", "showChargesSlash"),
)


class Leaping(Time):
    """A clock by which no request comes too soon."""

    def __call__(self) -> float:
        self.sleep(10)
        return self.now


@needs_description(VAST)
def test_a_fake_vast_answers_as_vast_is_described(tmp_path: Path) -> None:
    description = described(VAST)
    with fake_vast(tmp_path, clock=Leaping(), host=Paper, description=description) as fake:
        body = {"image": "x", "runtype": "args"}
        made = [fake._create(number, asked={}, body=body).value["new_contract"] for number in list(fake.offers)[:3]]
        there = dict(zip(("showInstanceSlash", "showLogsSlash", "destroyInstanceSlash"), made, strict=True))
        there["createInstanceSlash"] = max(fake.offers)
        named = "".join(_NAMED.format(operation, number, "") for operation, number in there.items())
        named += '[[operations]]\ninclude-operation-id = "showChargesSlash"\n'
        named += """parameters = { select_filters = '{"day": {"gte": 0, "lte": 1}}' }\n"""
        (tmp_path / "schemathesis.toml").write_text(named)
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run"),
            *(str(Path(os.environ["GLASSHOUSE_TEST_DATA"]) / "providers" / VAST), "--url", fake.url),
            *("-H", f"Authorization: Bearer {fake.key}", "--exclude-checks", _NOT_HELD_TO_AT_VAST),
            *("--max-examples", "100", "--generation-deterministic", "--continue-on-failure", "--no-color"),
        ]
        for operation in _USED_AT_VAST:
            command += ["--include-operation-id", operation]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
        assert len(fake.exchanges) > 500
        done_well = {each.reply.call for each in fake.exchanges if each.reply.status == 200}
    assert done_well == CALLS.keys()
