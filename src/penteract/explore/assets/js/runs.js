// The Runs view: curves of runs, live; memory predicted beside measured; checkpoints; and why a run failed.
import { useFolderAnswer } from "./folder_answer.js";
import { html, useState } from "./html.js";
import { Figure, useWidth } from "./figure.js";

const [HIGH, TOP, BOTTOM, SIDE] = [190, 8, 24, 64]; // of a curve, in pixels
const MARKS = 9;

/** The newest answer about runs, asked for again and again while it is looked at. */
export function useRuns({ runs, question, view }) {
  const [answer] = useFolderAnswer(view === "runs" ? { kind: "runs", question, ...(runs?.length && { runs }) } : null, [runs, view]);
  return answer;
}

/** The headline of the view. */
export function runsSum(answer, terms) {
  return answer && { what: `Runs in ${answer.folder}`, term: terms.runs, number: answer.number, verdict: answer.verdict, good: answer.good,
    facts: answer.facts, headline: answer.command, notes: [] };
}

/** The view. */
export function RunsView({ answer, state, setState, terms, copies }) {
  if (!answer) return html`<section class="figure"><p class="waiting" role="status">The folder is read …</p></section>`;
  const chosen = answer.runs.filter((run) => run.chosen).sort((a, b) => a.colour - b.colour);
  const toggle = (run) => {
    const names = chosen.map((one) => one.name);
    setState({ ...state, runs: run.chosen ? names.filter((name) => name !== run.name) : [...names, run.name] });
  };
  const rows = answer.runs.map((run) => [run.name, run.state, run.step, run.since, run.predicted, run.measured, run.difference, run.predicted_step, run.measured_step, run.step_difference]);
  return html`
    <${Figure} id="runs" title="Runs" source="as their folders say" stale="" copies=${copies} drawing=${null} about=${terms.runs}
      columns=${["Run", "State", "Step", "Since", "Memory, predicted", "Memory, measured", "Difference", "Step, predicted", "Step, measured", "Difference"]} rows=${rows}>
      ${answer.runs.length === 0 && html`<p class="quiet">${answer.verdict} This fills it: <code class="command">${answer.command}</code></p>`}
      <ul class="chips runs">${answer.runs.map((run) => html`<li key=${run.name}>
        <button type="button" class=${`chip ${run.good ? "yes" : "no"}`} aria-pressed=${run.chosen} onClick=${() => toggle(run)}>
          <span class="name">${run.chosen && html`<i class=${`swatch run-${run.colour}`}></i> `}${run.name}</span><span class="state">${run.state}</span>
          <span class="time">${[run.step && `step ${run.step}`, run.since].filter(Boolean).join(" · ")}</span></button></li>`)}</ul>
      ${answer.runs.length > 0 && html`<p class="quiet">Choose up to six, to see them over each other. The page looks again every two seconds.</p>`}
    <//>
    ${answer.curves.map((curve) => html`<${Curve} key=${curve.name} curve=${curve} copies=${copies} terms=${terms} />`)}
    ${chosen.length > 0 && html`<${Details} runs=${chosen} copies=${copies} terms=${terms} />`}`;
}

/** One field over the steps. */
function Curve({ curve, copies, terms }) {
  const [ref, width] = useWidth();
  const [at, point] = useState(null); // [line, point]
  const inner = Math.max(1, width - SIDE - 12);
  const high = HIGH - TOP - BOTTOM;
  const x = (share) => SIDE + share * inner;
  const y = (share) => TOP + (1 - share) * high;
  const few = curve.across.filter((_, i) => i % Math.ceil(curve.across.length / Math.max(2, Math.min(MARKS, inner / 70))) === 0);
  const line = curve.lines[Math.min(at?.[0] ?? 0, curve.lines.length - 1)];
  const number = Math.min(at?.[1] ?? line.texts.length - 1, line.texts.length - 1);
  const over = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    let best = null;
    curve.lines.forEach((one, i) => {
      for (let p = 0; p < one.texts.length; p += 1) {
        const far = (x(one.points[2 * p]) - px) ** 2 + (y(one.points[2 * p + 1]) - py) ** 2;
        if (!best || far < best[0]) best = [far, i, p];
      }
    });
    if (best) point([best[1], best[2]]);
  };
  const key = (event) => {
    const along = { ArrowRight: 1, ArrowLeft: -1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 }[event.key];
    const across = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (along === undefined && across === undefined) return;
    event.preventDefault();
    const i = curve.lines.indexOf(line);
    if (across) return point([Math.max(0, Math.min(curve.lines.length - 1, i + across)), number]);
    point([i, Math.max(0, Math.min(line.texts.length - 1, number + along))]);
  };
  const rows = [...curve.levels, ...curve.lines].flatMap((one) => (one.texts ?? [one.text]).map((text) => [one.run, text.slice(one.run.length + 2)]));
  const id = `curve-${curve.name.replace("/", "-")}`;
  return html`<${Figure} id=${id} title=${`${curve.label}${curve.unit && `, ${curve.unit}`}`} source=${curve.levels.length > 0 ? "measured · predicted before it ran · metrics.jsonl" : "measured · metrics.jsonl"} stale="" copies=${copies} about=${terms.curves}
    columns=${["Run", "Step and value"]} rows=${rows}>
    <div class="plot" ref=${ref}>${width > 0 && html`<svg class="chart curve" width=${width} height=${HIGH} tabindex="0" role="slider" aria-label=${`${curve.label} over the steps`}
      aria-valuemin="0" aria-valuemax=${line.texts.length - 1} aria-valuenow=${number} aria-valuetext=${line.texts[number]} onPointerMove=${over} onKeyDown=${key}>
      <g class="grid">${curve.up.map((tick) => html`<g key=${tick.text}><line x1=${SIDE} x2=${width - 12} y1=${y(tick.at)} y2=${y(tick.at)} />
        <text x=${SIDE - 8} y=${y(tick.at)} text-anchor="end" dominant-baseline="central">${tick.text}</text></g>`)}
        ${few.map((tick) => html`<text key=${tick.text} x=${x(tick.at)} y=${HIGH - 8} text-anchor="middle">${tick.text}</text>`)}</g>
      ${curve.lines.map((one) => html`<g key=${one.run} class=${`run-${one.colour}`}>${one.texts.length > 1
        ? html`<polyline class="run-line" points=${one.texts.map((_, p) => `${x(one.points[2 * p]).toFixed(1)},${y(one.points[2 * p + 1]).toFixed(1)}`).join(" ")} />`
        : html`<circle class="run-dot" r="3" cx=${x(one.points[0])} cy=${y(one.points[1])} />`}</g>`)}
      ${curve.levels.map((one) => html`<g key=${one.run} class=${`run-${one.colour}`}><title>${one.text}</title><line class="run-level" x1=${SIDE} x2=${width - 12} y1=${y(one.at)} y2=${y(one.at)} />
        <text class="level" x=${width - 14} y=${y(one.at) + (one.at > 0.85 ? 12 : -5)} text-anchor="end">predicted</text></g>`)}
      <g class="cursor"><circle r="4.5" cx=${x(line.points[2 * number])} cy=${y(line.points[2 * number + 1])} /></g>
    </svg>`}
    <p class="reading">${line.texts[number]}</p>
    ${curve.levels.map((one) => html`<p key=${one.run} class="quiet">${one.text}</p>`)}</div>
  <//>`;
}

/** Memory, checkpoints and errors of the chosen runs. */
function Details({ runs, copies, terms }) {
  const rows = runs.flatMap((run) => [[run.name, "state", run.state], [run.name, "memory", `${run.predicted} predicted, ${run.measured} measured`],
    [run.name, "step", `${run.predicted_step || "not"} predicted, ${run.measured_step || "not"} measured`],
    ...run.checkpoints.map((one) => [run.name, `checkpoint ${one.step}`, `${one.size}, ${one.saved}, ${one.proven ? "proven" : "not proven"}`]),
    ...run.errors.map((one) => [run.name, `error of rank ${one.rank}`, one.text])]);
  return html`<${Figure} id="details" title="What their folders say" source="measured and predicted · metrics.jsonl, status.json, errors.jsonl" stale="" copies=${copies} drawing=${null} about=${terms.proven}
    columns=${["Run", "What", "Value"]} rows=${rows}>${runs.map((run) => html`<div class="side run" key=${run.name}>
      <h3 class="long-name"><i class=${`swatch run-${run.colour}`}></i> ${run.name}</h3>
      ${run.command && html`<p><code class="command">${run.command}</code></p>`}
      <dl class="facts">${[["State", run.state], ["Memory, predicted", run.predicted], ["Memory, measured", run.measured], ["Measured less predicted", run.difference],
        ["Step, predicted", run.predicted_step], ["Step, measured", run.measured_step], ["Measured less predicted step", run.step_difference]]
        .filter(([, text]) => text).map(([label, text]) => html`<div key=${label}><dt>${label}</dt><dd>${text}</dd></div>`)}</dl>
      ${run.errors.map((error, i) => html`<p class="wrong" key=${i}>rank ${error.rank}, ${error.time}: ${error.text}</p>`)}
      ${run.note && html`<p class="noted">${run.note}</p>`}
      ${run.checkpoints.length > 0 ? html`<ul class="reasons">${run.checkpoints.map((one) => html`<li key=${one.step}><b>step ${one.step}</b> ${one.size}, ${one.saved},
        ${one.proven ? " proven" : " not proven"}</li>`)}</ul>` : !run.note && html`<p class="quiet">No checkpoint yet.</p>`}
    </div>`)}<//>`;
}
