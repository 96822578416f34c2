// How lanes are drawn: one drawing, by a pen that fills a canvas, or by one that writes an SVG. Only what is in the
// window is looked at, and kinds that share pixels get as many as their time has.

const AXIS = 26; // heights, in pixels
const TOP = 6;
const STRIPS = 4; // of other streams than compute: one for each kind that runs there
const LETTER = 6.4; // width of a letter, about

/** Where things are: sizes shrink as there are more lanes. Lanes without micro-batches in flight are taller. */
export function geometry(answer, width) {
  const count = answer.lanes.length;
  const [bar, flight, strip, gap] = !answer.most ? [34, 0, 4, 8] : count <= 8 ? [26, 15, 3, 9] : count <= 16 ? [18, 11, 2, 7] : [11, 7, 1, 5];
  const side = width < 620 ? 26 : 116;
  const step = bar + flight + STRIPS * strip + 3 + gap;
  const axis = TOP + count * step;
  return { width, side, inner: Math.max(1, width - side - 1), bar, flight, strip, gap, step, axis, height: axis + AXIS };
}

/** The lane at a height, and which part of it; null outside all lanes. */
export function laneAt(geo, count, y) {
  const lane = Math.floor((y - TOP) / geo.step);
  if (lane < 0 || lane >= count) return null;
  const inside = y - TOP - lane * geo.step;
  return { lane, others: inside > geo.bar && inside <= geo.bar + 2 + STRIPS * geo.strip };
}

/** The number of the block or span that holds a moment; the last one before it if there is none. */
export function indexAt(blocks, moment) {
  let low = 0;
  let high = blocks.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (blocks[middle].start <= moment) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** How many micro-batches are in flight at a moment. */
export function flightAt(flight, moment) {
  let count = 0;
  for (let i = 0; i < flight.length && flight[i] <= moment; i += 2) count = flight[i + 1];
  return count;
}

/** Draw lanes between two moments. `hot`: the lane and block that are looked at; `at`: a moment, or null; `op`: whose blocks are marked. */
export function draw(pen, answer, geo, { from, to }, hot, at, op = -1) {
  const scale = geo.inner / (to - from);
  const x = (moment) => geo.side + (moment - from) * scale;
  grid(pen, answer, geo, from, to, x);
  answer.lanes.forEach((lane, i) => {
    const y = TOP + i * geo.step;
    label(pen, geo, lane, y);
    pen.clip(geo.side, y, geo.inner, geo.step);
    intervals(pen, answer, lane, geo, from, to, scale, y);
    if (op >= 0) marks(pen, lane, geo, from, to, scale, y + geo.bar, op);
    spans(pen, answer, lane, geo, from, to, scale, y + geo.bar + 2);
    if (answer.most) flight(pen, answer, lane, geo, from, to, x, y + geo.bar + 3 + STRIPS * geo.strip);
    if (hot?.lane === i && lane.blocks[hot.block]) {
      const block = lane.blocks[hot.block];
      pen.frame(x(block.start), y, Math.max(1, (block.end - block.start) * scale), geo.bar, "ink");
    }
    pen.unclip();
  });
  if (at !== null && at >= from && at <= to) pen.line(x(at), 0, x(at), geo.axis, "ink");
}

function label(pen, geo, lane, y) {
  const narrow = geo.side < 60;
  const text = narrow ? (lane.short ?? String(lane.pp_rank)) : lane.label.split(" (")[0];
  pen.text(0, y + geo.bar / 2, text, lane.shown ? "ink" : "ink-2", "start", lane.shown);
  if (!narrow && geo.bar > 20) pen.text(0, y + geo.bar + 10, lane.gpus, "ink-3", "start");
}

function grid(pen, answer, geo, from, to, x) {
  const fits = Math.max(2, Math.floor(geo.inner / 90));
  const marks = answer.marks.findLast((some) => inside(answer, some, from, to).length <= Math.max(8, fits)) ?? answer.marks[0];
  let last = -Infinity;
  for (const mark of inside(answer, marks, from, to)) {
    const at = x(mark.at * answer.end);
    pen.line(at, TOP, at, geo.axis + 3, "line");
    const wide = mark.text.length * LETTER;
    if (at - wide / 2 < last + 8 || at + wide / 2 > geo.width) continue;
    pen.text(at, geo.axis + 14, mark.text, "ink-3", at - wide / 2 < geo.side - 12 ? "start" : "middle");
    last = at + wide / 2;
  }
}

const inside = (answer, marks, from, to) => marks.filter((mark) => mark.at * answer.end >= from && mark.at * answer.end <= to);

function intervals(pen, answer, lane, geo, from, to, scale, y) {
  const { blocks } = lane;
  const row = new Row(pen, answer.kinds, geo, y);
  for (let b = indexAt(blocks, from); b < blocks.length && blocks[b].start < to; b += 1) {
    const block = blocks[b];
    const left = geo.side + (block.start - from) * scale;
    const wide = (block.end - block.start) * scale;
    if (wide < 1) row.add(left, left + wide, block.kind);
    else {
      const end = left + wide - (wide > 5 ? 1 : 0); // blocks that can be told apart have a gap between them
      row.begin();
      let at = left;
      for (let i = 0; i < block.intervals.length && at < end; i += 2) {
        const next = at + block.intervals[i + 1] * scale;
        row.add(at, Math.min(next, end), block.intervals[i]);
        at = next;
      }
      row.begin();
    }
    const start = Math.max(left, geo.side);
    if (block.name && geo.bar > 10 && Math.min(left + wide, geo.width) - start > block.name.length * LETTER + 12) row.name(start + 5, block);
  }
  row.end();
}

/** A line under the blocks of an op, which is drawn once for those that share a pixel. */
function marks(pen, lane, geo, from, to, scale, y, op) {
  let end = -1;
  for (let b = indexAt(lane.blocks, from); b < lane.blocks.length && lane.blocks[b].start < to; b += 1) {
    const block = lane.blocks[b];
    if (block.op !== op) continue;
    const left = geo.side + (block.start - from) * scale;
    const right = Math.max(left + 1.5, geo.side + (block.end - from) * scale);
    if (right <= end) continue;
    pen.rect(left, y, right - left, 3, "ink");
    end = right;
  }
}

/** A bar, pixel by pixel: kinds that share one get pixels in turn, so that each has as many as its time. */
class Row {
  constructor(pen, kinds, geo, y) {
    Object.assign(this, { pen, kinds, geo, y, pixel: -1, filled: 0, run: { kind: -1, from: 0, to: 0 }, names: [] });
    this.sums = new Float64Array(kinds.length);
  }

  /** Take time of a kind, from the left to the right of a bar. */
  add(left, right, kind) {
    const from = Math.max(left, this.geo.side);
    const to = Math.min(right, this.geo.width);
    if (to <= from) return;
    const first = Math.floor(from);
    const last = Math.floor(to);
    if (first !== this.pixel) this.#flush();
    this.pixel = first;
    this.#fill(kind, Math.min(to, first + 1) - from);
    if (last === first) return;
    this.#flush();
    if (last > first + 1) this.#draw(first + 1, last, kind);
    this.pixel = last;
    this.#fill(kind, to - last);
  }

  /** What is left of the pixels before is not carried on. */
  begin() {
    this.#flush();
    this.sums.fill(0);
  }

  /** A text over the bar. */
  name(x, block) {
    this.names.push([x, block]);
  }

  /** Draw all that is left. */
  end() {
    this.#flush();
    this.#draw(0, 0, -1);
    const middle = this.y + this.geo.bar / 2;
    for (const [x, block] of this.names) {
      const { name } = this.kinds[block.kind]; // on its own colour: other kinds may be below it
      this.pen.rect(x - 3, middle - 7, block.name.length * LETTER + 7, 14, name);
      this.pen.text(x, middle, block.name, `on-${name}`, "start");
    }
  }

  #fill(kind, wide) {
    this.sums[kind] += wide;
    this.filled += wide;
  }

  #flush() {
    if (this.filled <= 0) return;
    let most = 0;
    for (let kind = 1; kind < this.sums.length; kind += 1) if (this.sums[kind] > this.sums[most]) most = kind;
    this.sums[most] -= this.filled;
    this.filled = 0;
    this.#draw(this.pixel, this.pixel + 1, most);
  }

  #draw(from, to, kind) {
    const { run } = this;
    if (run.kind === kind && run.to === from) run.to = to;
    else {
      if (run.kind >= 0) this.pen.rect(run.from, this.y, run.to - run.from, this.geo.bar, this.kinds[run.kind].name);
      this.run = { kind, from, to };
    }
  }
}

function spans(pen, answer, lane, geo, from, to, scale, y) {
  const rows = answer.kinds.map((kind) => kind.other_stream).reduce((found, other, i) => (other ? [...found, i] : found), []);
  let last = -1;
  let end = 0;
  for (const span of lane.other_streams) {
    if (span.end < from || span.start > to) continue;
    const left = Math.max(geo.side, geo.side + (span.start - from) * scale);
    const right = Math.min(geo.width, geo.side + (span.end - from) * scale);
    if (span.kind === last && right - end < 0.5) continue; // under a pixel that is drawn
    const row = rows.indexOf(span.kind);
    pen.rect(left, y + row * geo.strip, Math.max(0.8, right - left), geo.strip, answer.kinds[span.kind].name);
    last = span.kind;
    end = right;
  }
}

function flight(pen, answer, lane, geo, from, to, x, y) {
  const high = (count) => (geo.flight * count) / Math.max(1, answer.most);
  const base = y + geo.flight;
  const points = [[x(Math.max(from, lane.begin)), base]];
  let before = 0;
  for (let i = 0; i < lane.flight.length; i += 2) {
    const moment = lane.flight[i];
    if (moment > to) break;
    if (moment >= from) points.push([x(moment), base - high(before)], [x(moment), base - high(lane.flight[i + 1])]);
    else points[0] = [geo.side, base - high(lane.flight[i + 1])];
    before = lane.flight[i + 1];
  }
  const end = x(Math.min(to, lane.end));
  points.push([end, base - high(before)], [end, base], [points[0][0], base]);
  pen.area(points, "flight");
}

/** Colours of a page's theme, by name; those of kinds are the tokens of lanes. */
export function colours(element, answer) {
  const style = getComputedStyle(element);
  const token = (name) => style.getPropertyValue(`--${name}`).trim();
  const own = ["ink", "ink-2", "ink-3", "line", "sheet"].map((name) => [name, token(name)]);
  const kinds = answer.kinds.flatMap(({ name }) => [[name, token(`lane-${name}`)], [`on-${name}`, token(`on-lane-${name}`)]]);
  return { ...Object.fromEntries([...own, ...kinds]), flight: token("lane-flight"), text: style.fontFamily };
}
