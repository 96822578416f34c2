// The Profile view: a measured step beside its prediction. Which profiles there are, one of them in full, and two compared.
import { askOne } from "./ask.js";
import { html, useEffect, useState } from "./html.js";
import { Figure } from "./figure.js";
import { Kernels, Ops } from "./profile_ops.js";
import { ProfileLanes } from "./profile_lanes.js";
import { Compared, Owners, Skew } from "./profile_figures.js";
import { Waterfalls } from "./waterfall.js";

const PAUSE = 15; // ms: changes that belong together are one question

/** The newest answer about profiles, and whether one is on its way. Asked for again when the reader comes back to the page. */
export function useProfile({ profile, question, view }, files) {
  const [answer, set] = useState(null);
  const [busy, setBusy] = useState(false);
  const [again, look] = useState(0);
  const asked = JSON.stringify([profile?.name, profile?.against, profile?.rank]);
  useEffect(() => {
    if (view !== "profile") return undefined;
    const stop = new AbortController();
    const { name, against, rank } = profile ?? {};
    setBusy(true);
    const request = { kind: "profile", question, ...(asked !== "[null,null,null]" && { profile: { name, against, rank } }), ...(files.length && { files }) };
    const timer = setTimeout(() => askOne(request, stop.signal).then((found) => {
      setBusy(false);
      if (found) set(found.kind === "error" ? { why: found.text, profiles: [], figures: null, comparison: null, command: "penteract profile latest", folder: "" } : found);
    }, () => stop.signal.aborted || setBusy(false)), PAUSE); // the page has gone on, or the server has gone: the price says so
    return () => {
      clearTimeout(timer);
      stop.abort();
    };
  }, [asked, view, files, again]);
  useEffect(() => {
    if (view !== "profile") return undefined;
    const back = () => look((n) => n + 1);
    addEventListener("focus", back);
    return () => removeEventListener("focus", back);
  }, [view]);
  return [answer, busy];
}

/** The headline of the view. */
export function profileSum(answer, terms) {
  const found = answer?.figures;
  if (!answer) return answer;
  if (!found) return { what: answer.folder ? `Profiles in ${answer.folder}` : "Profiles", term: terms.profiles, number: answer.profiles.length ? "-" : "No profile", verdict: answer.why,
    good: !answer.profiles.length, facts: [], headline: answer.command, notes: [] };
  return { what: "Measured step", term: terms["measured step"], number: found.number, verdict: found.verdict, good: found.good, facts: found.facts, headline: found.headline, notes: found.notes };
}

/** The view. `open`: opens files of the reader, and resolves to their names. */
export function ProfileView({ answer, busy, state, setState, open, terms, copies }) {
  const own = state.profile ?? {};
  const put = (change) => setState((old) => ({ ...old, profile: { ...old.profile, ...change } }));
  if (!answer) return html`<section class="figure"><p class="waiting" role="status">The profile is read …</p></section>`;
  const { figures, comparison } = answer;
  const stale = busy ? "stale" : "";
  const op = figures && (figures.ops.find((one) => one.number === own.op) ?? longest(figures.ops));
  const shared = { figures, terms, copies, stale, put };
  return html`
    <${Chooser} answer=${answer} put=${put} open=${open} terms=${terms} copies=${copies} />
    ${figures && html`
      <${Verdict} ...${shared} />
      <${ProfileLanes} ...${shared} chosen=${op} own=${own} />
      <${Ops} ...${shared} chosen=${op} shown=${own.ops} />
      <${Kernels} op=${op} copies=${copies} stale=${stale} terms=${terms} />
      <${Skew} ...${shared} />
      <${Owners} ...${shared} />`}
    ${figures && html`<${Compared} comparison=${comparison} several=${answer.profiles.length > 1} copies=${copies} stale=${stale} put=${put} />`}`;
}

const longest = (ops) => ops.reduce((best, one) => (!best || one.measured.picoseconds > best.measured.picoseconds ? one : best), null);

/** Which profiles there are. */
function Chooser({ answer, put, open, terms, copies }) {
  const rows = answer.profiles.map((one) => [one.name, one.text, one.side]);
  const take = async (event) => {
    const [a, b] = await open([...event.currentTarget.files]);
    if (a) put({ name: a, rank: undefined, op: undefined, zoom: undefined, ...(b && { against: b }) });
  };
  return html`<${Figure} id="profiles" title="Profiles" source="files of penteract profile" stale="" copies=${copies} drawing=${null} about=${terms.profiles}
    columns=${["Profile", "Written", "Side"]} rows=${rows}>
    ${answer.why && html`<p class="quiet">${answer.why} This makes one: <code class="command">penteract profile latest</code> · this shows a folder of them: <code class="command">penteract explore --profiles profiles</code></p>`}
    ${rows.length > 0 && html`<ul class="shelf">${answer.profiles.map((one) => html`<li key=${one.name} class=${one.side ? "it" : ""}>
      <span class="sides-of"><button type="button" aria-pressed=${one.side === "A"} aria-label=${`Show ${one.name}`} onClick=${() => put({ name: one.name, rank: undefined, op: undefined, zoom: undefined })}>A</button>
        <button type="button" aria-pressed=${one.side === "B"} aria-label=${`Compare with ${one.name}`} disabled=${one.side === "A"}
          onClick=${() => put({ against: one.side === "B" ? undefined : one.name })}>B</button></span>
      <span class="name">${one.name}</span> <span class="time">${one.text}</span></li>`)}</ul>`}
    <p class="quiet"><label class="file">Open a profile.json …
      <input type="file" accept=".json,application/json" multiple onChange=${take} /></label> or drop it on the page. A is shown; B is compared with it.</p>
  <//>`;
}

/** From ideal to predicted to measured, and what would gain most. */
function Verdict({ figures, copies, stale, terms }) {
  const rows = figures.waterfall.map((row) => [row.label, row.text, row.picoseconds, row.share, row.level ? "sum" : "change"]);
  const advice = figures.advice.map((one) => ["would gain", one.gain, "", one.share, `${one.what}; ${one.price}`]);
  const columns = ["Part", "Time", "Picoseconds", "Share of the measured step", "What"];
  return html`<${Figure} id="profile-waterfall" title="From the ideal step to the predicted one, to the measured one" source="predicted · measured without a profiler" stale=${stale} copies=${copies}
    about=${terms["profile waterfall"]} columns=${columns} rows=${rows} file=${() => ({ columns, rows: [...rows, ...advice] })}>
    <${Waterfalls} most=${figures.most} groups=${[{ title: "", rows: figures.waterfall }]} />
    <h3 class="sub">${figures.advice.length ? "What would gain most" : "Nothing gains more than 1% of a step."}</h3>
    <ol class="advice">${figures.advice.map((one) => html`<li key=${one.what}><b>${one.gain}</b> <span class="share">${one.share}</span>
      <span class="name">${one.what}</span> <small>${one.price}</small></li>`)}</ol>
  <//>`;
}
