// Numbers for people, and the columns of a payload (view/payload.py) as typed arrays.
// Knows no canvas and no page.

const TIME_UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "us"], [1, "ns"]];
const BYTE_UNITS = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];
const RATE_UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
const ARRAYS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f8: Float64Array };

function fourDigits(value) {
  return Math.abs(value) >= 1000 ? value.toFixed(0) : String(Number(value.toPrecision(4)));
}

function timeUnit(ns) {
  return TIME_UNITS.find(([scale]) => Math.abs(ns) >= scale) ?? [1e6, "ms"];
}

function formatNs(ns) {
  const [scale, unit] = timeUnit(ns);
  return `${fourDigits(ns / scale)} ${unit}`;
}

function formatBytes(bytes) {
  const found = BYTE_UNITS.find(([scale]) => Math.abs(bytes) >= scale);
  return found ? `${fourDigits(bytes / found[0])} ${found[1]}` : "0 B";
}

// A rate a second: bytes or floating point operations.
function formatRate(amount, ns, unit) {
  const rate = (amount * 1e9) / ns;
  const [scale, prefix] = RATE_UNITS.find(([least]) => rate >= least) ?? [1, ""];
  return `${fourDigits(rate / scale)} ${prefix}${unit}/s`;
}

// Bytes arrive as base64 in a file, as a DataView from a kernel.
function readColumn({ type, data }, count) {
  if (type === "zero") return new Uint8Array(count);
  let bytes;
  if (typeof data === "string") {
    bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  } else {
    bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength).slice();
  }
  return new ARRAYS[type](bytes.buffer);
}

function readColumns(table) {
  const read = { count: table.count };
  for (const [name, column] of Object.entries(table)) {
    if (name !== "count") read[name] = readColumn(column, table.count);
  }
  return read;
}

// Spans in the order of their starts, with what finds those in a window at once.
class Track {
  constructor(order, spans) {
    this.order = order;
    this.spans = spans;
    // reach[k]: the latest end among the first k + 1: never falls, so it can be searched.
    this.reach = new Float64Array(order.length);
    let latest = 0;
    order.forEach((span, k) => {
      latest = Math.max(latest, spans.start[span] + spans.length[span]);
      this.reach[k] = latest;
    });
  }

  // [first, last) of `order` that may touch [start, end].
  within(start, end) {
    const first = lowest(this.order.length, (k) => this.reach[k] >= start);
    const last = lowest(this.order.length, (k) => this.spans.start[this.order[k]] > end);
    return [first, Math.max(first, last)];
  }

  // The span under a time; beside it within `slack`, the nearest. -1 if none.
  at(time, slack) {
    const [first, last] = this.within(time - slack, time + slack);
    let best = -1;
    let bestDistance = Infinity;
    for (let k = last - 1; k >= first; k--) {
      const span = this.order[k];
      const start = this.spans.start[span];
      const end = start + this.spans.length[span];
      const distance = Math.max(start - time, time - end, 0);
      // Among those under the time the shortest, which others would hide.
      const shorter = distance === 0 && bestDistance === 0 &&
        this.spans.length[span] < this.spans.length[best];
      if (distance <= slack && (distance < bestDistance || shorter)) {
        best = span;
        bestDistance = distance;
      }
    }
    return best;
  }
}

// The first of 0..count at which `is` holds, if it holds for all after it.
function lowest(count, is) {
  let low = 0;
  let high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (is(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Where each lane's communication is exposed, and each rank's: tracks by "lane" and "rank".
function exposuresOf({ exposed, lanes, ranks }) {
  const byLane = lanes.map(() => []);
  const byRank = new Map(ranks.map(({ rank }) => [rank, []]));
  for (let i = 0; i < exposed.count; i++) {
    byLane[exposed.lane[i]].push(i);
    byRank.get(lanes[exposed.lane[i]][0]).push(i);
  }
  const track = (order) => new Track(order.sort((a, b) => exposed.start[a] - exposed.start[b]), exposed);
  return {
    lane: byLane.map(track),
    rank: new Map([...byRank].map(([rank, order]) => [rank, track(order)])),
  };
}

// One timeline, ready to draw and to ask.
class Panel {
  constructor(raw, colors) {
    Object.assign(this, raw);
    this.spans = readColumns(raw.spans);
    this.exposed = readColumns(raw.exposed);
    this.path = readColumns(raw.path);
    this.memory = new Map(raw.memory.map((one) => [one.rank, {
      ...one, time: readColumn(one.time, one.count), size: readColumn(one.size, one.count),
      kinds: one.kinds.map(([kind, sizes]) => [kind, readColumn(sizes, one.count)]),
    }]));
    const { lane, kind, count } = this.spans;
    const sends = this.kinds.indexOf("communication");
    const onCpu = this.lanes.map(([, name]) => name === "cpu");
    const byLane = this.lanes.map(() => []);
    const busy = new Map(this.ranks.map(({ rank }) => [rank, { computing: [], sending: [] }]));
    for (let i = 0; i < count; i++) {
      byLane[lane[i]].push(i);
      if (onCpu[lane[i]]) continue;
      const halves = busy.get(this.lanes[lane[i]][0]);
      (kind[i] === sends ? halves.sending : halves.computing).push(i);
    }
    this.tracks = byLane.map((order) => new Track(order, this.spans));
    // A folded rank: what its device computes above, what it sends below.
    this.folded = new Map([...busy].map(([rank, halves]) => [rank, {
      computing: new Track(halves.computing, this.spans),
      sending: new Track(halves.sending, this.spans),
    }]));
    this.sends = sends;
    this.exposures = exposuresOf(this);
    this.stepStarts = this.findSteps();
    this.used = this.colorsInUse(colors);
  }

  // Of each lane the starts of all steps but the timeline's first.
  findSteps() {
    const { step, lane, start, count } = this.spans;
    const number = (i) => (step[i] ? Number(this.strings[step[i]]) : NaN);
    let first = Infinity;
    const starts = this.lanes.map(() => new Map());
    for (let i = 0; i < count; i++) {
      const at = number(i);
      if (Number.isNaN(at)) continue;
      first = Math.min(first, at);
      const known = starts[lane[i]].get(at);
      if (known === undefined || start[i] < known) starts[lane[i]].set(at, start[i]);
    }
    return starts.map((of) => [...of].filter(([at]) => at !== first).map(([, from]) => from));
  }

  colorsInUse(colors) {
    const used = new Set();
    const number = (name) => colors.lanes.findIndex((color) => color.name === name);
    for (let i = 0; i < this.spans.count; i++) {
      used.add(this.spans.color[i]);
      if (this.spans.waiting[i]) used.add(number("waiting"));
      if (this.spans.latency[i]) used.add(number("latency"));
    }
    return used;
  }

  name(span) {
    return this.strings[this.spans.name[span]];
  }

  label(span) {
    return this.strings[this.spans.label[span]];
  }

  // What is written on a bar: a message by its label, as in the static figure.
  shortName(span) {
    return (this.spans.kind[span] === this.sends && this.label(span)) || this.name(span);
  }

  lane(span) {
    return this.lanes[this.spans.lane[span]];
  }

  // The span, its cause, the cause of that ...: what had to end for it to start.
  chain(span, most = 400) {
    const seen = new Set();
    for (let at = span; at >= 0 && !seen.has(at) && seen.size < most;) {
      seen.add(at);
      at = this.spans.cause[at] - 1;
    }
    return [...seen];
  }

  // Everything known of a span, a line each.
  facts(span) {
    const s = this.spans;
    const [rank, lane] = this.lane(span);
    const kind = this.kinds[s.kind[span]];
    const length = s.length[span];
    const lines = [`rank ${rank}, ${lane}: ${kind}`];
    let takes = `starts at ${formatNs(s.start[span])}, takes ${formatNs(length)}`;
    const moving = length - s.waiting[span];
    if (s.alone[span] && s.alone[span] !== moving) {
      takes += ` (alone ${formatNs(s.alone[span])})`;
    }
    lines.push(takes);
    if (s.kind[span] === this.sends) {
      const hidden = s.hidden[span];
      lines.push(`hidden ${formatNs(hidden)}, exposed ${formatNs(length - hidden)}`);
      const parts = [["waits for peers", s.waiting[span]], ["latency", s.latency[span]]]
        .filter(([, ns]) => ns > 0);
      if (parts.length) {
        parts.push(["wire", length - s.waiting[span] - s.latency[span]]);
        lines.push(parts.map(([name, ns]) => `${name} ${formatNs(ns)}`).join(", "));
      }
    }
    if (s.bytes[span]) {
      const rate = moving > 0 ? `, ${formatRate(s.bytes[span], moving, "B")}` : "";
      lines.push(`${formatBytes(s.bytes[span])}${rate}`);
    }
    if (s.flops[span] && length > 0) lines.push(formatRate(s.flops[span], length, "FLOP"));
    const notes = [];
    if (this.label(span) && this.label(span) !== this.name(span)) notes.push(this.label(span));
    if (s.step[span]) notes.push(`step ${this.strings[s.step[span]]}`);
    if (notes.length) lines.push(notes.join(", "));
    return lines;
  }
}
