// The same layout under each schedule: its bubble, its step and its memory. Choose one to take it.
import { html } from "./html.js";
import { Figure } from "./figure.js";

/** The schedules so far. `missing`: why there are none; `more`: a question that has some. */
export function Schedules({ choices, done, missing, more, take, copies, stale }) {
  const rows = choices.map((one) => [one.name, one.bubble, one.step, one.time, one.why_not ? "" : one.amount.text, one.memory,
    one.why_not || (one.fits ? "fits" : "too large")]);
  return html`<${Figure} id="schedules" title="Every schedule, for this layout" source="predicted · memory exact, times simulated" stale=${stale} copies=${copies} drawing=${null}
    about="The schedules that a layout may use, one at a time, against the layout above. One that needs more chunks a rank gets the fewest that it takes."
    columns=${["Schedule", "Bubble", "Step", "Difference", "Memory", "Difference in memory", "Fits"]} rows=${rows}>
    <ul class="chips">${choices.map((one) => html`<li key=${one.name}>
      <button type="button" class=${one.fits ? "chip yes" : "chip no"} aria-pressed=${one.now} disabled=${one.question === null} onClick=${() => take(one.question)}>
        <span class="name">${one.name}${one.now ? " · now" : ""}</span>
        <span class="state">${one.why_not ? "not possible" : one.fits ? "fits" : "too large"}</span>
        ${one.why_not ? html`<span class="time">${one.why_not}</span>` : html`
          <b>bubble ${one.bubble}</b><span class="change">${one.step}</span>
          <span class="time">${one.now ? one.amount.text : `${one.time} · ${one.amount.text} (${one.memory})`}</span>`}
      </button></li>`)}</ul>
    ${missing && html`<p class="quiet">${missing}</p>
      ${more && html`<p><button type="button" class="main" onClick=${() => take(more)}>Show two pipeline ranks</button></p>`}`}
    <p class=${done ? "quiet done" : "quiet"} role="status">${!done ? "Schedules are priced …" : choices.length ? `${choices.length} schedules were tried` : "No schedule to choose without a pipeline."}</p>
  <//>`;
}
