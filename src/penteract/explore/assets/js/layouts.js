// The best layouts as a table, with reasons; where the step of the chosen one goes; two side by side; other questions.
import { html, useEffect, useRef, useState } from "./html.js";
import { Figure } from "./figure.js";
import { alike } from "./points.js";
import { Waterfalls } from "./waterfall.js";

/** The rows of `penteract plan`, and why others are not among them. */
export function Best({ answer, state, copies, stale, take, against }) {
  const cost = answer.top.some((row) => row.hours);
  const usd = answer.top.some((row) => row.usd);
  const columns = ["#", "Layout", "Memory", "Tokens/s/GPU", "Step", "MFU", "Bubble", "Limited by", ...(cost ? ["GPU-hours", "Days"] : []), ...(usd ? ["USD"] : [])];
  const cells = (row) => [row.number, row.point.name, row.point.amount.text, row.point.speed.split(" tokens")[0], row.point.step, row.mfu, row.bubble, row.limited_by,
    ...(cost ? [row.hours, row.days] : []), ...(usd ? [row.usd] : [])];
  const reasons = answer.left_out.map((one) => ["left out", one.why, one.text]);
  const file = () => ({ columns, rows: [...answer.top.map(cells), ...reasons] });
  return html`<${Figure} id="best" title="The best layouts" source="predicted · memory exact, times simulated" stale=${stale} copies=${copies} drawing=${null}
    about="What penteract plan prints for the command: exact, no layout of the search is faster." columns=${columns} rows=${answer.top.map(cells)} file=${file}>
    <div class="table" tabindex="0" role="region" aria-label="The best layouts"><table>
      <thead><tr>${columns.map((name) => html`<th scope="col" key=${name}>${name}</th>`)}<th scope="col">Choose</th></tr></thead>
      <tbody>${answer.top.map((row) => html`<tr key=${row.number} class=${alike(row.point.layout, state.question.layout) ? "it" : ""}>
        ${cells(row).map((cell, i) => (i === 1 ? html`<th scope="row" key=${i}><span class="long-name">${cell}</span></th>` : html`<td key=${i}>${cell}</td>`))}
        <td class="choose"><button type="button" aria-label=${`Choose number ${row.number}`} onClick=${() => take(row.point)}>A</button>
          <button type="button" aria-label=${`Compare with number ${row.number}`} onClick=${() => against(row.point.layout)}>B</button></td></tr>`)}</tbody>
    </table></div>
    <p class="quiet">A is the layout that all views show; B is compared with it below.</p>
    ${answer.notes.map((note, i) => html`<p class="noted" key=${i}>${note}</p>`)}
    <h3 class="sub">Why others are not here</h3>
    <ul class="reasons">${answer.left_out.map((one) => html`<li key=${one.why}><b>${one.text}</b> ${one.why}</li>`)}</ul>
  <//>`;
}

/** Where the step goes, from ideal to predicted, of each side. */
export function Waterfall({ answer, copies, stale }) {
  const columns = ["Layout", "Part", "Time", "Picoseconds", "Share of the step"];
  const rows = answer.sides.flatMap((side) => side.waterfall.map((step) => [side.name, step.label, step.text, step.picoseconds, step.share]));
  return html`<${Figure} id="waterfall" title="From the ideal step to the predicted one" source="predicted · simulated with measured rates" stale=${stale} copies=${copies}
    about="Each part is what the simulated step spends on it beyond the ideal; all add up to the step, to the picosecond." columns=${columns} rows=${rows}>
    <${Waterfalls} most=${answer.most} groups=${answer.sides.map((side, i) => ({ title: `${answer.sides.length > 1 ? `${"AB"[i]}  ` : ""}${side.name}`, rows: rowsOf(side) }))} />
  <//>`;
}

/** The rows of a side, and their sum. */
function rowsOf(side) {
  return [...side.waterfall, { name: "total", label: "Predicted", about: "", level: true, picoseconds: side.picoseconds, text: side.step, share: side.mfu === "-" ? "" : `MFU ${side.mfu}` }];
}

/** Two layouts: where time and memory differ, and why. */
export function Compare({ answer, state, copies, stale, against }) {
  const [one, other] = answer.sides;
  const rows = answer.differences.map((row) => [row.what, row.label, row.chosen, row.other, row.change]);
  return html`<${Figure} id="compare" title="Two layouts, side by side" source="predicted · memory exact, times simulated" stale=${stale} copies=${copies} drawing=${null}
    about="A is the chosen layout. Parts of the step that differ by less than half a per cent of it are left out." columns=${["What", "Part", "A", "B", "B less A"]} rows=${rows}>
    ${!other ? html`<p class="quiet">Choose a layout to compare with: B in the table above, or a point with Shift.</p>` : html`
      <div class="sides">${answer.sides.map((side, i) => html`<div class="side" key=${i}>
        <p class="kind">${"AB"[i]}</p><h3 class="long-name">${side.name}</h3>
        <dl class="facts"><div><dt>Step</dt><dd>${side.step}</dd></div><div><dt>Tokens/s/GPU</dt><dd>${side.speed.split(" tokens")[0]}</dd></div>
          <div><dt>Memory</dt><dd>${side.amount.text}</dd></div><div><dt>MFU</dt><dd>${side.mfu}</dd></div></dl>
        <p class="quiet">${side.verdict}; limited by ${side.limited_by}${side.cost && html`<br />${side.cost}`}</p></div>`)}</div>
      ${answer.why.map((text) => html`<p key=${text} class="why">${text}</p>`)}
      <ul class="differences">${answer.differences.map((row) => html`<li key=${row.what + row.name} class=${row.size < 0 ? "less" : "more"}>
        <span>${row.what === "time" ? "Time" : "Memory"}: ${row.label}</span><b>${row.change}</b><small>${row.chosen} → ${row.other}</small></li>`)}</ul>
      <p><button type="button" onClick=${() => against(null)}>Compare with nothing</button></p>`}
  <//>`;
}

/** Other cards, more or fewer of them, other sequences; and what a training costs. */
export function WhatIf({ others, done, state, copies, stale, take, put }) {
  const columns = ["Otherwise", "Best layout", "Memory", "Tokens/s/GPU", "Against this question", "Step", "Training"];
  const rows = others.map((o) => [o.text, o.why_not || o.name, o.why_not ? "" : o.amount.text, o.speed, o.change, o.step, o.cost]);
  return html`<${Figure} id="what-if" title="What if" source="predicted · memory exact, times simulated" stale=${stale} copies=${copies} drawing=${null}
    about="The best layout of another question, by a search of its own. Choose one to ask it." columns=${columns} rows=${rows}>
    <div class="costs">
      <${Later} label="Tokens of the training" name="tokens" value=${state.search?.tokens ?? ""} placeholder="15T" take=${(tokens) => put({ tokens })} />
      <${Later} label="USD per GPU-hour" name="usd" value=${state.search?.usd_per_gpu_hour || ""} placeholder="2.5" take=${(text) => put({ usd_per_gpu_hour: Number(text) || 0 })} />
    </div>
    <ul class="chips">${others.map((one) => html`<li key=${one.text}>
      <button type="button" class=${one.why_not ? "chip no" : "chip yes"} disabled=${one.question === null} onClick=${() => take(one.question)}>
        <span class="name">${one.text}</span><span class="state">${one.why_not ? "none" : one.change}</span>
        ${one.why_not ? html`<span class="time">${one.why_not}</span>` : html`<b>${one.speed}</b><span class="change">${one.amount.text}</span>
          <span class="time long-name">${one.name}</span>${one.cost && html`<span class="time">${one.cost}</span>`}`}
      </button></li>`)}</ul>
    <p class=${done ? "quiet done" : "quiet"} role="status">${done ? `${others.length} other questions` : "Other questions are searched …"}</p>
  <//>`;
}

/** A field that is taken after a short pause, or at once with Enter. */
function Later({ label, name, value, placeholder, take }) {
  const [text, set] = useState(String(value));
  const timer = useRef(0);
  useEffect(() => set(String(value)), [value]);
  const now = (written) => {
    clearTimeout(timer.current);
    if (written !== String(value)) take(written);
  };
  return html`<label>${label} <input id=${`cost-${name}`} type="text" inputmode=${name === "usd" ? "decimal" : "text"} value=${text} placeholder=${placeholder} maxlength="20"
    onInput=${(event) => {
      const written = event.currentTarget.value;
      set(written);
      clearTimeout(timer.current);
      timer.current = setTimeout(() => now(written), 500);
    }} onChange=${(event) => now(event.currentTarget.value)} /></label>`;
}
