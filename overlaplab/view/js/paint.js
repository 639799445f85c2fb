// Rows on a canvas. Sizes in `layout.js` are CSS pixels; here all are device pixels, so
// that edges are sharp on any screen. Knows no events.

const FONT = "-apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
const SIGNS = { exposed: "#BE2026", label: "#FFF6E0", chosen: "#CC79A7" }; // as in view/colors.py
const THEMES = {
  light: {
    text: "#222222", muted: "#5f5f5f", line: "#d9d9d9", band: "#F1F1F1", path: "#000000",
    paper: "#ffffff", waiting: "#FFFFFF", memory: "#E8D5E3",
  },
  dark: {
    text: "#e6e6e6", muted: "#a8a8a8", line: "#3b3b3b", band: "#2b2b2b", path: "#ffffff",
    paper: "#161616", waiting: "#161616", memory: "#5b4054",
    // Greys recede into the page, whichever it is: waiting is nearest to it.
    colors: {
      wait: { face: "#4a4a4a", edge: "#5c5c5c", text: "#e6e6e6" },
      launch: { face: "#868686", edge: "#a5a5a5", text: "#000000" },
      host: { face: "#bdbdbd", edge: "#dddddd", text: "#000000" },
    },
  },
};

// The colors of a theme, lanes' and shares'.
function themed(colors, theme) {
  const { colors: other = {} } = THEMES[theme];
  const change = (color) => ({ ...color, ...other[color.name] });
  return { lanes: colors.lanes.map(change), shares: colors.shares.map(change) };
}

class Painter {
  constructor(canvas, colors) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.plain = colors;
    this.widths = new Map();
    this.patterns = new Map();
    this.gatherer = new Gatherer(colors.lanes.length, colors.lanes.map((color) => color.name));
  }

  // scene: { panels, rows, width, height, gutter, scroll, start, end, path, hover, chosen,
  //          theme, paper, ratio }, lengths in CSS pixels.
  paint(scene) {
    const { ratio: d, width, height } = scene;
    if (this.canvas.width !== Math.round(width * d)) this.canvas.width = Math.round(width * d);
    if (this.canvas.height !== Math.round(height * d)) {
      this.canvas.height = Math.round(height * d);
    }
    if (this.ratio !== d) this.patterns.clear();
    this.colors = themed(this.plain, scene.theme);
    this.ratio = d;
    this.scene = scene;
    this.theme = { ...THEMES[scene.theme], paper: scene.paper };
    this.left = Math.round(scene.gutter * d);
    this.columns = Math.max(Math.round(width * d) - this.left - Math.round(10 * d), 10);
    this.bottom = Math.round((height - HEIGHT.axis) * d);
    const c = this.context;
    c.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.names = [];
    this.taken = [];
    this.axis();
    c.save();
    c.beginPath();
    c.rect(0, 0, this.canvas.width, this.bottom);
    c.clip();
    const visible = scene.rows.filter(
      (row) => row.y + row.height > scene.scroll && row.y < scene.scroll + height,
    );
    this.bars = this.colors.lanes.map(() => ({ plain: [], framed: [] }));
    this.strips = new Strips(this.columns, visible.length * 2, this.colors.lanes);
    visible.forEach((row) => this.row(row));
    this.fillBars();
    visible.forEach((row) => this.exposed(row));
    visible.forEach((row) => this.steps(row));
    if (scene.path) scene.panels.forEach((panel, p) => this.path(panel, p));
    visible.forEach((row) => this.head(row));
    this.writeNames();
    this.chosen();
    c.restore();
    this.scrollbar();
  }

  x(time) {
    const { start, end } = this.scene;
    return this.left + ((time - start) / (end - start)) * this.columns;
  }

  y(row, fraction = 0) {
    return Math.round((row.y + row.height * fraction - this.scene.scroll) * this.ratio);
  }

  font(size, bold = false) {
    this.context.font = `${bold ? "600 " : ""}${size * this.ratio}px ${FONT}`;
  }

  width(text) {
    const key = this.context.font + text;
    let width = this.widths.get(key);
    if (width === undefined) {
      if (this.widths.size > 5000) this.widths.clear();
      width = this.context.measureText(text).width;
      this.widths.set(key, width);
    }
    return width;
  }

  // The text, cut to a width; "" where not even seven letters of it fit.
  fitted(text, most) {
    if (this.width(text) <= most) return text;
    const letters = Math.floor((most / this.width(text)) * text.length) - 1;
    if (letters < 7) return "";
    return `${text.slice(0, letters)}\u2026`;
  }

  write(text, x, y, { color = this.theme.text, align = "left" } = {}) {
    const c = this.context;
    c.fillStyle = color;
    c.textAlign = align;
    c.textBaseline = "middle";
    c.fillText(text, x, y);
  }

  axis() {
    const { scene, ratio: d } = this;
    const c = this.context;
    this.font(11);
    c.fillStyle = this.theme.line;
    c.fillRect(this.left, this.bottom, this.columns, Math.max(1, Math.round(d)));
    const right = this.left + this.columns;
    const rows = scene.rows.filter((row) => "label" in row);
    for (const [time, text] of ticks(scene.start, scene.end, this.columns / d)) {
      const x = Math.round(this.x(time));
      const thin = Math.max(1, Math.round(d / 2));
      c.fillStyle = this.theme.line;
      c.fillRect(x, this.bottom, thin, Math.round(4 * d));
      for (const row of rows) {
        const [top, end] = [Math.max(this.y(row), 0), Math.min(this.y(row, 1), this.bottom)];
        if (top < end) c.fillRect(x, top, thin, end - top);
      }
      const half = this.width(text) / 2;
      const at = Math.min(Math.max(x, this.left + half), right - half + 6 * d);
      this.write(text, at, this.bottom + 13 * d, { color: this.theme.muted, align: "center" });
    }
  }

  // A line of text on paper, over the grid and the path.
  note(text, x, y, style = {}) {
    const c = this.context;
    const width = this.width(text);
    const d = this.ratio;
    c.fillStyle = this.theme.paper;
    c.fillRect((style.align === "right" ? x - width : x) - 3 * d, y - 8 * d, width + 6 * d, 16 * d);
    this.write(text, x, y, style);
  }

  head(row) {
    const panel = this.scene.panels[row.panel];
    const d = this.ratio;
    const right = this.left + this.columns;
    const { muted } = this.theme;
    if (row.type === "heading") {
      const titled = Boolean(panel.title);
      const y = this.y(row) + 12 * d;
      this.font(titled ? 13 : 11, titled);
      const color = titled ? this.theme.text : muted;
      if (row.text) this.note(this.fitted(row.text, right - 8 * d), 8 * d, y, { color });
      this.font(12);
      if (row.wide) this.note(panel.numbers, right, y, { align: "right" });
      else this.note(panel.numbers, 8 * d, row.text ? y + 16 * d : y);
    } else if (row.type === "remark") {
      this.font(11);
      this.note(this.fitted(row.text, right - 8 * d), 8 * d, this.y(row, 0.5), { color: muted });
    } else if (row.type === "rank") {
      this.font(11.5, true);
      const name = `${row.isFolded ? "\u25b8" : "\u25be"} rank ${row.rank}`;
      this.note(name, 8 * d, this.y(row, 0.5));
      const before = 8 * d + this.width(name) + 16 * d;
      this.font(11);
      if (panel.ranks.length > 1 && before + this.width(row.numbers) < right) {
        this.note(row.numbers, right, this.y(row, 0.5), { color: muted, align: "right" });
      }
    }
  }

  row(row) {
    const panel = this.scene.panels[row.panel];
    const d = this.ratio;
    if (!("label" in row)) return;
    this.font(11);
    const label = this.fitted(row.label, this.left - 14 * d);
    const middle = row.type === "memory" ? 0.65 : 0.45;
    this.write(label, this.left - 8 * d, this.y(row, middle), { align: "right" });
    if (row.type === "memory") this.memory(row, panel);
    else this.lane(row, panel);
  }

  lane(row, panel) {
    const { start, end } = this.scene;
    const ends = panel.ranks.find(({ rank }) => rank === row.rank);
    const from = Math.max(this.x(ends.start_ns), this.left);
    const to = Math.min(this.x(ends.end_ns), this.left + this.columns);
    const c = this.context;
    if (to > from) {
      c.fillStyle = this.theme.band;
      c.fillRect(from, this.y(row, BAR[0]), to - from, this.y(row, BAR[1]) - this.y(row, BAR[0]));
    }
    for (const [track, top, bottom] of tracksOf(row, panel)) {
      const y = this.y(row, top);
      const height = this.y(row, bottom) - y;
      const strip = this.strips.add(y, height);
      this.gatherer.gather(track, start, end, this.columns, (color, left, right, whole) => {
        const [from, to] = [Math.round(left), Math.max(Math.round(right), Math.round(left) + 1)];
        // Between bars of a few pixels an outline would look like idle time, and
        // hatching like noise.
        if (to - from < 5 * this.ratio) {
          this.strips.paint(strip, from, to, color);
          return;
        }
        this.bars[color][whole ? "framed" : "plain"].push(this.left + from, y, to - from, height);
      });
      if (row.type === "lane") this.collectNames(track, panel, y, height);
    }
  }

  fillBars() {
    const c = this.context;
    const edge = Math.max(1, Math.round(this.ratio * 0.75));
    this.strips.draw(c, this.left);
    this.bars.forEach(({ plain, framed }, number) => {
      const color = this.colors.lanes[number];
      fillAll(c, color.edge, framed);
      fillAll(c, this.fill(color), plain);
      fillAll(c, this.fill(color), framed, edge);
    });
  }

  // A colour, or a tile with the hatching of the static figures.
  fill(color) {
    if (!color.hatch) return color.name === "waiting" ? this.theme.waiting : color.face;
    const key = color.face + color.hatch;
    if (!this.patterns.has(key)) {
      this.patterns.set(key, this.context.createPattern(hatchTile(color, this.ratio), "repeat"));
    }
    return this.patterns.get(key);
  }
}

// What is too narrow for an outline: one line of pixels a lane, drawn as high as its bars.
// A canvas takes ten thousand rectangles in tens of milliseconds, these in one or two.
class Strips {
  constructor(columns, most, colors) {
    this.image = new ImageData(columns, Math.max(most, 1));
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.places = [];
    this.values = colors.map((color) => {
      const hex = color.name === "waiting" ? color.edge : color.face;
      const [red, green, blue] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
      return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
    });
  }

  add(y, height) {
    return this.places.push([y, height]) - 1;
  }

  paint(strip, from, to, color) {
    const { width } = this.image;
    this.pixels.fill(this.values[color], strip * width + from, strip * width + Math.min(to, width));
  }

  draw(context, left) {
    const { width, height } = this.image;
    const canvas = new OffscreenCanvas(width, height);
    canvas.getContext("2d").putImageData(this.image, 0, 0);
    context.imageSmoothingEnabled = false;
    this.places.forEach(([y, tall], strip) => {
      context.drawImage(canvas, 0, strip, width, 1, left, y, width, tall);
    });
  }
}

// Rectangles of [x, y, width, height, x, ...], each smaller by `inset` on all sides.
function fillAll(c, style, boxes, inset = 0) {
  c.fillStyle = style;
  for (let i = 0; i < boxes.length; i += 4) {
    c.fillRect(
      boxes[i] + inset, boxes[i + 1] + inset,
      boxes[i + 2] - 2 * inset, boxes[i + 3] - 2 * inset,
    );
  }
}
