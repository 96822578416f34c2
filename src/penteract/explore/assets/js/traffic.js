// Who one rank talks to: each kind of call in a step, how long its links are busy with it, and how many bytes it has.
import { html } from "./html.js";
import { Figure, useWidth } from "./figure.js";

const ROW = 40; // heights, in pixels
const LINE = 16; // of a further line of text, where there is little room
const BAR = 14;
const LETTER = 6.7; // width of a letter, about

/** Rows of traffic. `pick`: told which row is looked at, so that the mesh shows its group. */
export function Traffic({ answer, pick, picked, copies, stale, terms, take }) {
  const [ref, width] = useWidth();
  const columns = ["Dimension", "Call", "What", "Ranks", "Group", "Links", "Calls", "Bytes", "Bytes, exact", "Busy", "Share of the step", "Rate"];
  const rows = answer.traffic.map((row) => [row.label, row.collective, row.what, row.text, row.size, row.link_text, row.calls, row.amount.text, row.amount.bytes,
    row.seconds, row.share, row.rate]);
  const inner = Math.max(1, width - 8);
  const narrow = width < 620;
  const step = narrow ? ROW + 2 * LINE : ROW;
  return html`<${Figure} id="traffic" title=${`What rank ${answer.rank} sends and receives in a step`} source="predicted · bytes exact, seconds by measured rates" stale=${stale} copies=${copies}
    about=${terms.traffic} columns=${columns} rows=${rows}>
    ${answer.missing ? html`<p class="quiet">${answer.missing}</p><p><button type="button" class="main" onClick=${() => take(answer.more)}>Show eight ranks</button></p>` : html`
      <div class="plot" ref=${ref}>${width > 0 && html`<svg class="chart" width=${width} height=${answer.traffic.length * step + 4} role="group" aria-label="Calls of a step, those that take longest first">
        ${answer.traffic.map((row, i) => {
          const y = i * step;
          const wide = Math.max(1.5, (row.picoseconds / Math.max(1, answer.most)) * inner);
          const what = `${row.label} · ${row.collective} · ${row.what}`;
          const bar = y + step - BAR - 6;
          const much = `${row.seconds} · ${row.amount.text}`;
          const where = `${row.text}, ${row.link_text}`;
          const room = narrow ? inner : width - much.length * LETTER - 16;
          const choose = () => pick(picked === i ? null : i);
          return html`<g key=${i} class=${`call rank dim-${row.dimension || "none"}${picked === i ? " chosen" : ""}`} role="button" tabindex="0" aria-pressed=${picked === i} onClick=${choose}
            onKeyDown=${(event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), choose())}>
            <title>${`${what}. ${where}: ${row.calls} calls, ${row.amount.text}, links are busy for ${row.seconds}${row.rate && `, ${row.rate}`}`}</title>
            <rect class="hit" x="0" y=${y} width=${width} height=${step - 2} rx="4" />
            <text aria-hidden="true" x="4" y=${y + 11} dominant-baseline="central">${cut(narrow ? what : `${what} · ${where}`, what, room)}</text>
            ${narrow && html`<text aria-hidden="true" x="4" y=${y + 11 + LINE} dominant-baseline="central">${cut(where, where, room)}</text>`}
            <text aria-hidden="true" class="much" x=${narrow ? 4 : width - 4} y=${y + 11 + (narrow ? 2 * LINE : 0)} text-anchor=${narrow ? "start" : "end"} dominant-baseline="central">${much}</text>
            <rect class=${`link ${row.link}`} x="4" y=${bar} width=${wide} height=${BAR} rx="2" />
          </g>`;
        })}
      </svg>`}</div>
      <p class="quiet">Bars are the time that the links of a group are busy. A framed bar is between nodes. Choose a row to see its ranks above.</p>
      <h3 class="sub">By dimension and link</h3>
      <div class="table" tabindex="0" role="region" aria-label="Traffic by dimension and link"><table>
        <thead><tr>${["Dimension", "Links", "Calls", "Bytes", "Busy", "Share of the step"].map((name) => html`<th scope="col" key=${name}>${name}</th>`)}</tr></thead>
        <tbody>${answer.sums.map((sum) => html`<tr key=${sum.label + sum.link}><th scope="row">${sum.label}</th><td>${sum.link_text}</td><td>${sum.calls}</td>
          <td>${sum.amount.text}</td><td>${sum.seconds}</td><td>${sum.share}</td></tr>`)}</tbody>
      </table></div>`}
  <//>`;
}

/** A text that fits into so many pixels: whole, or its first part, or as much of that as there is room for. */
function cut(text, part, room) {
  const some = text.length * LETTER <= room ? text : part;
  const most = Math.max(4, Math.floor(room / LETTER));
  return some.length <= most ? some : `${some.slice(0, most - 1)}…`;
}
