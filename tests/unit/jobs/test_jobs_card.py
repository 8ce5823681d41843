"""A run's card: every claim with whose word it is, nothing that a name could break, readable on phone and desktop."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from glasshouse.cli import app as cli
from glasshouse.errors import Code, ExitCode
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.results.exported import ExportedRun, exported_run
from glasshouse.jobs.results.run_card import claims, page, snippet
from glasshouse.wire.states import Outcome
from simulators.owner_side import OwnersWorld

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FINGERPRINT = "0123-" * 9 + "4567"
EVIL = '<script>alert(1)</script> | [x](javascript:y) \u202egnp.exe "onload=z" & `code`'
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
_ASK = """
<script>
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument;
  const beyond = [...page.body.querySelectorAll("*")]
    .filter(one => one.getBoundingClientRect().right > page.documentElement.clientWidth + 1).map(one => one.tagName);
  const small = [...page.body.querySelectorAll("*")]
    .filter(one => parseFloat(page.defaultView.getComputedStyle(one).fontSize) < 12).map(one => one.tagName);
  const first = page.querySelector("li.claim").children;
  const found = {
    scroll: page.documentElement.scrollWidth, width: page.documentElement.clientWidth, beyond, small,
    beside: first[1].getBoundingClientRect().left > first[0].getBoundingClientRect().right,
    claims: page.querySelectorAll("li.claim").length, text: page.body.innerText,
  };
  document.querySelector("pre").textContent = JSON.stringify(found);
});
</script>
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ExportedRun:
    world = OwnersWorld()
    world.tell(world.settle(tmp_path_factory.mktemp("owner")), world.run())
    return exported_run(world.home, "latest", Identity(signing=world.owner, sealing=world.owner_hpke))


def card(run: ExportedRun, name: str = "ward-seven") -> str:
    return page(run.verdict, run.outputs, name=name, fingerprint=FINGERPRINT)


def test_every_claim_stands_beside_whose_word_it_is(run: ExportedRun) -> None:
    found = list(claims(run.verdict, run.outputs, fingerprint=FINGERPRINT))
    assert {one.maker for one in found} == {"The owner", "The owner's broker", "The runtime"}
    # What only the runtime can have seen is never said without the level.
    assert all("assurance software" in one.rests_on for one in found if one.maker == "The runtime")
    text = card(run)
    assert run.verdict.sentence in html.unescape(text)
    for one in found:
        assert html.escape(one.text) in text
        assert html.escape(one.rests_on) in text
    lines = snippet(run.verdict, run.outputs, name="x", fingerprint=FINGERPRINT)
    for output, named in zip(run.outputs, run.verdict.chain.receipt.outputs, strict=True):
        for shown in (text, lines):
            # A small file could be guessed from the digest of its plaintext.
            assert (output.sha256.hex() in shown) == (named.of == "weights")
            assert (named.sealed_sha256.hex() in shown) == (named.of == "file")
    assert "owner&#x27;s word" in text
    assert "root on that machine" in text


def test_a_run_that_did_not_complete_has_no_good_card(tmp_path: Path) -> None:
    world = OwnersWorld()
    world.tell(world.settle(tmp_path), world.run(outcome=Outcome.FAILED, code=Code.SCRIPT_FAILED))
    found = exported_run(world.home, "latest", Identity(signing=world.owner, sealing=world.owner_hpke))
    text = card(found)
    assert "verdict good" not in text
    assert "did not complete" in text
    assert "verdict good" in card_of_good(tmp_path)


def card_of_good(tmp_path: Path) -> str:
    world = OwnersWorld()
    (tmp_path / "good").mkdir()
    world.tell(world.settle(tmp_path / "good"), world.run())
    return card(exported_run(world.home, "latest", Identity(signing=world.owner, sealing=world.owner_hpke)))


class Elements(HTMLParser):
    """The elements and attributes of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_a_name_is_text_and_the_page_refers_to_nothing(run: ExportedRun) -> None:
    plain, evil = Elements(card(run)), Elements(card(run, EVIL))
    assert evil.tags == plain.tags
    assert evil.attributes == plain.attributes
    assert not plain.attributes & {"src", "href", "style", "onload"}
    assert "script" not in plain.tags
    assert "\u202e" not in card(run, EVIL)
    assert "default-src 'none'" in card(run)
    lines = snippet(run.verdict, run.outputs, name=EVIL, fingerprint=FINGERPRINT).splitlines()
    assert lines[0].startswith("## Training provenance of `` <script>")
    assert "\u202e" not in lines[0]
    table = [line for line in lines if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {3}
    assert len(table) == 2 + len(list(claims(run.verdict, run.outputs, fingerprint=FINGERPRINT)))


@pytest.mark.parametrize(
    "name",
    ["www.evil.example/a", "see https://evil.example/", "a@evil.example", "- a", "1. a", "    a", "a`b``", " a ", EVIL],
)
def test_a_name_in_a_model_card_is_code_and_never_a_link_a_list_or_a_mention(run: ExportedRun, name: str) -> None:
    """Hubs make links of addresses and mentions of names in text; in code they leave them alone."""
    outputs = [replace(run.outputs[0], name=name), *run.outputs[1:]]
    rendered = MarkdownIt().render(snippet(run.verdict, outputs, name=name, fingerprint=FINGERPRINT))
    shown = html.escape(name.replace("\u202e", "\N{REPLACEMENT CHARACTER}"))
    assert rendered.count(f"<code>{shown}</code>") == 2
    assert "evil" not in re.sub("<code>.*?</code>", "", rendered)
    assert not {"a", "ol", "pre", "script"} & Elements(rendered).tags


def test_the_command_writes_the_page_and_the_lines(tmp_path: Path) -> None:
    world = OwnersWorld()
    world.tell(world.settle(tmp_path), world.run())
    words = ["card", "latest", "-o", str(tmp_path / "card.html"), "--name", "clinic", "--home", str(world.home.path)]
    assert cli.run(words) == ExitCode.DONE
    assert "<h1>clinic</h1>" in (tmp_path / "card.html").read_text()
    assert "## Training provenance of ` clinic `" in (tmp_path / "card.md").read_text()
    assert cli.run(words) == ExitCode.USAGE  # nothing is replaced unasked
    assert cli.run([*words, "--force"]) == ExitCode.DONE


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine to look at the page with")
@pytest.mark.parametrize(("width", "beside"), [(390, False), (1280, True)])
def test_a_card_is_readable_on_a_phone_and_on_a_desktop(
    run: ExportedRun, width: int, beside: bool, tmp_path: Path
) -> None:
    # The policy of the page would keep the question out; it is taken off this copy alone.
    without = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", card(run, "a-long-name" * 12))
    frame = f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{html.escape(without)}"></iframe>'
    asking = tmp_path / "look.html"
    asking.write_text(f"<!doctype html><meta charset=utf-8>{_ASK}<pre></pre>{frame}")
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, *_FLAGS, "--disable-dev-shm-usage", "--hide-scrollbars", "--virtual-time-budget=4000",
         f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", asking.as_uri()],
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    answer = re.search(r"<pre>(\{.*?\})</pre>", done.stdout.decode(), re.DOTALL)
    assert answer is not None
    found = json.loads(html.unescape(answer.group(1)))
    assert (found["width"], found["scroll"]) == (width, width)
    assert (found["beyond"], found["small"]) == ([], [])
    assert found["beside"] is beside
    assert found["claims"] == len(list(claims(run.verdict, run.outputs, fingerprint=FINGERPRINT)))
    assert "What has no evidence" in found["text"]
