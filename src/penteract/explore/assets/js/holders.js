// Who holds which part of a parameter: the parameter cut into parts, and the ranks that hold each.
import { html, useRef, useState } from "./html.js";
import { Figure, useWidth } from "./figure.js";
import { inRuns } from "./mesh_drawing.js";
import { Grid, rankText } from "./mesh.js";
import { Term } from "./tip.js";

const HIGHEST = 190; // of the drawing, in pixels
const WIDEST = 620;

/** A parameter of the rank that is looked at. `choose`: another parameter; `look`: another rank. */
export function Holders({ answer, choose, look, copies, stale, terms }) {
  const { parameter } = answer;
  const [hot, point] = useState(null); // a rank
  const [part, turn] = useState(null); // a part that is pointed at
  const own = parameter.parts.find((one) => one.own);
  const shown = parameter.parts[part] ?? (hot === null ? own : parameter.parts.find((one) => inRuns(one.ranks, hot))) ?? null;
  const paint = (rank) => {
    const dot = inRuns(parameter.states_ranks, rank) ? "optimizer" : null;
    if (shown && inRuns(shown.ranks, rank)) return { fill: "parameters", text: "on-parameters", dot, framed: rank === answer.rank };
    const some = parameter.parts.some((one) => inRuns(one.ranks, rank));
    return { fill: some ? "gradients" : "sunk", text: some ? "on-gradients" : "ink-3", dot, framed: rank === answer.rank };
  };
  const about = (rank) => {
    const one = parameter.parts.find((some) => inRuns(some.ranks, rank));
    return `${rankText(answer, rank)} · ${one ? `holds part ${one.number}, ${one.slice}` : "holds none of it"}`;
  };
  const columns = ["Part", "Elements of each dim", "Ranks", "Held by the chosen rank"];
  const rows = parameter.parts.map((one) => [one.number, one.slice, one.text, one.own ? "yes" : "no"]);
  return html`<${Figure} id="holders" title="Who holds which part of a parameter" source="exact · the sharding that a run uses" stale=${stale} copies=${copies} about=${terms.holders}
    columns=${columns} rows=${rows}>
    <p class="choice-line"><label>Parameter <select id="parameter" value=${parameter.name} onChange=${(event) => choose(event.currentTarget.value)}>
      ${answer.parameters.map((one) => html`<option key=${one.name} value=${one.name} selected=${one.name === parameter.name}>${one.text}</option>`)}</select></label>
      <span class="shape">${parameter.shape}</span></p>
    <dl class="facts">${parameter.facts.map((fact) => html`<div key=${fact.label}><dt><${Term} text=${fact.source}>${fact.label}<//></dt><dd>${fact.text}</dd></div>`)}</dl>
    <div class="halves">
      <${Parts} parameter=${parameter} shown=${shown} turn=${turn} />
      <div><${Grid} answer=${answer} paint=${paint} about=${about} look=${look} hot=${hot} point=${point} label="A rank that may hold a part" changes=${[parameter, part, answer]} /></div>
    </div>
    <ul class="legend" aria-label="What the colours mean">
      <li><i class="swatch" style=${{ background: "var(--parameters)" }}></i>This part <b>${shown ? shown.text : "none"}</b> <small></small></li>
      <li><i class="swatch" style=${{ background: "var(--gradients)" }}></i>Other parts <b></b> <small></small></li>
      <li><i class="swatch round" style=${{ background: "var(--optimizer)" }}></i>Optimizer states of rank ${answer.rank}'s part <b></b> <small></small></li>
    </ul>
    <p class="why">${parameter.states_text}</p>
    ${parameter.states.length > 0 && html`<div class="table short" tabindex="0" role="region" aria-label="Optimizer states of this part"><table>
      <thead><tr><th scope="col">Rank</th><th scope="col">Elements of the part</th><th scope="col">Share</th></tr></thead>
      <tbody>${parameter.states.map((one) => html`<tr key=${one.rank}><th scope="row">${one.rank}</th><td>${one.elements}</td><td>${one.share}</td></tr>`)}</tbody>
    </table></div>`}
  <//>`;
}

/** The parameter as a rectangle, cut. */
function Parts({ parameter, shown, turn }) {
  const [ref, width] = useWidth();
  const at = useRef(0);
  const wide = Math.min(WIDEST, width - 2);
  const high = Math.max(16, Math.min(HIGHEST, wide / parameter.wide));
  const own = shown ?? parameter.parts[0];
  const move = (number) => {
    at.current = Math.max(0, Math.min(parameter.parts.length - 1, number));
    turn(at.current);
  };
  const over = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const [x, y] = [(event.clientX - box.left) / wide, (event.clientY - box.top) / high];
    const found = parameter.parts.findIndex(({ box: [left, top, w, h] }) => x >= left && x <= left + w && y >= top && y <= top + h);
    turn(found < 0 ? null : found);
  };
  const key = (event) => {
    const along = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -parameter.parts.length, End: parameter.parts.length }[event.key];
    if (along === undefined) return;
    event.preventDefault();
    move(own.number + along);
  };
  return html`<div class="plot" ref=${ref}>${width > 0 && html`<svg class="chart parts" width=${wide + 2} height=${high + 2} tabindex="0" role="slider" aria-label="A part of the parameter"
      aria-valuemin="0" aria-valuemax=${Math.max(0, parameter.parts.length - 1)} aria-valuenow=${own.number} aria-valuetext=${`part ${own.number}: ${own.slice}, ranks ${own.text}`}
      onPointerMove=${over} onPointerLeave=${() => turn(null)} onBlur=${() => turn(null)} onKeyDown=${key}>
      ${parameter.parts.map((part) => html`<rect key=${part.number} class=${`piece${part === shown ? " it" : ""}`} x=${1 + part.box[0] * wide} y=${1 + part.box[1] * high}
        width=${Math.max(0.5, part.box[2] * wide - 0.5)} height=${Math.max(0.5, part.box[3] * high - 0.5)}><title>${`part ${part.number}: ${part.slice}, ranks ${part.text}`}</title></rect>`)}
    </svg>`}
    <p class="reading"><b>part ${own.number}</b> · <span>${own.slice}</span> · ${own.text}</p></div>`;
}
