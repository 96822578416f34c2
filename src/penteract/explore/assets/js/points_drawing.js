// How priced layouts are drawn, by the pens of lanes: memory across, speed up, and the front of those that were simulated.
// Points that share a pixel are one mark.

const LEFT = 62; // margins, in pixels
const TOP = 22;
const AXIS = 40;
const NEAR = 14; // pixels within which a point is found
const LETTER = 6.4; // width of a letter, about

/** Where things are. */
export function geometry(width) {
  const height = width < 620 ? 300 : 400;
  return { width, height, left: LEFT, top: TOP, inner: Math.max(1, width - LEFT - 8), deep: height - TOP - AXIS };
}

/** Scales of an answer's axes. What is faster than the axis, by a bound, is at its end. */
export function scales(geo, { memory, speed }) {
  return {
    x: (bytes) => geo.left + (bytes / memory.most) * geo.inner,
    y: (rate) => geo.top + (1 - Math.min(1, rate / speed.most)) * geo.deep,
  };
}

const kindOf = (point) => (!point.fits ? "misses" : point.simulated ? "simulated" : "bound");
const RADII = { bound: 1.8, misses: 2.2, simulated: 4 };

/** Draw points; those on the front are joined. `hot`: the point that is looked at; `marks`: chosen ones, with letters. */
export function draw(pen, points, axes, card, geo, hot, marks) {
  const { x, y } = scales(geo, axes);
  grid(pen, axes, card, geo, x, y);
  const seen = new Uint8Array((geo.width + 1) * (geo.height + 1)); // a bit for each kind
  for (const [number, kind] of ["bound", "misses", "simulated"].entries()) {
    for (const point of points) {
      if (kindOf(point) !== kind || point.amount.bytes > axes.memory.most) continue;
      const [px, py] = [x(point.amount.bytes), y(point.rate)];
      const pixel = Math.round(py) * (geo.width + 1) + Math.round(px);
      if (seen[pixel] & (1 << number)) continue;
      seen[pixel] |= 1 << number;
      const radius = RADII[kind];
      if (kind === "simulated") pen.dot(px, py, radius, kind);
      else pen.rect(px - radius, py - radius, 2 * radius, 2 * radius, kind); // of these there may be very many
    }
  }
  front(pen, points, geo, x, y);
  for (const { point, letter } of marks) {
    pen.ring(x(point.amount.bytes), y(point.rate), 8, "ink");
    pen.text(x(point.amount.bytes) + 12, y(point.rate) - 11, letter, "ink", "start", true);
  }
  if (hot) pen.ring(x(hot.amount.bytes), y(hot.rate), 6, "accent");
}

function grid(pen, { memory, speed }, card, geo, x, y) {
  const floor = geo.top + geo.deep;
  for (const tick of speed.ticks) {
    pen.line(geo.left, y(tick.at), geo.left + geo.inner, y(tick.at), "line");
    pen.text(geo.left - 8, y(tick.at), tick.text, "ink-3", "end");
  }
  let last = -Infinity;
  for (const tick of memory.ticks) {
    const at = x(tick.at);
    const wide = tick.text.length * LETTER;
    pen.line(at, floor, at, floor + 4, "line");
    if (at - wide / 2 < last + 8 || at + wide / 2 > geo.width) continue;
    pen.text(at, floor + 14, tick.text, "ink-3", "middle");
    last = at + wide / 2;
  }
  pen.text(0, 8, "tokens/s/GPU", "ink-3", "start");
  pen.text(geo.left + geo.inner, floor + 32, "memory of the fullest rank", "ink-3", "end");
  if (!card.drawn || !card.usable.bytes) return;
  const usable = x(card.usable.bytes);
  const text = `usable ${card.usable.text}`;
  pen.rect(usable, geo.top, Math.max(0, geo.left + geo.inner - usable), geo.deep, "beyond");
  pen.line(usable, geo.top - 8, usable, floor, "misses");
  const inside = usable - geo.left > 230;
  pen.text(usable + (inside ? -6 : 6), 8, text, "misses", inside ? "end" : "start", true);
}

/** The front as a stair: so much memory allows such a speed. */
function front(pen, points, geo, x, y) {
  const some = points.filter((point) => point.front).sort((a, b) => a.amount.bytes - b.amount.bytes);
  some.forEach((point, i) => {
    const [px, py] = [x(point.amount.bytes), y(point.rate)];
    const before = some[i - 1];
    if (before) {
      pen.line(x(before.amount.bytes), y(before.rate), px, y(before.rate), "front");
      pen.line(px, y(before.rate), px, py, "front");
    }
    pen.dot(px, py, 4.5, "front");
  });
}

/** The point at a place, a simulated one first; null if none is near. */
export function pointAt(points, axes, geo, left, top) {
  const { x, y } = scales(geo, axes);
  let best = null;
  let least = NEAR;
  for (const point of points) {
    if (point.amount.bytes > axes.memory.most) continue;
    const far = Math.hypot(x(point.amount.bytes) - left, y(point.rate) - top) + (point.simulated ? 0 : 4);
    if (far < least) [best, least] = [point, far];
  }
  return best;
}
