// The timeline on a page: what the pointer and the keys do, and what the page says of it.
// Everything a test may ask stands in data-* attributes of the root element.

const MOST_HEIGHT = 640;
const LEAST_WINDOW_NS = 10;
const UNFOLDED_LANES = 24; // more than fit on a screen start folded
const KEYS = [
  ["+ \u2212", "zoom (also the wheel, after a click)"],
  ["\u2190 \u2192", "pan (also drag); with Shift, by half a window"],
  ["0 or f", "fit everything"],
  ["[ ]", "previous, next span of the lane"],
  ["\u2191 \u2193", "a span of the lane above, below"],
  ["Enter", "zoom to the chosen span (also double click)"],
  ["c", "critical path on, off"],
  ["m", "memory on, off"],
  ["r", "fold the rank of the chosen span (also a click on its name)"],
  ["a", "fold all ranks, unfold all"],
  ["Esc", "choose nothing"],
];

class LiveTimeline {
  constructor(root, { config, state }, send) {
    this.root = root;
    root.live = this; // for tests and the curious
    this.words = { ns: formatNs, bytes: formatBytes };
    this.config = config;
    this.send = send;
    this.folded = new Set();
    this.known = new Set(); // ranks that were seen: new ones start as there is room
    this.showPath = true;
    this.showMemory = true;
    this.hover = this.chosen = null;
    this.scroll = 0;
    this.fitted = true;
    this.cleanups = [];
    this.build();
    this.painter = new Painter(this.canvas, config.colors);
    this.update(state);
    this.listen();
  }

  build() {
    const { root } = this;
    root.classList.add("ol-timeline");
    // JupyterLab's shortcuts would take arrow keys and letters from us.
    root.setAttribute("data-lm-suppress-shortcuts", "true");
    const knobs = this.config.knobs?.length ? element("div", "olt-knobs", root) : null;
    const bar = element("div", "olt-bar", root);
    const stage = element("div", "olt-stage", root);
    this.stage = stage;
    this.canvas = element("canvas", "olt-canvas", stage);
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.tip = element("div", "olt-tip", stage);
    this.tip.hidden = true;
    this.buttons = {
      fit: button(bar, "fit", "show everything (0)", () => this.fit()),
      out: button(bar, "\u2212", "zoom out (-)", () => this.zoom(1.5)),
      in: button(bar, "+", "zoom in (+)", () => this.zoom(1 / 1.5)),
      path: button(bar, "critical path", "critical path (c)", () => this.key("c")),
      memory: button(bar, "memory", "memory lanes (m)", () => this.key("m")),
      fold: button(bar, "fold", "fold all ranks, unfold all (a)", () => this.key("a")),
      keys: button(bar, "keys", "what the keys do (?)", () => this.key("?")),
    };
    this.hint = element("span", "olt-hint", bar);
    this.hint.textContent = "click, then scroll to zoom";
    this.help = element("dl", "olt-help", root);
    this.help.hidden = true;
    for (const [key, does] of KEYS) {
      element("dt", "", this.help).textContent = key;
      element("dd", "", this.help).textContent = does;
    }
    this.legend = element("div", "olt-legend", root);
    this.details = element("div", "olt-details", root);
    this.details.setAttribute("aria-live", "polite");
    if (knobs) {
      this.knobs = new Knobs(knobs, element("div", "olt-shares", root), this.config, this.send);
    }
  }

  // Take what a kernel sent, or the first state. The window stays where it was zoomed to.
  update(state) {
    this.panels = state.panels.map((raw) => new Panel(raw, this.config.colors));
    this.length = Math.max(...this.panels.map((panel) => panel.length_ns), 1);
    this.hover = null;
    if (this.chosen && !(this.panels[this.chosen.panel]?.spans.count > this.chosen.span)) {
      this.chosen = null;
    }
    this.foldNew();
    if (this.fitted || this.start >= this.length) this.fit();
    this.buttons.memory.hidden = !this.panels.some((panel) => panel.memory.size);
    this.knobs?.update(state, this.theme ?? this.findTheme(), this.root);
    this.tellDetails();
    this.theme = "";
    this.invalidate();
  }

  // Ranks that were never seen: the first few open, as many as have room.
  foldNew() {
    this.panels.forEach((panel, p) => {
      let room = UNFOLDED_LANES / this.panels.length;
      panel.ranks.forEach(({ rank }, place) => {
        const key = `${p}:${rank}`;
        room -= panel.lanes.filter(([of]) => of === rank).length;
        if (!this.known.has(key) && room < 0 && place > 0) this.folded.add(key);
        this.known.add(key);
      });
    });
  }

  listen() {
    const on = (target, name, does, options) => {
      target.addEventListener(name, does, options);
      this.cleanups.push(() => target.removeEventListener(name, does, options));
    };
    const { canvas } = this;
    on(canvas, "pointerdown", (event) => this.press(event));
    on(canvas, "pointermove", (event) => this.move(event));
    on(canvas, "pointerup", (event) => this.release(event));
    on(canvas, "pointerleave", () => this.hoverAt(null));
    on(canvas, "dblclick", (event) => this.doubleClick(event));
    on(canvas, "wheel", (event) => this.wheel(event), { passive: false });
    on(canvas, "keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (this.key(event.key, event.shiftKey)) {
        event.preventDefault();
        event.stopPropagation();
      }
    });
    on(canvas, "focus", () => { this.hint.textContent = ""; });
    on(canvas, "blur", () => { this.hint.textContent = "click, then scroll to zoom"; });
    on(window, "resize", () => this.invalidate()); // also zooming of the browser
    const dark = window.matchMedia("(prefers-color-scheme: dark)");
    on(dark, "change", () => this.invalidate());
    const seen = new ResizeObserver(() => this.invalidate());
    seen.observe(this.stage);
    const themes = new MutationObserver(() => this.invalidate());
    for (const watched of [document.body, document.documentElement]) {
      themes.observe(watched, { attributes: true });
    }
    this.cleanups.push(() => seen.disconnect(), () => themes.disconnect());
  }

  destroy() {
    this.cleanups.forEach((undo) => undo());
    this.knobs?.destroy();
  }

  // JupyterLab's theme, else VS Code's, else the page's own word, else the system's.
  findTheme() {
    const { body, documentElement } = document;
    const lab = body.getAttribute("data-jp-theme-light");
    if (lab) return lab === "true" ? "light" : "dark";
    const code = body.getAttribute("data-vscode-theme-kind");
    if (code) return code.includes("light") ? "light" : "dark";
    const said = documentElement.getAttribute("data-theme");
    if (said === "light" || said === "dark") return said;
    return window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  }

  invalidate() {
    this.waiting ??= requestAnimationFrame(() => {
      this.waiting = null;
      this.paint();
    });
  }

  paint() {
    const width = this.stage.clientWidth;
    if (!width || !this.root.isConnected) return; // hidden: painted once it is not
    const began = performance.now();
    const theme = this.findTheme();
    if (theme !== this.theme) {
      this.theme = theme;
      this.root.dataset.theme = theme;
      this.paper = getComputedStyle(this.root).backgroundColor;
      this.tellLegend();
      this.knobs?.paintShares(theme);
    }
    const { rows, height } = layRows(this.panels, this.folded, this.showMemory, width);
    const longest = Math.max(...rows.map((row) => (row.label ?? "").length), 5);
    const gutter = Math.round(Math.min(longest * CHAR + 26, Math.max(width * 0.24, 84)));
    const shown = Math.min(height, MOST_HEIGHT) + HEIGHT.axis;
    this.canvas.style.height = `${shown}px`;
    this.scroll = Math.max(0, Math.min(this.scroll, height - (shown - HEIGHT.axis)));
    this.scene = {
      panels: this.panels, rows, width, height: shown, total: height, gutter,
      scroll: this.scroll, start: this.start, end: this.end, path: this.showPath,
      hover: this.hover, chosen: this.chosen, theme, paper: this.paper,
      ratio: window.devicePixelRatio || 1,
    };
    this.painter.paint(this.scene);
    this.report(performance.now() - began);
  }

  // What tests and screen readers learn.
  report(frameMs) {
    const { root, panels } = this;
    const [first] = panels;
    Object.assign(root.dataset, {
      spans: panels.reduce((sum, panel) => sum + panel.num_spans, 0),
      panels: panels.length,
      windowStartNs: Math.round(this.start),
      windowEndNs: Math.round(this.end),
      stepNs: first.step_ns,
      frameMs: frameMs.toFixed(2),
      redraws: (this.redraws = (this.redraws ?? 0) + 1),
      selected: this.chosen ? panels[this.chosen.panel].spans.index[this.chosen.span] : "",
      selectedPanel: this.chosen ? this.chosen.panel : "",
      hover: this.hover ? panels[this.hover.panel].spans.index[this.hover.span] : "",
      folded: [...this.folded].map((key) => (panels.length > 1 ? key : key.split(":")[1])).join(" "),
      path: this.showPath,
      memory: this.showMemory,
    });
    const said = panels.map((panel) => `${panel.title || "timeline"}: ${panel.numbers}`);
    this.canvas.setAttribute(
      "aria-label",
      `Timeline, ${root.dataset.spans} spans on ${first.ranks.length} ranks. ` +
        `${said.join("; ")}. Shown: ${formatNs(this.start)} to ${formatNs(this.end)}. ` +
        "Press ? for the keys.",
    );
    this.buttons.path.setAttribute("aria-pressed", this.showPath);
    this.buttons.memory.setAttribute("aria-pressed", this.showMemory);
    this.buttons.fold.textContent = this.folded.size ? "unfold" : "fold";
  }

  tellLegend() {
    const used = new Set(this.panels.flatMap((panel) => [...panel.used]));
    this.legend.replaceChildren();
    const entry = (color, text, sign) => {
      const item = element("span", "olt-entry", this.legend);
      item.append(swatch(color, this.theme, sign), text);
    };
    const { lanes } = themed(this.config.colors, this.theme);
    lanes.forEach((color, number) => used.has(number) && entry(color, color.label));
    if (this.panels.some((panel) => panel.exposed.count)) entry(null, "exposed", "exposed");
    entry(null, "critical path", "path");
  }

  // The chosen span in words, and what had to end before it could start.
  tellDetails() {
    this.details.replaceChildren();
    if (!this.chosen) return;
    const panel = this.panels[this.chosen.panel];
    const [span, ...causes] = panel.chain(this.chosen.span);
    element("strong", "", this.details).textContent = panel.name(span);
    const facts = element("span", "", this.details);
    facts.textContent = ` ${panel.facts(span).join(" \u00b7 ")}`;
    const chain = element("div", "olt-chain", this.details);
    chain.append(causes.length ? "started after " : "nothing known had to end before it");
    for (const cause of causes.slice(0, 8)) {
      const [rank, lane] = panel.lane(cause);
      const text = `${panel.shortName(cause)} (rank ${rank} ${lane})`;
      button(chain, text, panel.facts(cause).join("\n"), () => {
        this.choose({ panel: this.chosen.panel, span: cause }, true);
      });
      chain.append(" \u2190 ");
    }
    if (causes.length > 8) chain.append(`${causes.length - 8} more`);
    else chain.lastChild?.nodeValue === " \u2190 " && chain.lastChild.remove();
  }

  fit() {
    [this.start, this.end] = [0, this.length];
    this.fitted = true;
    this.invalidate();
  }

  // Show [start, end), kept within the timeline.
  show(start, end) {
    const length = Math.min(Math.max(end - start, LEAST_WINDOW_NS), this.length);
    this.start = Math.min(Math.max(start, 0), this.length - length);
    this.end = this.start + length;
    this.fitted = length >= this.length;
    this.invalidate();
  }

  zoom(factor, around = (this.start + this.end) / 2) {
    const length = Math.max((this.end - this.start) * factor, LEAST_WINDOW_NS);
    const share = (around - this.start) / (this.end - this.start);
    this.show(around - share * length, around + (1 - share) * length);
  }

  pan(share) {
    const by = share * (this.end - this.start);
    this.show(this.start + by, this.end + by);
  }

  choose(which, reveal = false) {
    this.chosen = which;
    if (which && reveal) this.reveal(which);
    this.tellDetails();
    this.invalidate();
  }

  // Bring a span into view: unfold its rank, pan and scroll as little as needed.
  reveal({ panel: p, span }) {
    const panel = this.panels[p];
    const [rank, lane] = panel.lane(span);
    if (lane === "cpu") this.folded.delete(`${p}:${rank}`);
    const start = panel.spans.start[span];
    const end = start + panel.spans.length[span];
    if (end < this.start || start > this.end) {
      const half = (this.end - this.start) / 2;
      this.show((start + end) / 2 - half, (start + end) / 2 + half);
    }
    const { rows } = layRows(this.panels, this.folded, this.showMemory, this.stage.clientWidth);
    const row = rows.find((one) => one.panel === p && one.rank === rank &&
      (one.type === "folded" || one.lane === panel.spans.lane[span]));
    if (!row) return;
    const view = this.scene.height - HEIGHT.axis;
    if (row.y < this.scroll) this.scroll = row.y;
    if (row.y + row.height > this.scroll + view) this.scroll = row.y + row.height - view;
  }

  // Zoom so that a span takes a third of the window.
  zoomTo({ panel, span }) {
    const { start, length } = this.panels[panel].spans;
    this.show(start[span] - length[span], start[span] + 2 * length[span]);
  }

  fold(key) {
    if (this.folded.has(key)) this.folded.delete(key);
    else this.folded.add(key);
    this.invalidate();
  }

  foldAll() {
    if (this.folded.size) {
      this.folded.clear();
    } else {
      this.panels.forEach((panel, p) => {
        panel.ranks.forEach(({ rank }) => this.folded.add(`${p}:${rank}`));
      });
    }
    this.invalidate();
  }
}
