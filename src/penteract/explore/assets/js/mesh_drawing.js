// How ranks are drawn: a node is a box of cells, one for each GPU; nodes follow each other in the order of ranks.

const SIZES = [46, 40, 34, 28, 24, 20, 17, 14, 12, 10, 8, 7, 6, 5, 4, 3]; // of a cell, in pixels
const HIGHEST = 520; // of the drawing, if cells need not be smaller than the last
const NAMED = 20; // the smallest cell with a number

/** Where the cells are. */
export function meshOf({ world, per_node: each, nodes }, width) {
  const across = each <= 8 ? each : each % 8 === 0 && each <= 16 ? 8 : Math.ceil(Math.sqrt(each));
  const down = Math.ceil(each / across);
  for (const size of SIZES) {
    const gap = size >= NAMED ? 3 : size >= 8 ? 1 : 0.5;
    const head = size >= NAMED ? 18 : 0; // for the number of a node
    const pad = size >= NAMED ? 14 : size >= 8 ? 5 : 3;
    const [boxWide, boxHigh] = [across * size + pad, head + down * size + pad];
    const fit = Math.floor((width + pad) / boxWide);
    const columns = fit >= nodes ? nodes : 2 ** Math.floor(Math.log2(Math.max(1, fit)));
    const rows = Math.ceil(nodes / columns);
    const height = rows * boxHigh;
    if ((fit < 1 || height > HIGHEST) && size !== SIZES.at(-1)) continue;
    return { world, each, across, down, size, gap, head, pad, boxWide, boxHigh, columns, rows, width, height, named: size >= NAMED };
  }
  return null;
}

/** The left upper corner of a rank's cell. */
export function cellAt(geo, rank) {
  const node = Math.floor(rank / geo.each);
  const inside = rank % geo.each;
  return [(node % geo.columns) * geo.boxWide + (inside % geo.across) * geo.size,
    Math.floor(node / geo.columns) * geo.boxHigh + geo.head + Math.floor(inside / geo.across) * geo.size];
}

/** The rank at a place; null between cells. */
export function rankAt(geo, x, y) {
  const [column, row] = [Math.floor(x / geo.boxWide), Math.floor(y / geo.boxHigh)];
  const [i, j] = [Math.floor((x - column * geo.boxWide) / geo.size), Math.floor((y - row * geo.boxHigh - geo.head) / geo.size)];
  if (column < 0 || column >= geo.columns || i < 0 || i >= geo.across || j < 0 || j >= geo.down) return null;
  const rank = (row * geo.columns + column) * geo.each + j * geo.across + i;
  return rank < geo.world && j * geo.across + i < geo.each ? rank : null;
}

/** Draw all ranks. `paint`: rank -> the token of its colour, that of its text, that of a dot on it, and whether it is framed. */
export function drawMesh(pen, geo, paint) {
  if (geo.named) {
    for (let node = 0; node * geo.each < geo.world; node += 1) {
      const [x, y] = cellAt(geo, node * geo.each);
      pen.text(x, y - 9, `node ${node}`, "ink-3", "start");
    }
  }
  for (let rank = 0; rank < geo.world; rank += 1) {
    const [x, y] = cellAt(geo, rank);
    const { fill, text, dot, framed } = paint(rank);
    const size = geo.size - geo.gap;
    pen.rect(x, y, size, size, fill);
    if (dot) {
      const [middle, radius] = [geo.named ? y + size - Math.max(5, size / 6) : y + size / 2, Math.max(1, size / 8)];
      if (geo.named) pen.dot(x + size / 2, middle, radius + 1.5, "sheet"); // so that it shows on every colour
      pen.dot(x + size / 2, middle, radius, dot);
    }
    if (geo.named) pen.text(x + size / 2, y + size / 2 - (dot ? size / 9 : 0), String(rank), text, "middle", framed);
    if (framed) pen.frame(x + 1, y, size - 2, size, "ink");
  }
}

/** Whether a rank is in runs of ranks. */
export function inRuns(runs, rank) {
  for (let i = 0; i < runs.length; i += 3) {
    const [first, step, count] = [runs[i], runs[i + 1], runs[i + 2]];
    if (rank >= first && rank <= first + step * (count - 1) && (rank - first) % step === 0) return true;
  }
  return false;
}

/** Whether two ranks are in one group of an axis: every `step`-th rank of a block. */
export function together({ block, step }, one, other) {
  return Math.floor(one / block) === Math.floor(other / block) && one % step === other % step;
}

/** A rank's place in its group of an axis. */
export function placeOn({ step, size }, rank) {
  return Math.floor(rank / step) % size;
}

/** The colours that ranks are drawn with, by the names of tokens. */
export function meshColours(element) {
  const style = getComputedStyle(element);
  const names = ["ink", "ink-2", "ink-3", "line", "line-2", "sheet", "sunk", "dp", "tp", "pp", "cp", "ep", "accent", "on-accent", "parameters",
    "on-parameters", "gradients", "on-gradients", "optimizer", "other", "on-other"];
  return { ...Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()])), text: style.fontFamily };
}
