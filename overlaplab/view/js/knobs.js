// Knobs that a kernel answers: each turn asks for the timeline of the new setting; while
// an answer is on its way only the latest wish is remembered. And the bars of the critical
// path: now, and of each setting that was kept.

const PATIENCE_MS = 2500;
const REST_MS = 700;
const BAR_HEIGHT = 20;

class Knobs {
  constructor(host, shares, config, send) {
    this.config = config;
    this.send = send;
    this.serial = 0;
    this.busy = false;
    this.inputs = config.knobs.map((knob, number) => this.slider(host, knob, number));
    this.keeps = element("div", "olt-keeps", host);
    if (config.keep.length) this.keeps.append("keep this setting as ");
    this.buttons = config.keep.map((name) => button(
      this.keeps, name, `keep the current setting as "${name}"`,
      () => this.ask({ type: "keep", name }),
    ));
    this.buttons.forEach((each, i) => { each.dataset.keep = config.keep[i]; });
    this.message = element("div", "olt-error", host);
    this.message.setAttribute("role", "alert");
    this.remark = element("div", "olt-remark", shares);
    this.canvas = element("canvas", "olt-bars", shares);
    this.canvas.setAttribute("role", "img");
    this.observer = new ResizeObserver(() => this.theme && this.paintShares(this.theme));
    this.observer.observe(shares);
  }

  slider(host, knob, number) {
    const row = element("label", "olt-knob", host);
    element("span", "olt-name", row).textContent = knob.label;
    const input = element("input", "", row);
    Object.assign(input, { type: "range", min: 0, max: knob.values.length - 1, step: 1 });
    input.dataset.knob = knob.name;
    const value = element("output", "olt-value", row);
    const say = () => {
      value.textContent = knob.values[input.value];
      input.setAttribute("aria-valuetext", knob.values[input.value]);
    };
    input.addEventListener("input", () => {
      say();
      this.turn();
    });
    // The page around may take these keys before the slider sees them.
    input.addEventListener("keydown", (event) => {
      const by = {
        ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -2, PageUp: 2,
        Home: -Infinity, End: Infinity,
      }[event.key];
      if (by === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      event.stopPropagation();
      const wanted = Math.min(Math.max(Number(input.value) + by, 0), knob.values.length - 1);
      if (wanted === Number(input.value)) return;
      input.value = wanted;
      say();
      this.turn();
    });
    return { input, say, number };
  }

  turn() {
    this.wanted = Object.fromEntries(
      this.config.knobs.map((knob, i) => [knob.name, Number(this.inputs[i].input.value)]),
    );
    if (!this.busy) this.sendWanted();
  }

  sendWanted() {
    const settings = this.wanted;
    this.wanted = null;
    this.ask({ type: "turn", settings });
    clearTimeout(this.resting);
  }

  ask(message) {
    this.busy = true;
    this.root.dataset.busy = true;
    this.serial += 1;
    clearTimeout(this.patience);
    try {
      this.send({ ...message, serial: this.serial });
      this.patience = setTimeout(() => this.complain("is busy with another cell, or has stopped"),
        PATIENCE_MS);
    } catch {
      this.complain("that made these knobs is gone");
    }
  }

  complain(why) {
    this.message.textContent = `No answer: the kernel ${why}. Run this cell again.`;
    this.root.dataset.error = this.message.textContent;
  }

  update(state, theme, root) {
    this.state = state;
    this.root = root;
    if (state.serial === this.serial) {
      this.busy = false;
      clearTimeout(this.patience);
    }
    if (!this.busy && this.wanted) {
      this.sendWanted();
    } else if (!this.busy) {
      this.inputs.forEach(({ input, say }, i) => {
        input.value = state.settings[this.config.knobs[i].name];
        say();
      });
      if (this.serial) {
        // The picture for readers without a kernel is slow to draw: once the knobs rest.
        clearTimeout(this.resting);
        this.resting = setTimeout(() => this.send({ type: "rest" }), REST_MS);
      }
    }
    this.message.textContent = state.error;
    this.buttons.forEach((each, i) => {
      const kept = state.kept[this.config.keep[i]];
      each.textContent = kept ? `\u2713 ${this.config.keep[i]}` : this.config.keep[i];
      each.title = kept ? `kept: ${kept}; click to keep the current setting instead`
        : `keep the current setting as "${this.config.keep[i]}"`;
      each.setAttribute("aria-pressed", Boolean(kept));
    });
    this.remark.textContent = state.remark;
    const shown = this.config.knobs.map(({ name, values }) => [name, values[state.settings[name]]]);
    root.dataset.knobs = JSON.stringify(Object.fromEntries(shown));
    root.dataset.kept = JSON.stringify(state.kept);
    root.dataset.error = state.error;
    root.dataset.serial = state.serial;
    root.dataset.busy = this.busy;
    this.paintShares(theme);
  }

  paintShares(theme) {
    this.theme = theme;
    const width = this.canvas.parentElement.clientWidth;
    if (!width || !this.state) return;
    const d = window.devicePixelRatio || 1;
    const { bars } = this.state;
    const height = bars.length * (BAR_HEIGHT + 4) + 18;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * d);
    this.canvas.height = Math.round(height * d);
    const c = this.canvas.getContext("2d");
    c.scale(d, d);
    c.font = `11px ${FONT}`;
    c.textBaseline = "middle";
    const longest = Math.max(...bars.map((bar) => c.measureText(bar.name).width));
    const gutter = Math.min(longest + 16, width * 0.3);
    const room = width - gutter - 12;
    bars.forEach((bar, row) => this.bar(c, bar, gutter, row * (BAR_HEIGHT + 4), room, d));
    c.fillStyle = THEMES[theme].muted;
    c.textAlign = "center";
    for (const percent of [0, 25, 50, 75, 100]) {
      const text = percent === 100 ? "100 %" : String(percent);
      const half = c.measureText(text).width / 2;
      const x = Math.min(gutter + (room * percent) / 100, width - half);
      c.fillText(text, x, height - 8);
    }
    const said = bars.map((bar) => `${bar.name}: ${bar.shares
      .filter(({ percent }) => percent).map(({ share, percent }) => `${share} ${percent} %`)
      .join(", ")}`);
    this.canvas.setAttribute("aria-label", `Shares of the critical path. ${said.join("; ")}.`);
  }

  bar(c, { name, shares, text }, gutter, y, room, d) {
    const theme = THEMES[this.theme];
    const known = themed(this.config.colors, this.theme).shares;
    c.fillStyle = theme.text;
    c.textAlign = "right";
    c.fillText(name, gutter - 8, y + BAR_HEIGHT / 2, gutter - 10);
    let left = gutter;
    for (const { share, fraction, percent } of shares) {
      const color = known.find((each) => each.name === share);
      const width = fraction * room;
      if (width <= 0) continue;
      c.fillStyle = color.edge;
      c.fillRect(left, y, width, BAR_HEIGHT);
      c.fillStyle = share === "idle" ? theme.paper : color.face;
      if (color.hatch) {
        c.fillStyle = c.createPattern(hatchTile(color, d), "repeat");
        c.fillStyle.setTransform?.(new DOMMatrix().scale(1 / d));
      }
      if (width > 2) c.fillRect(left + 0.7, y + 0.7, width - 1.4, BAR_HEIGHT - 1.4);
      const said = [`${share} ${percent} %`, `${percent} %`]
        .find((each) => c.measureText(each).width + 10 < width);
      if (said) {
        const half = c.measureText(said).width / 2 + 3;
        if (color.hatch) {
          c.fillStyle = theme.paper;
          c.globalAlpha = 0.88;
          c.fillRect(left + width / 2 - half, y + 3, 2 * half, BAR_HEIGHT - 6);
          c.globalAlpha = 1;
        }
        c.fillStyle = color.hatch || share === "idle" ? theme.text : color.text;
        c.textAlign = "center";
        c.fillText(said, left + width / 2, y + BAR_HEIGHT / 2 + 0.5);
      }
      left += width;
    }
  }

  destroy() {
    clearTimeout(this.patience);
    clearTimeout(this.resting);
    this.observer.disconnect();
  }
}
