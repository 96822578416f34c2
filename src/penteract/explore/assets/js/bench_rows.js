// Cases row by row: the ranking beside the plan's, and all cases as a table.
import { askOne } from "./ask.js";
import { Figure, useWidth } from "./figure.js";
import { html } from "./html.js";

const BARS = 24; // rows of the ranking that are drawn
const MORE = 400; // further rows of the table
const ROW = 26;
const LETTER = 6.6;

/** The cases by measured speed, with the plan's order and what it predicted. */
export function Ranking({ answer, copies, terms, stale }) {
  const { ranking } = answer;
  const [ref, width] = useWidth();
  const planned = ranking.rows.some((row) => row.planned);
  const shown = ranking.rows.slice(0, BARS);
  const columns = ["#", "Plan's #", "Case", "Layout", "Speed", "Speed, predicted", "Step", "Step, predicted", "Residual of the step", "Residual of memory", "The plan was"];
  const rows = ranking.rows.map((row) => [row.place, row.planned, row.name, row.layout, row.speed, row.planned_speed, row.step, row.planned_step, row.time_error, row.memory_error, row.right]);
  const numbers = planned ? 84 : 34;
  const names = Math.max(70, Math.min(width * 0.34, 16 + LETTER * Math.max(...shown.map((row) => row.name.length))));
  const left = numbers + names;
  const end = planned && width > 560 ? 170 : 66;
  const inner = Math.max(20, width - left - end);
  const cut = (text) => (text.length * LETTER > names - 8 ? `${text.slice(0, Math.max(3, Math.floor((names - 8) / LETTER) - 1))}…` : text);
  return html`<${Figure} id="ranking" title=${planned ? "Measured order, beside the plan's" : "Measured order"} source=${planned ? "measured · predicted before it ran" : "measured or published"} about=${terms.ranking}
    stale=${stale} copies=${copies} columns=${columns} rows=${rows}>
    ${ranking.about.map((text) => html`<p key=${text} class="why">${text}</p>`)}
    <div class="plot" ref=${ref}>${width > 0 && html`<svg class="chart" width=${width} height=${shown.length * ROW + 28} role="img" aria-label=${`The fastest first: ${shown.slice(0, 5).map((row) => `${row.name} ${row.speed}`).join(", ")}`}>
      <g class="grid"><text x="0" y="16">#</text>${planned && html`<text x="34" y="16">plan's</text>`}<text x=${numbers} y="16">case</text><text x=${left} y="16">tokens/s/GPU</text>
        ${planned && end > 100 && html`<text x=${width - 88} y="16">step, residual</text>`}</g>
      ${shown.map((row, i) => {
        const y = 26 + i * ROW;
        const middle = y + ROW / 2 - 1;
        return html`<g key=${row.place} class=${`ranked ${row.right}`}><title>${`${row.name} ${row.layout}: ${row.speed} measured, ${row.planned_speed || "not"} predicted; step ${row.step} ${row.time_error}; memory ${row.memory_error}`}</title>
          <text class="much" x="0" y=${middle} dominant-baseline="central">${row.place}</text>
          ${planned && html`<text class=${row.planned && Number(row.planned) <= 3 ? "strong" : ""} x="34" y=${middle} dominant-baseline="central">${row.planned || "–"}</text>`}
          <text x=${numbers} y=${middle} dominant-baseline="central">${cut(row.name)}</text>
          <rect class="speed" x=${left} y=${y + 3} width=${Math.max(1, row.rate * inner)} height=${ROW - 9} rx="2" />
          ${row.planned_rate >= 0 && html`<line class="planned" x1=${left + row.planned_rate * inner} x2=${left + row.planned_rate * inner} y1=${y} y2=${y + ROW - 3} />`}
          <text class="much" x=${left + inner + 8} y=${middle} dominant-baseline="central">${row.speed}</text>
          ${planned && end > 100 && html`<text class=${row.right === "wrong" ? "over" : ""} x=${width - 2} y=${middle} text-anchor="end" dominant-baseline="central">${row.time_error}</text>`}</g>`;
      })}
    </svg>`}</div>
    <p class="quiet">${ranking.found}${ranking.rows.length > BARS ? `; the first ${BARS} are drawn, the table has more` : ""}.${planned ? " The mark is the predicted speed; the first three of the plan are in bold." : ""}</p>
  <//>`;
}

/** All cases: sorted by any column, further rows on demand; the file has all, as plain numbers. */
export function Cases({ answer, put, bench, copies, terms, stale }) {
  const { table, options } = answer;
  const fields = new Map(answer.fields.map((field) => [field.name, field]));
  const label = (name) => {
    const field = fields.get(name);
    return field ? `${field.label}${field.unit && field.unit !== "%" && !field.number ? `, ${field.unit}` : ""}` : "Case";
  };
  const columns = table.fields.map(label);
  const sort = (name) => put({ sort: name, descending: options.sort === name ? !options.descending : Boolean(fields.get(name)?.number) });
  const file = async () => {
    const all = await askOne({ kind: "bench", bench: { ...bench, first: 0 } });
    return { columns: all.table.fields.map((name) => name || "case"), rows: all.table.rows };
  };
  const more = table.rows.length < table.total;
  return html`<${Figure} id="cases" title="All cases" source="settings, predicted, measured: as the head of each column says" about=${terms.cases} stale=${stale} copies=${copies} drawing=${null}
    columns=${columns} rows=${table.rows} file=${file}>
    <div class="table" tabindex="0" role="region" aria-label="All cases"><table>
      <caption class="hidden">All cases</caption>
      <thead><tr>${table.fields.map((name, i) => html`<th scope="col" key=${name} aria-sort=${options.sort === name ? (options.descending ? "descending" : "ascending") : undefined}>
        ${name ? html`<button type="button" class="sort" onClick=${() => sort(name)}>${columns[i]}${options.sort === name ? (options.descending ? " ↓" : " ↑") : ""}</button><small>${fields.get(name).source}</small>` : columns[i]}</th>`)}</tr></thead>
      <tbody>${table.rows.map((row, i) => html`<tr key=${i}>${row.map((cell, j) => (j ? html`<td key=${j}>${cell}</td>` : html`<th scope="row" key=${j}>${cell}</th>`))}</tr>`)}</tbody>
    </table></div>
    <p class="quiet">${table.found} ${more && html`<button type="button" onClick=${() => put({ first: options.first + MORE })}>Show more</button>`}</p>
    ${table.same && html`<p class="quiet">The same in all: ${table.same}</p>`}
  <//>`;
}
