// Where everything stands: rows from top to bottom, in CSS pixels. Knows no colours.

const HEIGHT = { heading: 24, rank: 19, lane: 22, folded: 26, memory: 46, gap: 6, axis: 24 };
const BAR = [0.1, 0.78]; // top and bottom of a bar within its row, as in view/panel.py
const PATH_AT = 0.89;
const STRIP = 0.2; // of a row: what marks exposed time, along the top of a bar
const CHAR = 6.4; // CSS pixels a character, on the wide side

// The rows of all panels. `folded` has keys "panel:rank".
function layRows(panels, folded, showMemory, width) {
  const rows = [];
  let y = 2;
  const add = (row, height) => {
    rows.push({ ...row, y, height });
    y += height;
  };
  // The numbers stand beside the titles if there is room for both.
  const longest = Math.max(...panels.map((each) => each.title.length + each.numbers.length), 0);
  const wide = (longest + 4) * CHAR + 24 < width;
  panels.forEach((panel, p) => {
    // Without a title the first remark has its place.
    const [text, ...remarks] = panel.title ? [panel.title, ...panel.remarks]
      : panel.remarks.length ? panel.remarks : [""];
    add({ type: "heading", panel: p, wide, text }, HEIGHT.heading + (wide || !text ? 0 : 16));
    remarks.forEach((each) => add({ type: "remark", panel: p, text: each }, 17));
    panel.ranks.forEach(({ rank, numbers }) => {
      const key = `${p}:${rank}`;
      const isFolded = folded.has(key);
      add({ type: "rank", panel: p, rank, key, numbers, isFolded }, HEIGHT.rank);
      if (isFolded) {
        add({ type: "folded", panel: p, rank, label: "device" }, HEIGHT.folded);
      } else {
        panel.lanes.forEach(([of, lane], number) => {
          if (of === rank) {
            add({ type: "lane", panel: p, rank, lane: number, label: lane }, HEIGHT.lane);
          }
        });
        if (showMemory && panel.memory.has(rank)) {
          add({ type: "memory", panel: p, rank, label: "memory" }, HEIGHT.memory);
        }
      }
      y += HEIGHT.gap;
    });
    y += HEIGHT.gap;
  });
  return { rows, height: y };
}

// A row's bars: [track, top, bottom], the fractions of its height.
function tracksOf(row, panel) {
  if (row.type === "lane") return [[panel.tracks[row.lane], ...BAR]];
  if (row.type !== "folded") return [];
  const { computing, sending } = panel.folded.get(row.rank);
  return [[computing, 0.06, 0.44], [sending, 0.44, 0.82]];
}

// The rectangles of one track within [start, end), those narrower than a column gathered:
// a column is painted once the spans owe it a whole column of time, so that a lane that
// is half busy looks half full. The same rule as view/downsampling.py, in pixels.
class Gatherer {
  constructor(numColors, names) {
    this.numColors = numColors;
    this.waiting = names.indexOf("waiting");
    this.latency = names.indexOf("latency");
    this.owed = new Float64Array(0);
    this.touched = new Uint8Array(0);
  }

  // Calls paint(color, left, right, whole) with columns from 0 to numColumns.
  gather(track, start, end, numColumns, paint) {
    const { spans, order } = track;
    const { length, waiting, latency, color } = spans;
    const scale = numColumns / (end - start);
    if (this.touched.length < numColumns) {
      this.owed = new Float64Array(numColumns * this.numColors);
      this.touched = new Uint8Array(numColumns);
    }
    const [first, last] = track.within(start, end);
    for (let k = first; k < last; k++) {
      const span = order[k];
      const from = (spans.start[span] - start) * scale;
      const to = from + length[span] * scale;
      if (to <= 0) continue;
      const ready = waiting[span] ? from + waiting[span] * scale : from;
      const wire = latency[span] ? ready + latency[span] * scale : ready;
      if (ready > from) this.part(this.waiting, from, ready, numColumns, paint);
      if (wire > ready) this.part(this.latency, ready, wire, numColumns, paint);
      if (to > wire) this.part(color[span], wire, to, numColumns, paint);
    }
    this.pay(numColumns, paint);
  }

  // One part of a span: painted if it is as wide as a column, else owed to one or two.
  part(color, from, to, numColumns, paint) {
    const left = Math.max(from, 0);
    const right = Math.min(to, numColumns);
    if (right - left >= 1) {
      paint(color, left, right, true);
      return;
    }
    if (right <= left) return;
    const at = Math.min(Math.floor(left), numColumns - 1);
    this.owed[at * this.numColors + color] += Math.min(right, at + 1) - left;
    this.touched[at] = 1;
    if (right > at + 1 && at + 1 < numColumns) {
      this.owed[(at + 1) * this.numColors + color] += right - at - 1;
      this.touched[at + 1] = 1;
    }
  }

  pay(numColumns, paint) {
    const lonely = 4; // columns without anything before it keep a short span visible
    let owed = 0;
    let previous = -lonely;
    let [color, left, right] = [-1, 0, 0]; // a run of painted columns
    for (let at = 0; at < numColumns; at++) {
      if (!this.touched[at]) continue;
      this.touched[at] = 0;
      const place = at * this.numColors;
      let most = 0;
      for (let each = 0; each < this.numColors; each++) {
        owed += this.owed[place + each];
        if (this.owed[place + each] > this.owed[place + most]) most = each;
      }
      this.owed.fill(0, place, place + this.numColors);
      if (at - previous >= lonely) owed = 1;
      previous = at;
      if (owed < 1) continue;
      owed -= 1;
      if (color !== most || right !== at) {
        if (color >= 0) paint(color, left, right, false);
        [color, left] = [most, at];
      }
      right = at + 1;
    }
    if (color >= 0) paint(color, left, right, false);
  }
}

// Marks of a time axis: 1, 2 or 5 of some power of ten, with as many digits as they need.
function ticks(start, end, width) {
  const [scale, unit] = timeUnit(Math.max(Math.abs(end), 1));
  let spacing = 90;
  for (;;) {
    const rough = ((end - start) / Math.max(width / spacing, 1)) / scale;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * ([1, 2, 5, 10].find((m) => m * power >= rough * 0.999) ?? 10);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const longest = `${(end / scale).toFixed(digits)} ${unit}`.length * CHAR + 18;
    if (longest > spacing && spacing < 400) {
      spacing = longest;
      continue;
    }
    const marks = [];
    const first = Math.ceil(start / scale / step - 1e-9);
    for (let k = first; k * step * scale <= end * (1 + 1e-12); k++) {
      marks.push([k * step * scale, `${(k * step).toFixed(digits)} ${unit}`]);
    }
    return marks;
  }
}
