"""The report in a real browser: nothing scrolls sideways, no word of a picture is cut, one size of picture is seen."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from glasshouse.bench.report import build
from simulators.measured import measured

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--virtual-time-budget=4000",
)
# Asks the page, in a frame of a phone's or a desktop's width, what a reader would complain of.
_ASK = """
<script>
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument;
  const cut = [], small = [];
  for (const picture of page.querySelectorAll("figure svg")) {
    const box = picture.getBoundingClientRect();
    if (!box.width) continue;
    for (const words of picture.querySelectorAll("text")) {
      const at = words.getBoundingClientRect();
      const name = picture.closest("figure").id + ": " + words.textContent;
      const across = at.left > box.left - 1 && at.right < box.right + 1;
      const inside = across && at.top > box.top - 2 && at.bottom < box.bottom + 2;
      if (!inside) cut.push(name);
      if (at.height < 9) small.push(name);
    }
  }
  const seen = [...page.querySelectorAll("figure svg")].filter(one => one.getBoundingClientRect().width).length;
  const found = {
    scroll: page.documentElement.scrollWidth, width: page.documentElement.clientWidth, cut, small, seen,
    pictures: page.querySelectorAll("figure").length,
  };
  document.querySelector("pre").textContent = JSON.stringify(found);
});
</script>
"""


def _look(folder: Path, source: str, width: int) -> dict[str, object]:
    # The policy of the page would keep the question out; it is taken off this copy alone.
    without = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", source)
    frame = f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{html.escape(without)}"></iframe>'
    asking = folder / f"look-{width}.html"
    asking.write_text(f"<!doctype html><meta charset=utf-8>{_ASK}<pre></pre>{frame}")
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, *_FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", asking.as_uri()],
        capture_output=True,
        timeout=60,
        check=True,
    )
    answer = re.search(r"<pre>(\{.*?\})</pre>", done.stdout.decode())
    assert answer is not None
    found: dict[str, object] = json.loads(html.unescape(answer.group(1)))
    return found


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine to look at the page with")
@pytest.mark.parametrize(("width", "kind"), [(390, "equivalent"), (1280, "failed")])
def test_a_page_is_readable_on_a_phone_and_on_a_desktop(width: int, kind: str, tmp_path: Path) -> None:
    found = _look(tmp_path, build(measured(kind)), width)
    assert found["width"] == width
    assert found["scroll"] == width
    assert found["cut"] == []
    assert found["small"] == []
    assert found["seen"] == found["pictures"]
