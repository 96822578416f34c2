// How points are drawn, by the pens of lanes: two numbers of each, and the front of those that are best in both. A point has
// x and y, in the units of the axes, a kind (strong, faint or bad), and whether it is on the front. Points that share a
// pixel are one mark.

const LEFT = 62; // margins, in pixels
const TOP = 22;
const AXIS = 40;
const NEAR = 14; // pixels within which a point is found
const LETTER = 6.4; // width of a letter, about
const MANY = 4000; // strong points: more are drawn smaller

/** Where things are. */
export function geometry(width) {
  const height = width < 620 ? 300 : 400;
  return { width, height, left: LEFT, top: TOP, inner: Math.max(1, width - LEFT - 8), deep: height - TOP - AXIS };
}

/** Scales of the axes, each from 0 to its most. What is above the axis up is at its end. */
export function scales(geo, { across, up }) {
  return {
    x: (value) => geo.left + (value / across.most) * geo.inner,
    y: (value) => geo.top + (1 - Math.min(1, value / up.most)) * geo.deep,
  };
}

const KINDS = ["faint", "bad", "strong"];
const RADII = { faint: 1.8, bad: 2.2, strong: 4 };

/**
 * Draw points. `hot`: the point that is looked at; `marks`: chosen ones, with letters; `limit`: { at, text }, a value across
 * from which on nothing fits; `diagonal`: whether equal numbers are a line; `first`: how the front goes on from a point.
 */
export function draw(pen, points, axes, geo, { hot = null, marks = [], limit = null, diagonal = false, first = "across" } = {}) {
  const { x, y } = scales(geo, axes);
  grid(pen, axes, geo, x, y);
  if (limit) beyond(pen, limit, geo, x);
  if (diagonal) pen.line(geo.left, geo.top + geo.deep, geo.left + geo.inner, geo.top, "ink-3");
  const seen = new Uint8Array((geo.width + 1) * (geo.height + 1)); // a bit for each kind
  const many = points.length > MANY;
  for (const [number, kind] of KINDS.entries()) {
    for (const point of points) {
      if (point.kind !== kind || point.x > axes.across.most) continue;
      const [px, py] = [x(point.x), y(point.y)];
      const pixel = Math.round(py) * (geo.width + 1) + Math.round(px);
      if (seen[pixel] & (1 << number)) continue;
      seen[pixel] |= 1 << number;
      const radius = many ? Math.min(2, RADII[kind]) : RADII[kind];
      if (kind === "strong" && !many) pen.dot(px, py, radius, kind);
      else pen.rect(px - radius, py - radius, 2 * radius, 2 * radius, kind); // of these there may be very many
    }
  }
  front(pen, points, first, x, y);
  for (const { point, letter } of marks) {
    pen.ring(x(point.x), y(point.y), 8, "ink");
    pen.text(x(point.x) + 12, y(point.y) - 11, letter, "ink", "start", true);
  }
  if (hot) pen.ring(x(hot.x), y(hot.y), 6, "accent");
}

function grid(pen, { across, up }, geo, x, y) {
  const floor = geo.top + geo.deep;
  for (const tick of up.ticks) {
    pen.line(geo.left, y(tick.at), geo.left + geo.inner, y(tick.at), "line");
    pen.text(geo.left - 8, y(tick.at), tick.text, "ink-3", "end");
  }
  let last = -Infinity;
  for (const tick of across.ticks) {
    const at = x(tick.at);
    const wide = tick.text.length * LETTER;
    pen.line(at, floor, at, floor + 4, "line");
    if (at - wide / 2 < last + 8 || at + wide / 2 > geo.width) continue;
    pen.text(at, floor + 14, tick.text, "ink-3", "middle");
    last = at + wide / 2;
  }
  pen.text(0, 8, up.label, "ink-3", "start");
  pen.text(geo.left + geo.inner, floor + 32, across.label, "ink-3", "end");
}

function beyond(pen, { at, text }, geo, x) {
  const left = x(at);
  pen.rect(left, geo.top, Math.max(0, geo.left + geo.inner - left), geo.deep, "beyond");
  pen.line(left, geo.top - 8, left, geo.top + geo.deep, "bad");
  const inside = left - geo.left > 230;
  pen.text(left + (inside ? -6 : 6), 8, text, "bad", inside ? "end" : "start", true);
}

/** The front as a stair. `first`: across, where so much across allows such a number up; else up. */
function front(pen, points, first, x, y) {
  const some = points.filter((point) => point.front).sort((a, b) => a.x - b.x || a.y - b.y);
  some.forEach((point, i) => {
    const [px, py] = [x(point.x), y(point.y)];
    const before = some[i - 1];
    if (before) {
      const [bx, by] = [x(before.x), y(before.y)];
      const [cx, cy] = first === "across" ? [px, by] : [bx, py];
      pen.line(bx, by, cx, cy, "front");
      pen.line(cx, cy, px, py, "front");
    }
    pen.dot(px, py, 4.5, "front");
  });
}

/** The point at a place, a strong one first; null if none is near. */
export function pointAt(points, axes, geo, left, top) {
  const { x, y } = scales(geo, axes);
  let best = null;
  let least = NEAR;
  for (const point of points) {
    if (point.x > axes.across.most) continue;
    const far = Math.hypot(x(point.x) - left, y(point.y) - top) + (point.kind === "strong" ? 0 : 4);
    if (far < least) [best, least] = [point, far];
  }
  return best;
}
