// Where everything stands: rows from top to bottom, in CSS pixels. Knows no colours.

const HEIGHT = { heading: 24, rank: 19, lane: 22, folded: 26, memory: 46, gap: 6, axis: 24 };
const BAR = [0.1, 0.78]; // top and bottom of a bar within its row, as in view/panel.py
const PATH_AT = 0.89;
const CHAR = 6.4; // CSS pixels a character, on the wide side

// The rows of all panels. `folded` has keys "panel:rank".
function layRows(panels, folded, showMemory, width) {
  const rows = [];
  let y = 2;
  const add = (row, height) => {
    rows.push({ ...row, y, height });
    y += height;
  };
  panels.forEach((panel, p) => {
    // The numbers stand beside the title if there is room for both.
    const wide = (panel.title.length + panel.numbers.length + 4) * CHAR + 24 < width;
    add({ type: "heading", panel: p, wide }, HEIGHT.heading + (wide ? 0 : 16));
    panel.remarks.forEach((text) => add({ type: "remark", panel: p, text }, 17));
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
// is half busy looks half full. The same rule as view/pieces.py, in pixels.
class Gatherer {
  constructor(numInks, names) {
    this.numInks = numInks;
    this.waiting = names.indexOf("waiting");
    this.latency = names.indexOf("latency");
    this.owed = new Float64Array(0);
  }

  // Calls paint(ink, left, right, whole) with columns from 0 to numColumns.
  gather(track, start, end, numColumns, paint) {
    const { spans, order } = track;
    const scale = numColumns / (end - start);
    if (this.owed.length < numColumns * this.numInks) {
      this.owed = new Float64Array(numColumns * this.numInks);
    }
    const touched = new Set();
    const part = (ink, from, to) => {
      const left = Math.max((from - start) * scale, 0);
      const right = Math.min((to - start) * scale, numColumns);
      if (right - left >= 1) paint(ink, left, right, true);
      else if (right > left) this.owe(touched, ink, left, right, numColumns);
    };
    const [first, last] = track.within(start, end);
    for (let k = first; k < last; k++) {
      const span = order[k];
      const from = spans.start[span];
      const to = from + spans.length[span];
      if (to <= start) continue;
      const ready = from + spans.waiting[span];
      const wire = ready + spans.latency[span];
      if (ready > from) part(this.waiting, from, ready);
      if (wire > ready) part(this.latency, ready, wire);
      if (to > wire) part(spans.ink[span], wire, to);
    }
    this.pay(touched, paint);
  }

  owe(touched, ink, left, right, numColumns) {
    const at = Math.min(Math.floor(left), numColumns - 1);
    const here = Math.min(right, at + 1) - left;
    this.owed[at * this.numInks + ink] += here;
    touched.add(at);
    if (right > at + 1 && at + 1 < numColumns) {
      this.owed[(at + 1) * this.numInks + ink] += right - at - 1;
      touched.add(at + 1);
    }
  }

  pay(touched, paint) {
    const lonely = 4; // columns without anything before it keep a short span visible
    let owed = 0;
    let previous = -lonely;
    let run = null;
    const flush = () => run && paint(run.ink, run.left, run.right, false);
    for (const at of [...touched].sort((a, b) => a - b)) {
      let best = 0;
      for (let ink = 0; ink < this.numInks; ink++) {
        const place = at * this.numInks + ink;
        owed += this.owed[place];
        if (this.owed[place] > this.owed[at * this.numInks + best]) best = ink;
      }
      const most = best;
      this.owed.fill(0, at * this.numInks, (at + 1) * this.numInks);
      if (at - previous >= lonely) owed = 1;
      previous = at;
      if (owed < 1) continue;
      owed -= 1;
      if (run && run.ink === most && run.right === at) {
        run.right = at + 1;
      } else {
        flush();
        run = { ink: most, left: at, right: at + 1 };
      }
    }
    flush();
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
