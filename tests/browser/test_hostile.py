"""Names come from outside: in a browser they are text, in each of forty places."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser

from tests.browser import hostile

# What a name could start, and what the canvases draw.
LISTEN = """
window.ran = () => { window.hits = (window.hits || 0) + 1; };
window.drawn = [];
const fill = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...where) {
  window.drawn.push(text);
  return fill.call(this, text, ...where);
};
"""
# All that a reader can see, hear or hover: texts, attributes, the details of each span.
READ = """() => {
  const found = [document.title, ...window.drawn];
  const read = () => {
    for (const each of document.querySelectorAll("body *")) {
      if (["SCRIPT", "STYLE", "NOSCRIPT"].includes(each.tagName)) continue;
      found.push(...[...each.attributes].map(({ value }) => value), each.value ?? "");
      found.push(...[...each.childNodes].map((n) => (n.nodeType === 3 ? n.data : "")));
      if (each.tagName === "PRE" || each.tagName === "H2") found.push(each.textContent);
    }
  };
  read();
  for (const { live } of document.querySelectorAll(".ol-timeline")) {
    live.panels.forEach((panel, number) => {
      for (let span = 0; span < panel.spans.count; span++) {
        live.choose({ panel: number, span }, true);
        read();
      }
      for (const { summary } of panel.memory.values()) found.push(summary);
    });
  }
  return found.map((text) => `${text ?? ""}`);
}"""


def test_no_name_runs_and_each_stands_on_the_page_as_it_is(
    browser: Browser, tmp_path: Path
) -> None:
    texts = hostile.Texts()
    path = tmp_path / "hostile.html"
    path.write_text(hostile.whole(texts, tmp_path), encoding="utf-8")
    assert len(texts.shown) >= 40  # beside those of `texts.unused`
    page = browser.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: faults.append(dialog.message))
    page.on("request", lambda request: faults.append(request.url))
    page.add_init_script(LISTEN)
    page.goto(path.as_uri())
    page.wait_for_selector("#widget .ol-timeline[data-redraws]")
    found = "\n".join("".join(text.split()) for text in page.evaluate(READ))
    missing = {
        place: text
        for place, text in texts.shown.items()
        if "".join(text.split()) not in found
    }
    page.mouse.move(300, 300)
    page.evaluate("() => new Promise((done) => requestAnimationFrame(done))")
    hits = page.evaluate("() => window.hits || 0")
    made = page.locator("img, iframe, details[ontoggle]").count()
    page.close()
    faults.remove(path.as_uri())
    assert (hits, made, faults) == (0, 0, [])
    assert missing == {}
