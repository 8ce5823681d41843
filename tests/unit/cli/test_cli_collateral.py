"""An owner's collateral: fetched whole or not at all, shown with its dates, and checked before it is needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from glasshouse.cli import app as cli
from glasshouse.errors import ExitCode
from glasshouse.jobs.collateral.item_dates import dates_of
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.kept_pack import kept_pack
from simulators.fake_vendors import FakeVendors, serving

TDX = """
[tdx]
chain = "image"
fmspcs = ["90C06F000000"]
tcb_evaluation = 17
[[tdx.images]]
mrtd = "{0}"
rtmr0 = ["{0}"]
rtmr1 = "{0}"
rtmr2 = "{0}"
""".format("00" * 48)
DRIVER = "nvidia/rim/NV_GPU_DRIVER_GH100_550.90.07"


@dataclass
class Owner:
    """An owner at a shell, and the services of the vendors."""

    home: Home
    vendors: FakeVendors
    capsys: pytest.CaptureFixture[str]

    def ask(self, *words: str) -> tuple[int, str, str]:
        """Type a command; return its exit code, and what it printed."""
        code = cli.run(["collateral", *words, "--home", str(self.home.path)])
        said = self.capsys.readouterr()
        return code, said.out, said.err

    def object(self, *words: str) -> Any:
        return json.loads(self.ask(*words, "--json")[1])

    @property
    def names(self) -> list[str]:
        pack = kept_pack(self.home)
        return [] if pack is None else [item.name for item in pack.items]


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Owner]:
    with serving(monkeypatch) as vendors:
        yield Owner(home=Home(path=tmp_path / "home"), vendors=vendors, capsys=capsys)


@pytest.fixture
def policy(tmp_path: Path) -> str:
    path = tmp_path / "tdx.toml"
    path.write_text(TDX)
    return str(path)


def test_what_a_policy_needs_is_fetched_and_then_nothing_is_lacking(owner: Owner, policy: str) -> None:
    code, out, _ = owner.ask("check", policy)
    assert code == ExitCode.INCOMPLETE
    assert "intel/tcb/90C06F000000" in out
    assert out.count("not there") == 7
    assert f"glasshouse collateral fetch {policy}" in out.replace("\n", " ")

    code, out, err = owner.ask("fetch", policy)
    assert code == ExitCode.DONE, err
    assert owner.names == [
        "intel/pck-crl/platform",
        "intel/pck-crl/processor",
        "intel/qe-identity",
        "intel/qe-identity/chain",
        "intel/root-crl",
        "intel/tcb/90C06F000000",
        "intel/tcb/90C06F000000/chain",
    ]
    assert len(owner.vendors.asked) == 5  # a chain comes with what it signed

    code, out, _ = owner.ask("check", policy)
    assert (code, "Nothing is lacking until" in out) == (ExitCode.DONE, True)
    shown = owner.object("show")
    assert shown["sha256"] == kept_pack(owner.home).sha256.hex()  # type: ignore[union-attr]
    assert {item["name"]: item["lack"] for item in shown["items"]} == dict.fromkeys(owner.names)
    code, out, _ = owner.ask("show")
    assert code == ExitCode.DONE
    assert shown["sha256"] in out


def test_it_is_seen_beforehand_when_a_run_of_later_would_be_refused(owner: Owner, policy: str) -> None:
    owner.ask("fetch", policy)
    later = f"{owner.vendors.issued + timedelta(days=29):%Y-%m-%d}"
    assert owner.ask("check", policy, "--at", later)[0] == ExitCode.DONE
    later = f"{owner.vendors.issued + timedelta(days=31):%Y-%m-%d}"
    found = owner.object("check", policy, "--at", later)
    assert not found["good"]
    lacking = {item["name"] for item in found["items"] if item["lack"] == "collateral-expired"}
    # The root's list has its own end alone.
    assert "intel/tcb/90C06F000000" in lacking
    assert "intel/root-crl" not in lacking
    assert owner.ask("check", policy, "--at", "soon")[0] == ExitCode.USAGE


def test_lists_of_an_older_evaluation_than_the_policys_are_lacking(owner: Owner, policy: str) -> None:
    owner.ask("fetch", policy)
    Path(policy).write_text(Path(policy).read_text().replace("tcb_evaluation = 17", "tcb_evaluation = 21"))
    code, out, _ = owner.ask("check", policy)
    assert (code, "not of evaluation 21 or later" in " ".join(out.split())) == (ExitCode.INCOMPLETE, True)
    lacking = {item["name"] for item in owner.object("check", policy)["items"] if item["lack"]}
    assert lacking == {"intel/tcb/90C06F000000", "intel/qe-identity"}


def test_manifests_bring_the_responses_about_those_who_signed_them(owner: Owner, tmp_path: Path) -> None:
    assert owner.ask("fetch", DRIVER)[0] == ExitCode.DONE
    responses = [name for name in owner.names if name.startswith("nvidia/ocsp/")]
    assert len(responses) == 1
    assert DRIVER in owner.names

    # A device of an authority that is not known here: its chain says what to ask about, also the device itself.
    chain = [
        owner.vendors.certificate(name, issuer=above) for name, above in pairwise(("made", "device", "ICA", "root"))
    ]
    pem = tmp_path / "chain.pem"
    pem.write_bytes(b"".join(one.public_bytes(Encoding.PEM) for one in (*chain, owner.vendors.certificate("root"))))
    assert owner.ask("fetch", str(pem))[0] == ExitCode.DONE
    assert len([name for name in owner.names if name.startswith("nvidia/ocsp/")]) == 3
    # The next fetch does not know that chain, and leaves the response about it as it was.
    before = owner.names
    assert owner.ask("fetch")[0] == ExitCode.DONE
    assert owner.names == before


def test_kinds_are_fetched_by_name_and_what_was_there_is_fetched_anew(owner: Owner) -> None:
    assert owner.ask("fetch", "sev-snp")[0] == ExitCode.DONE
    assert owner.names == ["amd/crl/Genoa", "amd/crl/Milan", "amd/crl/Turin"]
    assert owner.ask("fetch", "nvidia")[0] == ExitCode.DONE
    assert len(owner.names) == 6
    assert owner.ask("fetch", "amd/crl/Milan", "--only")[0] == ExitCode.DONE
    assert owner.names == ["amd/crl/Milan"]


def test_a_service_that_is_busy_is_asked_again_when_it_says(owner: Owner) -> None:
    owner.vendors.troubles["/vcek"] = [429, 503]
    code, out, _ = owner.ask("fetch", "amd/crl/Milan")
    assert (code, owner.vendors.waits) == (ExitCode.DONE, [7.0, 7.0])
    assert "again in 7 s (HTTP 429)" in out


def test_a_host_that_is_away_is_waited_for_once(owner: Owner) -> None:
    owner.vendors.troubles["/vcek"] = [500] * 9
    code, _, err = owner.ask("fetch", "sev-snp")
    assert code == ExitCode.UNREACHABLE
    assert len(owner.vendors.asked) == 6  # four times for the first item, once for each of the others
    assert all(f"amd/crl/{product}" in err for product in ("Genoa", "Milan", "Turin"))


def test_each_item_that_did_not_come_is_named_once(owner: Owner, policy: str) -> None:
    owner.vendors.troubles["/tdx"] = [500] * 9
    code, _, err = owner.ask("fetch", policy)
    assert code == ExitCode.UNREACHABLE
    assert err.count("intel/qe-identity:") == 1
    assert "2 items did not come" in err
    assert all(sum(name in line for line in err.splitlines()) == 1 for name in ("qe-identity:", "tcb/90C06F000000:"))


@pytest.mark.parametrize("kind", ["gcp", "tpm"])
def test_a_kind_that_needs_nothing_of_a_vendor_is_said_so(owner: Owner, kind: str) -> None:
    code, out, _ = owner.ask("fetch", kind)
    assert code == ExitCode.DONE
    assert f"nothing that {kind} needs" in out
    assert (owner.vendors.asked, owner.names) == ([], [])


def test_the_evaluation_of_intels_lists_is_shown_before_a_policy_names_one(owner: Owner) -> None:
    for words in (("fetch", "dstack", "intel/tcb/90C06F000000"), ("show",)):
        assert "evaluation 20" in owner.ask(*words)[1]
    shown = {item["name"]: item["evaluation"] for item in owner.object("show")["items"]}
    assert (shown["intel/tcb/90C06F000000"], shown["intel/root-crl"]) == (20, None)


@pytest.mark.parametrize("trouble", ["away", "unknown", "elsewhere", "endless", "cut off", "another", "expired"])
def test_half_a_pack_is_never_kept(owner: Owner, trouble: str) -> None:
    """What fails is named with its URL and what to do, and the last pack stays."""
    owner.ask("fetch", "amd/crl/Genoa")
    before = kept_pack(owner.home)
    wanted, path = ["amd/crl/Milan", DRIVER], f"/v1/rim/{DRIVER.rpartition('/')[2]}"
    match trouble:
        case "away":
            owner.vendors.troubles[path] = [500] * 9
        case "unknown":
            wanted[1] = "nvidia/rim/NV_GPU_VBIOS_1_2_3_4"
        case "elsewhere":
            owner.vendors.redirects.add(path)
        case "endless":
            owner.vendors.floods.add(path)
        case "cut off":
            owner.vendors.cuts.add(path)
        case "another":
            owner.vendors.renamed[DRIVER.rpartition("/")[2]] = "NV_GPU_DRIVER_GH100_535.86.09"
        case _:
            owner.vendors.issued -= timedelta(days=400)
            wanted[1] = "intel/tcb/90C06F000000"
    code, _, err = owner.ask("fetch", *wanted)
    assert code == ExitCode.UNREACHABLE
    assert wanted[1] in err
    assert "the last one stays" in err
    assert kept_pack(owner.home) == before
    assert list(owner.home.path.glob("*")) == [owner.home.collateral]


@pytest.mark.parametrize("name", ["amd/crl/Rome", "intel/tcb/90c06f000000", "nvidia/ocsp/00", "intel/tcb/../x", "what"])
def test_what_no_vendor_publishes_is_asked_of_none(owner: Owner, name: str) -> None:
    assert owner.ask("fetch", name)[0] == ExitCode.USAGE
    assert owner.vendors.asked == []


def test_nothing_to_fetch_is_an_error(owner: Owner) -> None:
    assert owner.ask("fetch")[0] == ExitCode.USAGE
    assert owner.ask("show")[0] == ExitCode.USAGE


def test_dates_are_those_that_the_makers_signed(tmp_path: Path) -> None:
    for name in ("amd/crl/Milan", "intel/tcb/90C06F000000", "intel/qe-identity/chain", "nvidia/ocsp/00", DRIVER):
        with pytest.raises(Exception, match="is not what its name says"):
            dates_of(name, b"[1]")


def test_a_damaged_pack_is_replaced_by_the_command_that_its_refusal_names(owner: Owner, policy: str) -> None:
    owner.ask("fetch", policy)
    names = owner.names
    owner.home.collateral.write_bytes(owner.home.collateral.read_bytes()[:900])
    code, _, err = owner.ask("fetch", policy)
    assert code == ExitCode.USAGE
    assert "glasshouse collateral fetch --only" in err
    assert owner.ask("fetch", "--only", policy)[0] == ExitCode.DONE
    assert owner.names == names
