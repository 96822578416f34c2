// The Bench view: a sweep of the folder, or a file that the reader has. Which cases, and what became of them; the figures
// are in bench_*.js.
import { HeatMap } from "./bench_heat.js";
import { Cases, Ranking } from "./bench_rows.js";
import { Groups, Residuals, Scatter } from "./bench_points.js";
import { Figure } from "./figure.js";
import { useFolderAnswer } from "./folder_answer.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { isLinked } from "./state.js";
import { Term } from "./tip.js";

const MOST = 24 * 2 ** 20; // bytes of a file

/** Whether a dropped file is a table by its name; one of JSON may be of another kind. */
export const isTable = (file) => /\.(csv|tsv)$/i.test(file.name);

/** The newest answer about a sweep, asked for again and again while its folder is looked at; and `open`, which takes a file. */
export function useBench(state, setState) {
  const { bench, view } = state;
  const [answer, error, fail] = useFolderAnswer(view === "bench" ? { kind: "bench", bench: bench ?? {} } : null, [bench, view]);
  const open = async (file) => {
    if (!file) return;
    if (file.size > MOST) return fail(`${file.name} is larger than ${MOST / 2 ** 20} MiB.`);
    setState({ ...state, view: "bench", bench: { file: { name: file.name.slice(0, 100), text: await file.text() } } });
  };
  return { answer, error, open };
}

/** The headline of the view. */
export function benchSum({ answer }, terms) {
  return answer && { what: answer.what, term: terms.sweeps, number: answer.number, verdict: answer.verdict, good: answer.good,
    facts: answer.facts, headline: answer.headline, notes: answer.notes };
}

/** The view. */
export function BenchView({ bench, state, setState, terms, copies }) {
  const { answer, error, open } = bench;
  const put = (options) => setState({ ...state, bench: { ...state.bench, ...options } });
  const reset = (options) => setState({ ...state, bench: options });
  if (!answer) return html`<${Sources} answer=${{ sweeps: [], empty: error ? "" : "The sweep is read …", states: [], unfinished: [], fields: [], command: "" }}
    error=${error} state=${state} put=${put} reset=${reset} open=${open} terms=${terms} copies=${copies} />`;
  const own = { answer, put, copies, terms, stale: error ? "old" : "" };
  return html`
    <${Sources} answer=${answer} error=${error} state=${state} put=${put} reset=${reset} open=${open} terms=${terms} copies=${copies} />
    ${answer.heat && html`<${HeatMap} ...${own} />`}
    ${answer.ranking && html`<${Ranking} ...${own} />`}
    ${answer.residuals && html`<${Residuals} ...${own} />
      <${Groups} ...${own} />`}
    ${answer.points && html`<${Scatter} ...${own} />`}
    ${answer.table && html`<${Cases} ...${own} bench=${state.bench} />`}`;
}

/** Which sweep or file, which of its cases, and what became of them. */
function Sources({ answer, error, state, put, reset, open, terms, copies }) {
  const file = state.bench?.file;
  const rows = [...answer.states.map((one) => [one.state, one.count, ""]), ...answer.unfinished.map((one) => [one.name, one.state, one.why])];
  return html`<${Figure} id="sweeps" title=${file ? file.name : "Sweeps"} source=${file ? "published or measured · a file of the reader" : "measured · status.json and result.json of each case"}
    about=${terms.sweeps} stale="" copies=${copies} drawing=${null} columns=${["State or case", "Cases or state", "Why"]} rows=${rows}>
    ${error && html`<p class="wrong" role="alert">${error}</p>`}
    ${answer.empty && html`<p class="quiet">${answer.empty}${answer.command && html` This fills it: <code class="command">${answer.command}</code>`}</p>`}
    ${!file && answer.sweeps.length > 0 && html`<ul class="chips">${answer.sweeps.map((one) => html`<li key=${one.name}>
      <button type="button" class="chip" aria-pressed=${one.chosen} onClick=${() => reset({ sweep: one.name })}><span class="name">${one.name}</span><span class="time">${one.text}</span></button></li>`)}</ul>`}
    <p class="choice-line">
      <label class="file open">Open a CSV or JSON of cases … <input type="file" id="bench-file" accept=".csv,.tsv,.json,text/csv,application/json" onChange=${(event) => open(event.currentTarget.files[0])} /></label>
      ${file && html`<button type="button" onClick=${() => reset(undefined)}>Close ${file.name}</button>`}
    </p>
    <p class="quiet">The file stays in this browser and on this machine. ${linkSays(file)}</p>
    ${answer.states.length > 0 && html`<${States} states=${answer.states} />`}
    ${answer.fields.length > 0 && html`<${Filters} fields=${answer.fields} state=${state} put=${put} />`}
    ${answer.unfinished.length > 0 && html`<h3 class="sub">Why cases did not end well</h3>
      <ul class="reasons">${answer.unfinished.map((one) => html`<li key=${one.name}><b>${one.name}</b> ${one.state}: ${one.why}</li>`)}</ul>`}
  <//>`;
}

function linkSays(file) {
  if (!file) return "";
  return isLinked(file) ? "A link to this page has it whole." : "It is too long for a link, which has its name alone.";
}

/** How many cases are in each state, as a bar and as words. */
function States({ states }) {
  let at = 0;
  return html`<svg class="chart states" viewBox="0 0 1000 16" preserveAspectRatio="none" width="100%" height="16" role="img" aria-label=${states.map((one) => `${one.count} ${one.state}`).join(", ")}>
      ${states.map((one) => {
        const left = at;
        at += 1000 * one.share;
        return html`<rect key=${one.state} class=${`state-${kindOf(one.state)}`} x=${left} y="0" width=${Math.max(1, 1000 * one.share - 2)} height="16"><title>${`${one.count} ${one.state}`}</title></rect>`;
      })}</svg>
    <ul class="legend" aria-label="States of cases">${states.map((one) => html`<li key=${one.state}><i class=${`swatch state-${kindOf(one.state)}`} aria-hidden="true"></i>
      <${Term} text=${one.about}>${one.state}<//> <b>${one.count}</b></li>`)}</ul>`;
}

const KINDS = { done: "done", running: "running", pending: "pending", failed: "failed", "out of memory": "memory", "timed out": "time", lost: "lost", skipped: "skipped" };
const kindOf = (state) => KINDS[state] ?? "other";

/** Which cases: values that a field may have, and letters that are looked for. */
function Filters({ fields, state, put }) {
  const only = state.bench?.only ?? {};
  const [text, set] = useState(state.bench?.find ?? "");
  const timer = useRef(0);
  useEffect(() => set(state.bench?.find ?? ""), [state.bench?.find]);
  const toggle = (name, value) => {
    const now = only[name] ?? [];
    const next = now.includes(value) ? now.filter((one) => one !== value) : [...now, value];
    put({ only: Object.fromEntries(Object.entries({ ...only, [name]: next }).filter(([, values]) => values.length)) });
  };
  const take = (letters) => {
    clearTimeout(timer.current);
    if (letters !== (state.bench?.find ?? "")) put({ find: letters });
  };
  const some = fields.filter((field) => field.choices.length > 0);
  const held = Object.keys(only).length > 0 || Boolean(state.bench?.find);
  return html`<details class="which" open=${held}>
    <summary>Which cases${held ? ": filtered" : ""}</summary>
    <div class="filters" role="group" aria-label="Which cases">
      ${some.map((field) => html`<fieldset key=${field.name} class=${DIMENSIONS.includes(field.name) ? `dim-${field.name}` : ""}>
        <legend>${DIMENSIONS.includes(field.name) ? html`<b class="badge">${field.name}</b>` : field.label}</legend>
        ${field.choices.map((one) => html`<button type="button" key=${one.text} aria-pressed=${(only[field.name] ?? []).includes(one.text)}
          aria-label=${`${field.label} ${one.text}, ${one.count} cases`} onClick=${() => toggle(field.name, one.text)}>${one.text}</button>`)}
      </fieldset>`)}
    </div>
    <p class="choice-line"><label>Find <input id="bench-find" type="search" value=${text} maxlength="100" placeholder="letters of a value" onInput=${(event) => {
      const letters = event.currentTarget.value;
      set(letters);
      clearTimeout(timer.current);
      timer.current = setTimeout(() => take(letters), 400);
    }} onChange=${(event) => take(event.currentTarget.value)} /></label>
      ${held && html`<button type="button" onClick=${() => put({ only: {}, find: "" })}>all cases</button>`}</p>
  </details>`;
}

const DIMENSIONS = ["dp", "tp", "pp", "cp", "ep"];
