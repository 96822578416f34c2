// Where a step goes, row by row: each change begins where the one before it ends; levels are drawn from 0.
import { html } from "./html.js";
import { useWidth } from "./figure.js";

const ROW = 26; // heights, in pixels
const HEAD = 6;
const LETTER = 6.7; // width of a letter, about

/** One or more waterfalls over one axis. `groups`: { title, rows }; a title may be empty. `most`: of the axis, in picoseconds. */
export function Waterfalls({ groups, most }) {
  const [ref, width] = useWidth();
  const narrow = width < 620;
  const side = narrow ? 0 : 172;
  const step = narrow ? ROW + 16 : ROW;
  const inner = Math.max(1, width - side - 112);
  const x = (picoseconds) => side + (picoseconds / most) * inner;
  let y = HEAD;
  const placed = groups.map((group) => {
    const top = y;
    const head = group.title ? 24 : 0;
    y += head + group.rows.length * step + 16;
    return { ...group, top, head };
  });
  return html`<div class="plot" ref=${ref}>${width > 0 && html`<svg class="chart" width=${width} height=${y} role="group" aria-label="Parts of the step">
    ${placed.map(({ title, rows, top, head }, g) => {
      let at = 0; // where the last row ended
      return html`<g key=${g}>
        ${title && html`<text class="strong" x="0" y=${top + 12}>${title}</text>`}
        ${rows.map((row, i) => {
          const from = row.level ? 0 : at;
          at = from + row.picoseconds;
          const begin = Math.min(from, at);
          const y = top + head + i * step + (narrow ? 16 : 0);
          const right = x(begin) + Math.max(1, x(Math.abs(row.picoseconds)) - x(0));
          return html`<g key=${row.name + i} class=${`part-${row.name}${row.level ? " level" : row.picoseconds < 0 ? " less" : ""}`}><title>${`${row.label}: ${row.text} ${row.share}. ${row.about}`}</title>
            <text x=${narrow ? 0 : side - 10} y=${narrow ? y - 6 : y + ROW / 2 - 2} text-anchor=${narrow ? "start" : "end"} dominant-baseline=${narrow ? "auto" : "central"}>${row.label}</text>
            <rect class="part" x=${x(begin)} y=${y} width=${right - x(begin)} height=${ROW - 6} rx="2" />
            <text class="much" x=${right + 6} y=${y + ROW / 2 - 2} dominant-baseline="central">${row.text}  ${right + 6 + (row.text.length + row.share.length + 2) * LETTER < width ? row.share : ""}</text>
          </g>`;
        })}
      </g>`;
    })}
  </svg>`}</div>`;
}
