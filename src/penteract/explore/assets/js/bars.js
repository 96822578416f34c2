// Rows of bars over one axis: a label, one or more lines of segments, and how much it is. The mark of several figures.
import { html } from "./html.js";
import { useWidth } from "./figure.js";

const LETTER = 6.7; // width of a letter, about
const [THICK, THIN, GAP, TEXT] = [16, 9, 10, 18]; // heights, in pixels

/**
 * Rows: { key, label, much, title, lines, chosen, choose }; a line is a list of { from, to, look } by shares of the axis, where
 * `look` is a class. `zero`: where 0 is, as a share; `side`: room for labels in pixels, on wide screens.
 */
export function Bars({ rows, label, side = 240, room = 120, zero = null }) {
  const [ref, width] = useWidth();
  const narrow = width < 620;
  const left = narrow ? 0 : Math.min(side, width * 0.42);
  const inner = Math.max(1, width - left - (narrow ? 2 : room));
  const x = (share) => left + share * inner;
  let bottom = 2;
  const placed = rows.map((row) => {
    const thick = row.lines.length > 1 ? THIN : THICK;
    const top = bottom;
    bottom += (narrow ? TEXT : 0) + row.lines.length * thick + GAP;
    return { row, top: top + (narrow ? TEXT : 0), thick, high: row.lines.length * thick };
  });
  return html`<div class="plot" ref=${ref}>${width > 0 && html`<svg class="chart bars" width=${width} height=${bottom} role="group" aria-label=${label}>
    ${placed.map(({ row, top, thick, high }) => {
      const middle = top + high / 2;
      const end = x(Math.max(0, ...row.lines.flat().map((part) => part.to)));
      const texts = narrow ? Math.floor((width - row.much.length * LETTER - 12) / LETTER) : Math.floor((left - 10) / LETTER);
      const pick = row.choose && { role: "button", tabindex: "0", "aria-pressed": row.chosen, onClick: row.choose,
        onKeyDown: (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), row.choose()) };
      return html`<g key=${row.key} class=${`${row.choose ? "rank" : "row-of-bars"}${row.chosen ? " chosen" : ""}`} ...${pick}><title>${row.title}</title>
        <rect class="hit" x="0" y=${top - (narrow ? TEXT : 0) - GAP / 2 + 1} width=${width} height=${high + (narrow ? TEXT : 0) + GAP - 2} rx="4" />
        <text aria-hidden=${row.choose ? "true" : undefined} x=${narrow ? 2 : left - 10} y=${narrow ? top - 5 : middle} text-anchor=${narrow ? "start" : "end"} dominant-baseline=${narrow ? "auto" : "central"}>${cut(row.label, texts)}</text>
        ${row.lines.map((line, i) => line.map((part, k) => html`<rect key=${`${i}.${k}`} class=${`bar-part ${part.look}`} x=${x(part.from)} y=${top + i * thick}
          width=${Math.max(part.to > part.from ? 1 : 0, x(part.to) - x(part.from))} height=${thick - 1} />`))}
        <text aria-hidden=${row.choose ? "true" : undefined} class="much" x=${narrow ? width - 2 : end + 8} y=${narrow ? top - 5 : middle} text-anchor=${narrow ? "end" : "start"} dominant-baseline=${narrow ? "auto" : "central"}>${row.much}</text>
      </g>`;
    })}
    ${zero !== null && html`<line class="zero" x1=${x(zero)} x2=${x(zero)} y1="0" y2=${bottom - 4} />`}
  </svg>`}</div>`;
}

const cut = (text, most) => (text.length <= most ? text : `${text.slice(0, Math.max(3, most - 1))}…`);
