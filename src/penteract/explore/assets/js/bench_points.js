// Cases as points: any two of their numbers, with the front; predicted beside measured; and residuals by the values of a field.
import { Select } from "./bench_select.js";
import { Figure, useWidth } from "./figure.js";
import { html, useMemo, useRef } from "./html.js";
import { PointsCanvas, pointsSvg } from "./points_canvas.js";

const TABLE = 200; // rows of a table; the file has all
const LETTER = 6.4;
const ROW = 26;

/** The points of an answer, as the canvas takes them. */
function marksOf(points) {
  const front = new Set(points.front);
  return points.x.map((x, i) => ({ x, y: points.y[i], kind: points.good[i] ? "strong" : "bad", front: front.has(i), i }));
}

const axesOf = ({ across, up }) => ({ across: { most: 1, ticks: across.ticks, label: across.label }, up: { most: 1, ticks: up.ticks, label: up.label } });

/** A figure of points. */
function PointsFigure({ id, title, points, about, hint, how, copies, stale, children, after }) {
  const frame = useRef(null);
  const marks = useMemo(() => marksOf(points), [points]);
  const axes = useMemo(() => axesOf(points), [points]);
  const words = ({ i }) => `${points.names[i]}: ${points.across.label} ${points.across_texts[i]}, ${points.up.label} ${points.up_texts[i]}${points.good[i] ? "" : ", does not count"}`;
  const columns = ["Case", points.across.label, points.up.label, "Counts", "Front"];
  const rows = (some) => some.map(({ i, front }) => [points.names[i], points.across_texts[i], points.up_texts[i], points.good[i] ? "yes" : "no", front ? "front" : ""]);
  const sources = [...new Set([points.across.source, points.up.source])].join(" · ");
  return html`<${Figure} id=${id} title=${title} source=${sources} about=${about} stale=${stale} copies=${copies} columns=${columns} rows=${rows(marks.slice(0, TABLE))}
    file=${() => ({ columns, rows: rows(marks) })} drawing=${() => pointsSvg(frame.current, marks, axes, how)}>
    ${children}
    <div ref=${frame}><${PointsCanvas} points=${marks} axes=${axes} how=${how} about=${words} hint=${hint} label=${title} count=${points.text} /></div>
    ${after}
  <//>`;
}

/** Any two numbers of the cases. */
export function Scatter({ answer, put, copies, terms, stale }) {
  const { points, options } = answer;
  const numbers = answer.fields.filter((field) => field.number);
  const how = useMemo(() => ({ first: points.first || "across" }), [points]);
  return html`<${PointsFigure} id="scatter" title=${`${points.up.label} and ${points.across.label}`} points=${points} about=${terms.scatter} how=${how} copies=${copies} stale=${stale}
    hint="Point at a case, or move by arrow keys through those that count."
    after=${html`<ul class="legend" aria-label="Marks"><li><i class="swatch round simulated" aria-hidden="true"></i>a case</li><li><i class="swatch round front" aria-hidden="true"></i>the front</li>
      <li><i class="swatch misses" aria-hidden="true"></i>does not count</li></ul><p class="quiet">${points.text}.</p>`}>
    <p class="choice-line"><${Select} id="scatter-up" label="Up" value=${options.up} fields=${numbers} take=${(up) => put({ up })} />
      <${Select} id="scatter-across" label="Across" value=${options.across} fields=${numbers} take=${(across) => put({ across })} /></p>
  <//>`;
}

const DIAGONAL = { diagonal: true };

/** What was predicted beside what was measured. */
export function Residuals({ answer, put, copies, terms, stale }) {
  const { residuals, fields } = answer;
  const pairs = residuals.pairs.map(([predicted, measured, label]) => ({ name: `${predicted} ${measured}`, label }));
  const numbers = fields.filter((field) => field.number);
  const take = (pair) => {
    const [predicted, measured] = pair.split(" ");
    put({ predicted, measured });
  };
  return html`<${PointsFigure} id="residuals" title=${`${residuals.label}: predicted and measured`} points=${residuals.points} about=${terms.residuals} how=${DIAGONAL} copies=${copies} stale=${stale}
    hint="On the line, both are equal; above it, more was measured than predicted."
    after=${residuals.about.map((text) => html`<p key=${text} class="why">${text}</p>`)}>
    <p class="choice-line">${pairs.length > 0
      ? html`<${Select} id="residual-pair" label="Of" value=${`${residuals.predicted} ${residuals.measured}`} fields=${pairs} take=${take} />`
      : html`<${Select} id="residual-predicted" label="Predicted" value=${residuals.predicted} fields=${numbers} take=${(predicted) => put({ predicted, measured: residuals.measured })} />
        <${Select} id="residual-measured" label="Measured" value=${residuals.measured} fields=${numbers} take=${(measured) => put({ measured, predicted: residuals.predicted })} />`}</p>
  <//>`;
}

/** Residuals by the values of a field: where the plan errs. */
export function Groups({ answer, put, copies, terms, stale }) {
  const { residuals, fields } = answer;
  const [ref, width] = useWidth();
  const groups = residuals.groups;
  const columns = [residuals.group_label || "Cases", "Cases", "Mean residual", "Mean of its size", "Worst", "Worst case"];
  const rows = groups.map((one) => [one.text, one.count, one.mean, one.absolute, one.worst, one.worst_case]);
  const side = Math.min(width / 3, 16 + LETTER * Math.max(4, ...groups.map((one) => one.text.length)));
  const end = width < 620 ? 64 : 300; // where texts stand
  const half = Math.max(10, (width - side - end) / 2 - 8);
  const middle = side + half;
  return html`<${Figure} id="groups" title=${`Where the plan errs: ${residuals.label}${residuals.group_label && ` by ${residuals.group_label}`}`} source="measured less predicted, over measured" about=${terms.residuals}
    stale=${stale} copies=${copies} columns=${columns} rows=${rows}>
    <p class="choice-line"><${Select} id="residual-group" label="By" value=${residuals.group} fields=${fields.filter((field) => field.grid)} take=${(group) => put({ group })} /></p>
    ${groups.length === 0 ? html`<p class="quiet">No field tells these cases apart.</p>` : html`<div class="plot" ref=${ref}>${width > 0 && html`<svg class="chart" width=${width} height=${groups.length * ROW + 24} role="img"
      aria-label=${groups.map((one) => `${residuals.group_label} ${one.text}: ${one.mean}`).join(", ")}>
      <g class="grid"><line x1=${middle} x2=${middle} y1="0" y2=${groups.length * ROW} /><text x=${middle - 6} y=${groups.length * ROW + 14} text-anchor="end">less than predicted</text>
        <text x=${middle + 6} y=${groups.length * ROW + 14}>more</text></g>
      ${groups.map((one, i) => {
        const wide = Math.max(1, Math.abs(one.size) * half);
        const y = i * ROW;
        return html`<g key=${one.text}><title>${`${one.count} cases, worst ${one.worst}: ${one.worst_case}`}</title>
          <text x=${side - 8} y=${y + ROW / 2} text-anchor="end" dominant-baseline="central">${one.text}</text>
          <rect class=${one.size < 0 ? "residual less" : "residual more"} x=${one.size < 0 ? middle - wide : middle} y=${y + 4} width=${wide} height=${ROW - 9} rx="2" />
          <text class="much" x=${width - end + 8} y=${y + ROW / 2} dominant-baseline="central">${one.mean}${end > 100 ? ` mean · ${one.worst} worst · ${one.count} cases` : ""}</text></g>`;
      })}
    </svg>`}</div>`}
  <//>`;
}
