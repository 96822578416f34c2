// Heat maps of cases over any of their fields: each cell has the best of its cases, how many it has, and failures.
import { Select } from "./bench_select.js";
import { Figure, useWidth } from "./figure.js";
import { html, useState } from "./html.js";

const [WIDE, NARROW, HIGH] = [92, 48, 38]; // of a cell, in pixels
const [HEAD, FOOT, GAP] = [22, 20, 22]; // above, below and between panels
const LETTER = 6.6; // width of a letter, about

/** The maps, and what they are of. */
export function HeatMap({ answer, put, copies, terms, stale }) {
  const { heat, fields, options } = answer;
  const [at, look] = useState(null); // the number of the cell that is looked at
  const there = heat.cells[Math.min(at ?? heat.best, heat.cells.length - 1)];
  const none = { name: "none", label: "none" };
  const grid = [...fields.filter((field) => field.grid), none];
  const numbers = fields.filter((field) => field.number);
  const place = (cell) => [[heat.panels, heat.panel_texts[cell.panel]], [heat.rows, heat.row_texts[cell.row]], [heat.columns, heat.column_texts[cell.column]]];
  const named = (cell) => place(cell).filter(([label]) => label).map(([label, text]) => `${label} ${text}`).join(", ");
  const columns = [...[heat.panels, heat.rows, heat.columns].filter(Boolean), "Best case", heat.colour, "Cases", "Do not count"];
  const rows = heat.cells.map((cell) => [...place(cell).filter(([label]) => label).map(([, text]) => text), cell.name, cell.text, cell.count, cell.bad]);
  const only = () => {
    const fixed = [[options.panels, heat.panel_texts[there.panel]], [options.rows, heat.row_texts[there.row]], [options.columns, heat.column_texts[there.column]]];
    put({ only: { ...options.only, ...Object.fromEntries(fixed.filter(([name]) => name !== "none").map(([name, text]) => [name, [text]])) } });
  };
  return html`<${Figure} id="heat" title=${`${heat.colour} over ${[heat.rows, heat.columns, heat.panels].filter(Boolean).join(" × ")}`} source=${heat.source} about=${terms.heat}
    stale=${stale} copies=${copies} columns=${columns} rows=${rows}>
    <p class="choice-line">
      <${Select} id="heat-colour" label="Colour" value=${options.colour} fields=${numbers} take=${(colour) => put({ colour })} />
      <${Select} id="heat-rows" label="Rows" value=${options.rows} fields=${grid} take=${(rows_) => put({ rows: rows_ })} />
      <${Select} id="heat-columns" label="Columns" value=${options.columns} fields=${grid} take=${(columns_) => put({ columns: columns_ })} />
      <${Select} id="heat-panels" label="Panels" value=${options.panels} fields=${grid} take=${(panels) => put({ panels })} /></p>
    <${Maps} heat=${heat} there=${there} look=${(cell) => look(heat.cells.indexOf(cell))} named=${named} only=${only} />
    <ul class="legend scale" aria-label=${`Scale of ${heat.colour}`}>${heat.scale.map((step, i) => html`<li key=${i}><svg width="12" height="12" aria-hidden="true"><rect width="12" height="12" rx="3" fill=${step.fill} /></svg> ${step.text}</li>`)}</ul>
    <p class="quiet">${heat.about} Below it: how many cases, and how many ended without a speed that counts (✕).</p>
    ${there && html`<p class="reading"><b>${named(there)}</b> ${there.about} <button type="button" onClick=${only}>Only these cases</button></p>`}
  <//>`;
}

/** All panels, as many in a row as there is room for. */
function Maps({ heat, there, look, named, only }) {
  const [ref, width] = useWidth();
  const side = 14 + LETTER * Math.max(...heat.row_texts.map((text) => text.length), heat.rows.length && 2);
  const count = heat.column_texts.length;
  const panels = heat.panel_texts.length;
  const across = Math.max(1, Math.min(panels, Math.floor((width + GAP) / (side + count * NARROW + GAP))));
  const wide = Math.max(NARROW, Math.min(WIDE, ((width - (across - 1) * GAP) / across - side) / count));
  const rows = rowsOf(heat);
  const high = (i) => HEAD + rows[i].length * HIGH + FOOT;
  const tops = [16]; // of each line of panels
  for (let i = 0; i < panels; i += across) tops.push(tops.at(-1) + Math.max(...rows.slice(i, i + across).map((_, j) => high(i + j))) + GAP / 2);
  const size = { width: Math.max(width, across * (side + count * wide + GAP) - GAP), height: tops.at(-1) };
  const corner = (i) => [(i % across) * (side + count * wide + GAP), tops[Math.floor(i / across)]];
  const spot = (cell) => {
    const [x, y] = corner(cell.panel);
    return [x + side + cell.column * wide, y + HEAD + rows[cell.panel].indexOf(cell.row) * HIGH];
  };
  const key = (event) => {
    if (event.key === "Enter") return only();
    const [dx, dy] = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key] ?? [0, 0];
    if (!dx && !dy) return;
    event.preventDefault();
    const [x, y] = spot(there);
    let best = null;
    for (const cell of heat.cells) { // the nearest cell in the direction of the key
      const [cx, cy] = spot(cell);
      const ahead = (cx - x) * dx + (cy - y) * dy;
      const beside = Math.abs((cx - x) * dy) + Math.abs((cy - y) * dx);
      if (ahead > 0 && (!best || ahead + 3 * beside < best[0])) best = [ahead + 3 * beside, cell];
    }
    if (best) look(best[1]);
  };
  const room = Math.max(3, Math.floor(wide / LETTER));
  const cut = (text) => (text.length > room ? `${text.slice(0, room - 1)}…` : text);
  return html`<div class="plot sideways" ref=${ref}>${width > 0 && html`<svg class="chart heat" width=${size.width} height=${size.height} tabindex="0" role="slider"
    aria-label=${`${heat.colour}, cell by cell; Enter keeps the cases of a cell`} aria-valuemin="0" aria-valuemax=${Math.max(0, heat.cells.length - 1)} aria-valuenow=${Math.max(0, heat.cells.indexOf(there))}
    aria-valuetext=${there ? `${named(there)}: ${there.about}` : "no cell"} onKeyDown=${key}>
    ${heat.panel_texts.map((text, i) => {
      const [x, y] = corner(i);
      return html`<g key=${text} class="grid">
        ${heat.panels && html`<text class="title" x=${x + side} y=${y + 2}>${heat.panels} ${text}</text>`}
        <text x=${x} y=${y + HEAD - 6}>${heat.rows}</text>
        ${rows[i].map((row, r) => html`<text key=${row} x=${x + side - 8} y=${y + HEAD + (r + 0.5) * HIGH} text-anchor="end" dominant-baseline="central">${heat.row_texts[row]}</text>`)}
        ${heat.column_texts.map((column, c) => html`<text key=${column} x=${x + side + (c + 0.5) * wide} y=${y + high(i) - FOOT + 14} text-anchor="middle">${c || !heat.columns ? cut(column) : cut(`${heat.columns} ${column}`)}</text>`)}
      </g>`;
    })}
    ${heat.cells.map((cell) => {
      const [x, y] = spot(cell);
      return html`<g key=${`${cell.panel}-${cell.row}-${cell.column}`} class=${`cell ${cell.fill ? cell.ink : cell.bad ? "bad" : "open"} ${cell === there ? "it" : ""}`} onClick=${() => look(cell)}>
        <title>${`${named(cell)}: ${cell.about}`}</title>
        <rect x=${x + 1} y=${y + 1} width=${wide - 2} height=${HIGH - 2} rx="3" fill=${cell.fill || undefined} />
        <text class="value" x=${x + wide / 2} y=${y + 15} text-anchor="middle" dominant-baseline="central">${cut(cell.text)}</text>
        <text class="cases" x=${x + wide / 2} y=${y + 28} text-anchor="middle" dominant-baseline="central">${cell.bad ? `${cell.count} · ${cell.bad}✕` : cell.count}</text>
      </g>`;
    })}
  </svg>`}</div>`;
}

/** Of each panel the rows that have cases. */
function rowsOf(heat) {
  const found = heat.panel_texts.map(() => new Set());
  for (const cell of heat.cells) found[cell.panel].add(cell.row);
  return found.map((rows) => [...rows].sort((a, b) => a - b));
}
