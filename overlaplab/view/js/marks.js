// What lies over the bars: exposed time, the path, names, memory, what was chosen. Mixed into
// the prototype of Painter below; small pictures of colors for legends stand at the end.

const CHAIN_DRAWN = 24; // a longer chain would be a tangle

const Marks = {
  // Where communication is exposed: a strip along the top, as wide as the time is. What is
  // narrower than a pixel makes it paler, as in the static figures.
  exposed(row) {
    if (row.type !== "lane" && row.type !== "folded") return;
    const { exposures } = this.scene.panels[row.panel];
    const track = row.type === "lane" ? exposures.lane[row.lane] : exposures.rank.get(row.rank);
    const top = row.type === "lane" ? BAR[0] : 0.44;
    const y = this.y(row, top);
    const height = this.y(row, top + STRIP) - y;
    const { start, length } = track.spans;
    const [first, last] = track.within(this.scene.start, this.scene.end);
    const filled = new Float32Array(this.columns + 1); // of each column of pixels
    for (let k = first; k < last; k++) {
      const i = track.order[k];
      const left = Math.max(this.x(start[i]) - this.left, 0);
      const right = Math.min(this.x(start[i] + length[i]) - this.left, this.columns);
      for (let at = Math.floor(left); at < right; at++) {
        filled[at] += Math.min(at + 1, right) - Math.max(at, left);
      }
    }
    const c = this.context;
    const line = Math.max(1, Math.round(height / 5));
    const shade = (at) => Math.round(16 * filled[at]) / 16;
    for (let from = 0; from < this.columns;) {
      let to = from + 1;
      while (to < this.columns && shade(to) === shade(from)) to++;
      c.globalAlpha = Math.min(shade(from), 1);
      if (shade(from)) {
        c.fillStyle = SIGNS.exposed;
        c.fillRect(this.left + from, y, to - from, height);
        c.fillStyle = SIGNS.label;
        c.fillRect(this.left + from, y + height, to - from, line);
      }
      from = to;
    }
    c.globalAlpha = 1;
  },

  // Where each step but the first begins, lane by lane: the CPU is ahead.
  steps(row) {
    if (row.type !== "lane") return;
    const c = this.context;
    const d = this.ratio;
    c.strokeStyle = this.theme.muted;
    c.lineWidth = Math.max(1, Math.round(d));
    c.setLineDash([2 * d, 2 * d]);
    for (const time of this.scene.panels[row.panel].stepStarts[row.lane]) {
      const x = Math.round(this.x(time)) + 0.5;
      if (x < this.left || x > this.left + this.columns) continue;
      c.beginPath();
      c.moveTo(x, this.y(row, 0));
      c.lineTo(x, this.y(row, 1));
      c.stroke();
    }
    c.setLineDash([]);
  },

  memory(row, panel) {
    const memory = panel.memory.get(row.rank);
    const d = this.ratio;
    const c = this.context;
    const top = Math.max(...this.scene.panels.flatMap(
      (each) => [...each.memory.values()].map((one) => one.peak_bytes),
    ), 1);
    const floor = this.y(row, 0.97);
    const full = (this.y(row, 0.97) - this.y(row, 0.36));
    const right = this.left + this.columns;
    const { start, end } = this.scene;
    let k = Math.max(lowest(memory.count, (i) => memory.time[i] > start) - 1, 0);
    c.fillStyle = this.theme.memory;
    const edges = [];
    for (; k < memory.count && memory.time[k] < end; k++) {
      const from = Math.round(Math.max(this.x(memory.time[k]), this.left));
      const next = k + 1 < memory.count ? this.x(memory.time[k + 1]) : right;
      const to = Math.round(Math.min(next, right));
      const height = Math.round((full * memory.size[k]) / top);
      if (to <= from && height <= 0) continue;
      c.fillRect(from, floor - height, Math.max(to - from, 1), height);
      edges.push(from, floor - height, Math.max(to - from, 1));
    }
    c.fillStyle = SIGNS.chosen;
    const thin = Math.max(1, Math.round(d));
    for (let i = 0; i < edges.length; i += 3) {
      c.fillRect(edges[i], edges[i + 1], edges[i + 2], thin);
    }
    const peak = this.x(memory.peak_ns);
    if (peak >= this.left && peak <= right) {
      const y = floor - (full * memory.peak_bytes) / top;
      c.fillStyle = this.theme.text;
      c.beginPath();
      c.moveTo(peak - 3.5 * d, y - 5 * d);
      c.lineTo(peak + 3.5 * d, y - 5 * d);
      c.lineTo(peak, y);
      c.fill();
    }
    this.font(10);
    const text = this.fitted(memory.summary, this.columns - 8 * d);
    this.write(text, this.left + 2 * d, this.y(row, 0.16), { color: this.theme.muted });
  },

  // The black line under the chain that the step is as long as, thin where it changes lane.
  path(panel, p) {
    const { start, length, span, count } = panel.path;
    const c = this.context;
    const d = this.ratio;
    const thick = Math.max(2, Math.round(2.2 * d));
    const thin = Math.max(1, Math.round(0.7 * d));
    const places = this.placesOf(p);
    const right = this.left + this.columns;
    c.fillStyle = this.theme.path;
    let before = -1;
    const drawnTo = new Map(); // row -> right edge
    let jumped = -Infinity;
    for (let i = 0; i < count; i++) {
      if (!span[i]) continue;
      const row = places.get(panel.spans.lane[span[i] - 1]);
      if (!row) continue;
      const from = this.x(start[i]);
      const to = this.x(start[i] + length[i]);
      const y = this.y(row, PATH_AT) - Math.round(thick / 2);
      if (to >= this.left && from <= right) {
        const x = Math.round(Math.max(from, this.left));
        const width = Math.max(Math.round(Math.min(to, right)) - x, 1);
        if (x + width > (drawnTo.get(y) ?? -1)) c.fillRect(x, y, width, thick);
        drawnTo.set(y, x + width);
        // One line a column is all that shows, and a fence of them would hide the bars.
        if (before >= 0 && before !== y && x !== jumped && from >= this.left) {
          const low = Math.min(before, y);
          if (x - jumped < 6 * d) c.globalAlpha = 0.25;
          c.fillRect(x, low, thin, Math.abs(before - y) + thick);
          c.globalAlpha = 1;
          jumped = x;
        }
      }
      before = y;
    }
  },

  // Lane number -> the row that shows it now.
  placesOf(p) {
    const panel = this.scene.panels[p];
    const places = new Map();
    for (const row of this.scene.rows) {
      if (row.panel !== p) continue;
      if (row.type === "lane") places.set(row.lane, row);
      if (row.type === "folded") {
        panel.lanes.forEach(([rank], lane) => rank === row.rank && places.set(lane, row));
      }
    }
    return places;
  },

  collectNames(track, panel, y, height) {
    const { start, end } = this.scene;
    const { spans, order } = track;
    const [first, last] = track.within(start, end);
    const least = (30 * this.ratio * (end - start)) / this.columns;
    for (let k = first; k < last; k++) {
      const span = order[k];
      if (spans.length[span] < least) continue;
      const left = Math.max(this.x(spans.start[span]), this.left);
      const right = Math.min(
        this.x(spans.start[span] + spans.length[span]), this.left + this.columns,
      );
      if (right - left >= 30 * this.ratio) this.names.push([right - left, left, y, height, span, panel]);
    }
  },

  // The widest bars get their names; where bars of a lane lie over one another, one does.
  writeNames() {
    const d = this.ratio;
    const c = this.context;
    this.font(10.5);
    this.names.sort((a, b) => b[0] - a[0]);
    for (const [width, left, y, height, span, panel] of this.names.slice(0, 120)) {
      const sends = panel.spans.kind[span] === panel.sends;
      const name = panel.shortName(span);
      // A name in a box hides the hatching: it is written where some of it stays.
      const text = sends ? (this.width(name) < width - 18 * d ? name : "")
        : this.fitted(name, width - 10 * d);
      if (!text) continue;
      const half = this.width(text) / 2;
      const middle = left + width / 2;
      if (this.taken.some(([at, a, b]) => at === y && a < middle + half && middle - half < b)) {
        continue;
      }
      this.taken.push([y, middle - half, middle + half]);
      const color = this.colors.lanes[panel.spans.color[span]];
      if (sends) {
        c.fillStyle = this.theme.paper;
        c.globalAlpha = 0.88;
        const box = Math.min(height - 4 * d, 13 * d);
        c.fillRect(middle - half - 3 * d, y + (height - box) / 2, 2 * half + 6 * d, box);
        c.globalAlpha = 1;
      }
      const style = { align: "center", color: sends ? this.theme.text : color.text };
      this.write(text, middle, y + height / 2 + 0.5 * d, style);
    }
  },

  // The span under the pointer, the chosen one, and the chain of its causes.
  chosen() {
    const { hover, chosen, panels } = this.scene;
    if (chosen) {
      const panel = panels[chosen.panel];
      const places = this.placesOf(chosen.panel);
      const chain = panel.chain(chosen.span, CHAIN_DRAWN);
      const boxes = chain.map((span) => this.box(panel, span, places));
      const c = this.context;
      for (let i = boxes.length - 1; i > 0; i--) {
        const [to, from] = [boxes[i - 1], boxes[i]];
        c.globalAlpha = Math.max(1 - i / CHAIN_DRAWN, 0.15); // what is far off fades
        if (from) this.frame(from, 1.5);
        if (!to || !from) continue;
        c.beginPath();
        c.moveTo(from.x + from.width, from.y + from.height / 2);
        c.lineTo(to.x, to.y + to.height / 2);
        c.stroke();
      }
      c.globalAlpha = 1;
      if (boxes[0]) this.frame(boxes[0], 3);
    }
    if (hover) {
      const box = this.box(panels[hover.panel], hover.span, this.placesOf(hover.panel));
      if (box) this.frame(box, 1.5, this.theme.text);
    }
  },

  box(panel, span, places) {
    const row = places.get(panel.spans.lane[span]);
    if (!row) return null;
    let [top, bottom] = BAR;
    if (row.type === "folded") {
      if (panel.lane(span)[1] === "cpu") return null;
      [top, bottom] = panel.spans.kind[span] === panel.sends ? [0.44, 0.82] : [0.06, 0.44];
    }
    const x = Math.max(this.x(panel.spans.start[span]), this.left - 20);
    const right = Math.min(
      this.x(panel.spans.start[span] + panel.spans.length[span]),
      this.left + this.columns + 20,
    );
    if (right < this.left || x > this.left + this.columns) return null;
    return {
      x, y: this.y(row, top), width: Math.max(right - x, 2),
      height: this.y(row, bottom) - this.y(row, top),
    };
  },

  frame({ x, y, width, height }, thickness, color = SIGNS.chosen) {
    const c = this.context;
    c.strokeStyle = color;
    c.lineWidth = thickness * this.ratio;
    c.strokeRect(x, y, width, height);
  },

  scrollbar() {
    const { total, height, scroll, width } = this.scene;
    const view = height - HEIGHT.axis;
    if (total <= view) return;
    const d = this.ratio;
    const c = this.context;
    c.fillStyle = this.theme.muted;
    c.globalAlpha = 0.5;
    c.fillRect((width - 5) * d, (scroll / total) * view * d, 3 * d, (view / total) * view * d);
    c.globalAlpha = 1;
  },
};

Object.assign(Painter.prototype, Marks);

function hatchTile(color, ratio) {
  const size = Math.round((color.hatch.includes("/") ? 6 : 5) * ratio);
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const c = tile.getContext("2d");
  c.fillStyle = color.face;
  c.fillRect(0, 0, size, size);
  c.strokeStyle = c.fillStyle = color.edge;
  if (color.hatch.includes("/")) {
    c.lineWidth = 0.9 * ratio;
    c.beginPath();
    for (const shift of [-size, 0, size]) {
      c.moveTo(shift - 1, size + 1);
      c.lineTo(shift + size + 1, -1);
    }
    c.stroke();
  } else {
    c.beginPath();
    c.arc(size / 2, size / 2, 0.85 * ratio, 0, 2 * Math.PI);
    c.fill();
  }
  return tile;
}

// A small picture of a color, for a legend; `sign` draws an outline or a line instead.
function swatch(color, theme, sign) {
  const ratio = window.devicePixelRatio || 1;
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [22 * ratio, 10 * ratio];
  canvas.className = "olt-swatch";
  const c = canvas.getContext("2d");
  if (sign === "path") {
    c.fillStyle = THEMES[theme].path;
    c.fillRect(0, 4 * ratio, canvas.width, 2.2 * ratio);
    return canvas;
  }
  if (color) {
    c.fillStyle = color.edge;
    c.fillRect(0, 0, canvas.width, canvas.height);
    c.fillStyle = color.hatch ? c.createPattern(hatchTile(color, ratio), "repeat") : color.face;
    if (color.name === "waiting" || color.name === "idle") c.fillStyle = THEMES[theme].waiting;
    c.fillRect(ratio, ratio, canvas.width - 2 * ratio, canvas.height - 2 * ratio);
    return canvas;
  }
  c.fillStyle = SIGNS[sign];
  c.fillRect(0, 0, canvas.width, canvas.height);
  return canvas;
}
