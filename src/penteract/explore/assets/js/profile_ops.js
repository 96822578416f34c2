// The ops of a step in its order, predicted beside measured; and the kernels of one of them.
import { html } from "./html.js";
import { Bars } from "./bars.js";
import { Figure } from "./figure.js";
import { Term } from "./tip.js";

const FEW = 30; // rows that are shown at first
const COLUMNS = ["Op", "Stream", "Part", "Calls", "Predicted", "Measured", "Measured less predicted", "Share of the step", "Of its ceiling", "Ranks", "Unmatched"];

/** The table. `chosen`: the op whose kernels are shown; `shown`: which rows, "all", "long" or "unmatched". */
export function Ops({ figures, chosen, shown, put, terms, copies, stale }) {
  const { ops } = figures;
  const unmatched = ops.filter((op) => op.matched !== "both");
  const which = shown ?? (ops.length > FEW ? "long" : "all");
  const least = which === "long" ? [...ops].sort((a, b) => b.measured.picoseconds - a.measured.picoseconds)[FEW - 1]?.measured.picoseconds ?? 0 : 0;
  const some = which === "unmatched" ? unmatched : ops.filter((op) => op.measured.picoseconds >= least);
  const most = Math.max(1, ...ops.flatMap((op) => [op.predicted.picoseconds, op.measured.picoseconds]));
  const rows = ops.map((op) => [op.name, op.stream, op.part, op.calls, op.predicted.text, op.measured.text, op.change, op.share, op.reached, op.skew, op.note]);
  const columns = [...COLUMNS, "Predicted, ps", "Measured, ps"];
  const file = () => ({ columns, rows: rows.map((row, i) => [...row, ops[i].predicted.picoseconds, ops[i].measured.picoseconds]) });
  const choices = [["all", `All ${ops.length}`], ["long", `The longest ${Math.min(FEW, ops.length)}`], ["unmatched", `Unmatched ${unmatched.length}`]];
  return html`<${Figure} id="ops" title="Ops in the order of a step" source="predicted · measured under the profiler, mean of its steps" stale=${stale} copies=${copies} drawing=${null}
    about=${terms.ops} columns=${COLUMNS} rows=${rows} file=${file}>
    <div class="filters" role="group" aria-label="Which ops">${choices.map(([name, text]) => html`<button type="button" key=${name} aria-pressed=${which === name} onClick=${() => put({ ops: name })}>${text}</button>`)}</div>
    <div class="table ops" tabindex="0" role="region" aria-label="Ops in the order of a step"><table>
      <thead><tr>${["Op", "Calls", "Predicted", "Measured", "", "Share", "Of its ceiling", "Ranks"].map((name, i) => html`<th scope="col" key=${i}>${name || html`<span class="hidden">Predicted above measured</span>`}</th>`)}</tr></thead>
      <tbody>${some.map((op) => html`<tr key=${op.number} class=${`${op === chosen ? "it" : ""} ${op.matched}`}>
        <th scope="row"><button type="button" class="plain" aria-pressed=${op === chosen} onClick=${() => put({ op: op.number })}>
          <i class="swatch" aria-hidden="true" style=${{ background: `var(--lane-${figures.lanes.kinds[op.kind]?.name ?? "unmatched"})` }}></i>${op.name}</button>
          ${op.note && html`<small class="note">${op.note}</small>`}</th>
        <td>${op.calls}</td><td>${op.predicted.text}</td><td><b>${op.measured.text}</b></td>
        <td class="two"><svg width="90" height="18" aria-hidden="true"><rect class="of-plan" x="0" y="1" width=${(90 * op.predicted.picoseconds) / most} height="7" /><rect class="of-run" x="0" y="9" width=${(90 * op.measured.picoseconds) / most} height="7" /></svg></td>
        <td>${op.share}</td><td>${op.reached}</td><td>${op.skew}</td></tr>`)}</tbody>
    </table></div>
    <p class="quiet">${some.length < ops.length ? `${some.length} of ${ops.length} rows. ` : ""}${figures.ops_about} <${Term} text=${terms.unmatched}>${figures.unmatched}<//></p>
  <//>`;
}

/** What ran in an op. */
export function Kernels({ op, copies, stale, terms }) {
  if (!op) return null;
  const most = Math.max(1, ...op.kernels.map((one) => one.took.picoseconds));
  const rows = op.kernels.map((one) => [op.name, one.name, one.calls, one.took.text, one.took.picoseconds, one.share]);
  return html`<${Figure} id="kernels" title=${`Kernels of ${op.name}`} source="measured under the profiler" stale=${stale} copies=${copies} about=${terms.kernels} drawing=${op.kernels.length ? undefined : null}
    columns=${["Op", "Kernel", "Calls in a step", "Time", "Picoseconds", "Share of the op"]} rows=${rows}>
    <p class="quiet">${op.matched === "predicted" ? "Nothing was measured under this name." : `${op.measured.text} in ${op.calls} calls; predicted ${op.predicted.text}. ${op.part}.`}</p>
    ${op.kernels.length > 0 && html`<${Bars} label="Kernels, those that take longest first" side=${420} room=${190} rows=${op.kernels.map((one, i) => ({ key: i, label: one.name, much: `${one.took.text} · ${one.calls} × · ${one.share}`,
      title: `${one.name}: ${one.took.text} in ${one.calls} calls, ${one.share} of the op`, lines: [[{ from: 0, to: one.took.picoseconds / most, look: "of-run" }]] }))} />`}
  <//>`;
}
