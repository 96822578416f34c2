// Changes of the layout, each priced by itself: what would fit, with GiB and ms.
import { html } from "./html.js";
import { Figure } from "./figure.js";

/** The changes so far; choose one to take it. */
export function Chips({ fits, end, fitsNow, waiting, take, copies, stale }) {
  const sorted = [...fits].sort((a, b) => b.fits - a.fits || a.seconds - b.seconds);
  const rows = sorted.map((f) => [f.text, f.group, f.fits ? "fits" : "too large", f.amount.text, f.memory, f.time]);
  return html`<${Figure} id="fits" title=${fitsNow ? "What else would fit" : "What would fit"} stale=${stale} copies=${copies} drawing=${null}
    source="predicted · memory exact, times simulated" about="One change at a time, against the layout above. Those that fit come first, the fastest of them first. Choose one to take it."
    columns=${["Change", "What stays", "Fits", "Memory", "Difference", "Step time"]} rows=${rows}>
    ${[...new Set(fits.map((f) => f.group))].map((group) => html`<div class="chip-group" key=${group}><h3>${group}</h3>
      <ul class="chips">${sorted.filter((f) => f.group === group).map((f) => html`<li key=${f.text}>
        <button type="button" class=${f.fits ? "chip yes" : "chip no"} onClick=${() => take(f.question)}>
          <span class="name">${f.text}</span>
          <span class="state">${f.fits ? "fits" : "too large"}</span>
          <b>${f.amount.text}</b>
          <span class="change">${f.memory}</span>
          <span class="time">${f.time}</span>
        </button></li>`)}</ul></div>`)}
    <p class=${end ? "quiet done" : "quiet"} role="status">${end ? end.text : waiting ? `${fits.length} changes priced …` : ""}</p>
  <//>`;
}
