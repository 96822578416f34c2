// The headline of a view: its number, a sentence about it and further numbers; or what is wrong with the layout.
import { html, useState } from "./html.js";
import { copied, download } from "./figure.js";
import { Term } from "./tip.js";

/** The headline of the Memory view. */
export function memorySum(figures, terms) {
  return figures && {
    what: `Memory of ${figures.rank_label}`, term: terms["fullest rank"], number: figures.total.text, verdict: figures.verdict,
    good: figures.fits, facts: figures.facts, headline: figures.headline, notes: figures.notes,
  };
}

/** The headline of the Schedules view. */
export function scheduleSum(answer, terms) {
  return answer && {
    what: answer.missing ? "Bubble" : `Bubble of ${answer.schedule}`, term: terms.Bubble, number: answer.bubble, verdict: answer.verdict,
    good: true, facts: answer.facts, headline: answer.headline, notes: [],
  };
}

/** The headline of the Layouts view. */
export function searchSum(answer, terms) {
  return answer && {
    what: "Tokens/s/GPU of the best layout", term: terms.points, number: answer.number, verdict: answer.verdict,
    good: answer.fits, facts: answer.facts, headline: answer.headline, notes: [],
  };
}

/** A headline, `sum`; or what is wrong, and what would be right. */
export function Verdict({ latest, sum, error, take: apply, terms, busy, copies }) {
  const [said, say] = useState("");
  const wrong = error || latest?.broken.length > 0;
  const copy = async ([label, give]) => {
    if (label === "Run file") download("run.toml", "application/toml", await give());
    else say((await copied(await give())) ? `${label} copied` : "the browser does not let pages copy");
    setTimeout(() => say(""), 1600);
  };
  return html`<section class="verdict" aria-label="Result">
    ${wrong && html`<div class="wrong" role="alert">
      <h2>${error ? "This cannot be asked" : "This layout cannot be"}</h2>
      ${error ? html`<p>${error}</p>` : html`<ul>${latest.broken.map((rule, i) => html`<li key=${i}>${rule.text}${rule.allowed && html` <small>allowed: ${rule.allowed}</small>`}</li>`)}</ul>`}
      ${!error && latest.repair && html`<button type="button" class="main" onClick=${() => apply(latest.repair.question)}>Take the nearest: ${latest.repair.text}</button>`}
    </div>`}
    ${sum && wrong && html`<p class="quiet">The last layout that was priced:</p>`}
    ${sum && html`<div class=${wrong ? "sum old" : busy ? "sum stale" : "sum"}>
      <div class=${sum.good ? "total yes" : "total no"}>
        <p class="kind"><${Term} text=${sum.term}>${sum.what}<//></p>
        <p class="big">${sum.number}</p>
        <p class="state">${sum.verdict}</p>
      </div>
      <dl class="facts">${sum.facts.map((fact) => html`<div key=${fact.label}>
        <dt><${Term} text=${terms[fact.label] ?? fact.source}>${fact.label}<//></dt><dd>${fact.text}</dd></div>`)}</dl>
      <p class="headline">${sum.headline}</p>
      ${sum.notes.map((note) => html`<p class="noted" key=${note}>${note}</p>`)}
      <p class="tools">${copies.map((one) => html`<button type="button" key=${one[0]} onClick=${() => copy(one)}>
        ${one[0] === "Run file" ? "Save run file" : `Copy ${one[0].toLowerCase()}`}</button>`)}<span class="said" role="status">${said}</span></p>
    </div>`}
    ${!sum && !wrong && html`<p class="waiting" role="status">The planner is pricing …</p>`}
  </section>`;
}
