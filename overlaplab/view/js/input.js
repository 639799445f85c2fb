// What pointer, wheel and keys do to a LiveTimeline. Mixed into its prototype below.

const Hands = {
  // { row, time, span } under a point of the canvas.
  under(event) {
    const { scene } = this;
    if (!scene) return null;
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top + scene.scroll];
    if (event.clientY - box.top > scene.height - HEIGHT.axis) return null;
    const row = scene.rows.find((one) => y >= one.y && y < one.y + one.height);
    const { columns, left, ratio } = this.painter;
    const perPixel = ((scene.end - scene.start) * ratio) / columns;
    const time = scene.start + (x - left / ratio) * perPixel;
    if (!row || x * ratio < left) return row ? { row, time, span: -1 } : null;
    let span = -1;
    const share = (y - row.y) / row.height;
    for (const [track, top, bottom] of tracksOf(row, scene.panels[row.panel])) {
      const near = row.type === "lane" || (share >= top && share < bottom);
      if (near) span = track.at(time, 3 * perPixel);
    }
    return { row, time, span };
  },

  press(event) {
    if (event.button !== 0) return;
    this.canvas.focus({ preventScroll: true });
    this.canvas.setPointerCapture(event.pointerId);
    this.drag = {
      x: event.clientX, y: event.clientY, start: this.start, scroll: this.scroll, moved: false,
    };
  },

  move(event) {
    if (!this.drag) {
      this.hoverAt(event);
      return;
    }
    const [dx, dy] = [event.clientX - this.drag.x, event.clientY - this.drag.y];
    if (!this.drag.moved && Math.hypot(dx, dy) < 4) return;
    this.drag.moved = true;
    this.hoverAt(null);
    this.canvas.style.cursor = "grabbing";
    const length = this.end - this.start;
    const by = (dx * this.painter.ratio * length) / this.painter.columns;
    this.scroll = this.drag.scroll - dy;
    this.show(this.drag.start - by, this.drag.start - by + length);
  },

  release(event) {
    const { drag } = this;
    this.drag = null;
    this.canvas.style.cursor = "";
    if (!drag || drag.moved) return;
    const under = this.under(event);
    if (under?.row.type === "rank") this.fold(under.row.key);
    else if (under && under.span >= 0) this.choose({ panel: under.row.panel, span: under.span });
    else this.choose(null);
  },

  doubleClick(event) {
    const under = this.under(event);
    if (under?.row.type === "rank") return;
    if (under && under.span >= 0) this.zoomTo({ panel: under.row.panel, span: under.span });
    else this.fit();
  },

  // Without a click before it, the wheel scrolls the page as everywhere else.
  wheel(event) {
    if (!event.ctrlKey && document.activeElement !== this.canvas) return;
    event.preventDefault();
    event.stopPropagation();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.pan(event.deltaX / 800);
    } else if (event.shiftKey) {
      this.scroll += event.deltaY;
      this.invalidate();
    } else {
      const time = this.under(event)?.time ?? (this.start + this.end) / 2;
      const lines = event.deltaMode === 1 ? 30 : 1;
      const power = Math.max(-1, Math.min(1, (event.deltaY * lines) / 300));
      this.zoom(2 ** power, Math.min(Math.max(time, this.start), this.end));
    }
  },

  hoverAt(event) {
    const under = event && this.under(event);
    const spot = under && under.span >= 0 ? { panel: under.row.panel, span: under.span } : null;
    this.canvas.style.cursor = under?.row.type === "rank" || spot ? "pointer" : "";
    const same = spot?.span === this.hover?.span && spot?.panel === this.hover?.panel;
    this.hover = spot;
    if (!same) this.invalidate();
    this.showTip(event, this.tipText(under, spot));
  },

  // [headline, lines] for the tooltip, or null.
  tipText(under, spot) {
    if (spot) {
      const panel = this.panels[spot.panel];
      return [panel.name(spot.span), panel.facts(spot.span)];
    }
    if (under?.row.type !== "memory" || under.time < this.start) return null;
    const memory = this.panels[under.row.panel].memory.get(under.row.rank);
    const k = lowest(memory.count, (i) => memory.time[i] > under.time) - 1;
    const held = k >= 0 ? memory.size[k] : 0;
    const kinds = k < 0 ? [] : memory.kinds.filter(([, sizes]) => sizes[k] > 0);
    return [formatBytes(held), [`rank ${under.row.rank}, at ${formatNs(under.time)}`,
      ...kinds.map(([kind, sizes]) => `${kind} ${formatBytes(sizes[k])}`),
      memory.summary]];
  },

  showTip(event, text) {
    const { tip, stage } = this;
    tip.hidden = !text;
    if (!text) return;
    const [headline, lines] = text;
    tip.replaceChildren();
    element("strong", "", tip).textContent = headline;
    lines.forEach((line) => { element("div", "", tip).textContent = line; });
    const box = stage.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const { offsetWidth: width, offsetHeight: height } = tip;
    // Beside the pointer, on the side that has room.
    const left = x + 14 + width < box.width ? x + 14 : Math.max(x - 14 - width, 0);
    // Out of our own box it would give the notebook's output a scroll bar.
    const around = this.root.getBoundingClientRect();
    const below = y + 18 + height < around.bottom - box.top;
    const top = below ? y + 18 : Math.max(y - 12 - height, around.top - box.top);
    tip.style.left = `${left}px`;
    tip.style.top = `${top}px`;
  },

  // Whether the key meant something.
  key(key, shift = false) {
    const keys = {
      "+": () => this.zoom(1 / 1.5),
      "=": () => this.zoom(1 / 1.5),
      "-": () => this.zoom(1.5),
      _: () => this.zoom(1.5),
      ArrowLeft: () => this.pan(shift ? -0.5 : -0.1),
      ArrowRight: () => this.pan(shift ? 0.5 : 0.1),
      ArrowUp: () => this.toLane(-1),
      ArrowDown: () => this.toLane(1),
      Home: () => this.show(0, this.end - this.start),
      End: () => this.show(this.length - this.end + this.start, this.length),
      0: () => this.fit(),
      f: () => this.fit(),
      "[": () => this.toSpan(-1),
      "]": () => this.toSpan(1),
      Enter: () => this.chosen && this.zoomTo(this.chosen),
      c: () => { this.showPath = !this.showPath; },
      m: () => { this.showMemory = !this.showMemory; },
      r: () => this.foldChosen(),
      a: () => this.foldAll(),
      "?": () => { this.help.hidden = !this.help.hidden; },
      Escape: () => this.escape(),
    };
    if (!(key in keys)) return false;
    keys[key]();
    this.invalidate();
    return true;
  },

  foldChosen() {
    const at = this.chosen ?? { panel: 0, span: 0 };
    const panel = this.panels[at.panel];
    if (panel.spans.count) this.fold(`${at.panel}:${panel.lane(at.span)[0]}`);
  },

  escape() {
    if (!this.help.hidden) this.help.hidden = true;
    else if (this.chosen) this.choose(null);
    else this.canvas.blur();
  },

  // The neighbour of the chosen span on its lane; the first in view if none is chosen.
  toSpan(by) {
    if (!this.chosen) {
      this.toLane(1);
      return;
    }
    const { panel: p, span } = this.chosen;
    const { order } = this.panels[p].tracks[this.panels[p].spans.lane[span]];
    const next = order[order.indexOf(span) + by];
    if (next !== undefined) this.choose({ panel: p, span: next }, true);
  },

  // The span nearest to the chosen one's middle, on the next lane up or down.
  toLane(by) {
    const lanes = this.scene.rows.filter((row) => tracksOf(row, this.panels[row.panel]).length);
    const tracks = lanes.flatMap((row) =>
      tracksOf(row, this.panels[row.panel]).map(([track]) => ({ panel: row.panel, track })));
    const filled = tracks.filter(({ track }) => track.order.length);
    let at = by > 0 ? -1 : filled.length;
    let time = (this.start + this.end) / 2;
    if (this.chosen) {
      const { panel, span } = this.chosen;
      const { start, length } = this.panels[panel].spans;
      time = Math.min(Math.max(start[span] + length[span] / 2, this.start), this.end);
      at = filled.findIndex((one) => one.panel === panel && one.track.order.includes(span));
    }
    const next = filled[at + by];
    if (next) this.choose({ panel: next.panel, span: next.track.at(time, Infinity) }, true);
  },
};

Object.assign(LiveTimeline.prototype, Hands);

function element(tag, name, parent) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  parent.append(made);
  return made;
}

function button(parent, text, title, does) {
  const made = element("button", "olt-button", parent);
  made.type = "button";
  made.textContent = text;
  made.title = title;
  made.addEventListener("click", does);
  return made;
}
