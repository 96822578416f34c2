// The page: one state, the newest answer to it, and the figures drawn from that.
import { Newest, ask, askOne, watch } from "./ask.js";
import { BenchView, benchSum, isTable, useBench } from "./bench.js";
import { Chips } from "./chips.js";
import { Controls, take } from "./controls.js";
import { html, render, useEffect, useRef, useState } from "./html.js";
import { Lanes } from "./lanes.js";
import { Best, Compare, Waterfall, WhatIf } from "./layouts.js";
import { Memory, Ranks } from "./memory.js";
import { isConfig, isProfile, useOpened } from "./opened.js";
import { Points } from "./points.js";
import { ProfileView, profileSum, useProfile } from "./profile.js";
import { RanksView, ranksSum, useRanks } from "./ranks.js";
import { RunsView, runsSum, useRuns } from "./runs.js";
import { Schedules } from "./schedules.js";
import { useCompare, useSearch } from "./search.js";
import { VIEWS, fromFragment, toFragment } from "./state.js";
import { Step } from "./step.js";
import { Tip } from "./tip.js";
import { Verdict, memorySum, scheduleSum, searchSum } from "./verdict.js";

const PAUSE = 250; // ms without a change before the slower answers are asked for
const THEMES = ["auto", "light", "dark"];
const TITLES = { memory: "Memory", schedules: "Schedules", layouts: "Layouts", ranks: "Ranks", runs: "Runs", bench: "Bench", profile: "Profile" };
const SEARCH = { fix: {}, tokens: "", usd_per_gpu_hour: 0, against: null };

function App({ opening, first, strange }) {
  const [state, setState] = useState(first);
  const [unread, setUnread] = useState(strange); // whether the address was no link of this page
  const [memory, setMemory] = useState(null); // the last answer with figures
  const [latest, setLatest] = useState(null); // the last answer
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(true);
  const [answers, count] = useState(0);
  const newest = useRef(null);
  newest.current ??= new Newest(
    (answer, request, more) => {
      setBusy(more);
      count((n) => n + 1);
      setError(answer.kind === "error" ? answer.text : "");
      if (answer.kind !== "memory") return;
      setLatest(answer);
      if (answer.figures) setMemory(answer);
    },
    (failure) => {
      setBusy(false);
      setError(`No answer: ${failure.message}. Is \`penteract explore\` still running?`);
    },
  );
  const change = (question) => {
    setUnread(false);
    setState({ ...state, question, pp_rank: null });
  };
  const look = (pp_rank) => setState({ ...state, pp_rank });
  useEffect(() => {
    setBusy(true);
    newest.current.ask({ kind: "memory", question: state.question, pp_rank: state.pp_rank });
  }, [state.question, state.pp_rank]);
  const lanes = useLanes(state);
  const [search, stopSearch] = useSearch(state);
  const compared = useCompare(state);
  const ranks = useRanks(state);
  const runs = useRuns(state);
  const [files, open] = useOpened();
  const [profile, reading] = useProfile(state, files);
  const bench = useBench(state, setState);
  const [made, setMade] = useState("served");
  const [moment, setMoment] = useState(null); // where the lanes stand
  useEffect(() => {
    watch(setMade);
  }, []);
  const slow = useSlow(state, made === "live");
  useLink(state, setState, setUnread);
  useDrop(async (some) => {
    const text = isTable(some[0]) ? "" : await some[0].text();
    if (isTable(some[0]) || (state.view === "bench" && !isProfile(text) && !isConfig(text))) return bench.open(some[0]);
    if (!isProfile(text) && (state.view !== "profile" || isConfig(text))) return take(some[0], (model) => change({ ...state.question, model }));
    const [name, against] = await open(some);
    if (name) setState((old) => ({ ...old, view: "profile", profile: { name, against: against ?? old.profile?.against } }));
  });
  const stale = !latest?.figures || error !== "" ? "old" : busy ? "stale" : "";
  const copies = [
    ["Command", async () => ({ layouts: search.answer, runs, bench: bench.answer, profile }[state.view] ?? latest)?.command ?? ""],
    ["Link", async () => location.origin + location.pathname + (await toFragment(state))],
    ["Run file", async () => (await askOne({ kind: "run_file", question: state.question })).text],
  ];
  const figures = memory?.figures;
  const steps = state.view === "schedules";
  const all = state.view === "layouts";
  const sums = { memory: () => memorySum(figures, opening.terms), schedules: () => scheduleSum(lanes, opening.terms),
    layouts: () => searchSum(search.answer, opening.terms), ranks: () => ranksSum(ranks, opening.terms), runs: () => runsSum(runs, opening.terms),
    bench: () => benchSum(bench, opening.terms), profile: () => profileSum(profile, opening.terms) };
  const sum = sums[state.view]();
  const lateOf = (answer) => stale || (answer && JSON.stringify(answer.question) !== JSON.stringify(state.question) ? "stale" : "");
  const curve = html`<${Step} moment=${steps ? moment : null} answer=${slow.step} terms=${opening.terms} waiting=${slow.waiting} copies=${copies} stale=${stale} />`;
  return html`<a class="skip" href="#results" onClick=${(event) => {
      event.preventDefault();
      document.getElementById("results").focus();
    }}>To the results</a>
    <header class="bar">
      <h1><img src="./assets/icon.svg" alt="" width="26" height="26" /> <span class="name">penteract <span>explore</span></span></h1>
      <nav class="views" aria-label="Views">${VIEWS.map((view) => html`<button type="button" key=${view} aria-current=${state.view === view ? "page" : "false"}
        onClick=${() => setState({ ...state, view })}>${TITLES[view]}</button>`)}</nav>
      <${Made} made=${made} />
      <${Theme} />
    </header>
    <div class="columns">
      <aside aria-label="Controls">
        <${Controls} opening=${opening} question=${state.question} settings=${latest?.settings} broken=${latest?.broken ?? []} change=${change} />
        <p class="reset"><button type="button" onClick=${() => change(opening.question)}>Back to the opening layout</button></p>
      </aside>
      <main id="results" tabindex="-1" aria-busy=${busy} data-answers=${answers}>
        ${unread && html`<p class="noted" role="status">The address is no link of this page, or only a part of one: what is shown does not come from it.</p>`}
        <${Verdict} latest=${latest} sum=${sum} error=${error} take=${change} terms=${opening.terms} busy=${busy} copies=${copies} />
        ${steps && html`
          <${Lanes} answer=${lanes} terms=${opening.terms} copies=${copies} stale=${lateOf(lanes)} look=${look} stood=${setMoment}
            linked=${state.zoom} keep=${(zoom) => setState((old) => ({ ...old, zoom }))} />
          ${curve}
          <${Schedules} choices=${slow.choices} done=${!slow.waiting} missing=${lanes?.missing} more=${lanes?.more} take=${change} copies=${copies} stale=${stale} />`}
        ${all && html`<${Layouts} state=${state} setState=${setState} search=${search} stop=${stopSearch} compared=${compared} terms=${opening.terms} copies=${copies} stale=${stale} change=${change} />`}
        ${state.view === "ranks" && html`<${RanksView} answer=${ranks} state=${state} setState=${setState} terms=${opening.terms} copies=${copies} stale=${lateOf(ranks)} take=${change} />`}
        ${state.view === "runs" && html`<${RunsView} answer=${runs} state=${state} setState=${setState} terms=${opening.terms} copies=${copies} />`}
        ${state.view === "profile" && html`<${ProfileView} answer=${profile} busy=${reading} state=${state} setState=${setState} open=${open} terms=${opening.terms} copies=${copies} />`}
        ${state.view === "bench" && html`<${BenchView} bench=${bench} state=${state} setState=${setState} terms=${opening.terms} copies=${copies} />`}
        ${state.view === "memory" && figures && html`
          <${Memory} figures=${figures} terms=${opening.terms} copies=${copies} stale=${stale} />
          ${curve}
          <${Ranks} figures=${figures} copies=${copies} stale=${stale} look=${look} />
          <${Chips} fits=${slow.fits} end=${slow.end} waiting=${slow.waiting} fitsNow=${figures.fits} take=${change} copies=${copies} stale=${stale} />`}
        <footer class="foot">
          <p>${opening.program} · everything on this page is computed on this machine</p>
          ${latest && html`<p><code class="command">${latest.command}</code></p>`}
        </footer>
      </main>
    </div>
    <${Tip} />`;
}

/** The view of all layouts of a question: the chosen one is the question's. */
function Layouts({ state, setState, search, stop, compared, terms, copies, stale, change }) {
  const take = (point) => setState({ ...state, pp_rank: null, question: { ...state.question, layout: { dp: 1, tp: 1, pp: 1, cp: 1, ...point.layout } } });
  const put = (options, only = state.only) => setState({ ...state, only, search: Object.keys(options).length ? { ...SEARCH, ...state.search, ...options } : state.search });
  const against = (layout) => put({ against: layout });
  const late = stale || (search.busy ? "stale" : "");
  return html`
    <${Points} search=${search} state=${state} terms=${terms} copies=${copies} stale="" take=${take} against=${against} put=${put} stop=${stop} />
    ${search.answer && html`<${Best} answer=${search.answer} state=${state} copies=${copies} stale=${late} take=${take} against=${against} />`}
    ${compared && html`<${Waterfall} answer=${compared} copies=${copies} stale=${stale} />
      <${Compare} answer=${compared} state=${state} copies=${copies} stale=${stale} against=${against} />`}
    <${WhatIf} others=${search.others} done=${search.done} state=${state} copies=${copies} stale=${late} take=${change} put=${put} />`;
}

/** The lanes of the newest layout, followed while a slider moves, where they are looked at. */
function useLanes({ question, pp_rank, view }) {
  const [lanes, set] = useState(null);
  const newest = useRef(null);
  // what is wrong with a layout, and a server that has gone, are told with the price
  newest.current ??= new Newest((answer) => answer.kind === "schedule" && set(answer), () => {});
  useEffect(() => {
    if (view === "schedules") newest.current.ask({ kind: "schedule", question, pp_rank });
  }, [question, pp_rank, view]);
  return lanes;
}

/** The curve, and the changes or the schedules: asked for when the controls rest, dropped as soon as they move. */
function useSlow(state, again) {
  const [slow, set] = useState({ step: null, fits: [], end: null, choices: [], waiting: true });
  useEffect(() => {
    if (!["memory", "schedules"].includes(state.view)) return undefined;
    const stop = new AbortController();
    set((old) => ({ ...old, waiting: true }));
    const timer = setTimeout(async () => {
      const { question, pp_rank, view } = state;
      try {
        const step = await askOne({ kind: "step", question, pp_rank }, stop.signal);
        set((old) => ({ step: step?.kind === "step" ? step : old.step, fits: [], end: null, choices: [], waiting: true }));
        await ask({ kind: view === "schedules" ? "schedules" : "fits", question }, (row) => {
          if (stop.signal.aborted) return;
          if (row.kind === "schedule_choice") set((old) => ({ ...old, choices: [...old.choices, row] }));
          if (row.kind === "fit") set((old) => ({ ...old, fits: [...old.fits, row] }));
          if (row.kind === "fits_end") set((old) => ({ ...old, end: row, waiting: false }));
        }, stop.signal);
      } catch {
        // stopped by a newer state, or the server has gone: the price says so
      }
      if (!stop.signal.aborted) set((old) => ({ ...old, waiting: false }));
    }, PAUSE);
    return () => {
      clearTimeout(timer);
      stop.abort();
    };
  }, [state.question, state.pp_rank, state.view, again]);
  return slow;
}

/** The address follows the state, and the state an address that is opened. */
function useLink(state, setState, setUnread) {
  const own = useRef("");
  useEffect(() => {
    let current = true;
    toFragment(state).then((fragment) => {
      if (!current) return;
      own.current = fragment;
      history.replaceState(null, "", location.pathname + fragment);
    });
    return () => (current = false);
  }, [state]);
  useEffect(() => {
    const opened = async () => {
      if (location.hash === own.current) return;
      const found = await fromFragment(location.hash);
      setUnread(!found && location.hash !== "");
      if (found) setState(found);
    };
    addEventListener("hashchange", opened);
    return () => removeEventListener("hashchange", opened);
  }, []);
}

/** A config.json, profiles, or a table of cases may be dropped anywhere. */
function useDrop(drop) {
  const now = useRef(drop);
  now.current = drop;
  useEffect(() => {
    const over = (event) => {
      event.preventDefault();
      document.body.classList.add("dropping");
    };
    const leave = () => document.body.classList.remove("dropping");
    const dropped = (event) => {
      event.preventDefault();
      leave();
      if (event.dataTransfer.files.length) now.current([...event.dataTransfer.files]);
    };
    addEventListener("dragover", over);
    addEventListener("dragleave", leave);
    addEventListener("drop", dropped);
    return () => {
      removeEventListener("dragover", over);
      removeEventListener("dragleave", leave);
      removeEventListener("drop", dropped);
    };
  }, []);
}

/** How answers are made, on an exported page. */
function Made({ made }) {
  if (made === "served") return null;
  const texts = { export: "made at export · the planner starts …", live: "live · computed in this browser" };
  return html`<p class=${made === "live" ? "made live" : "made"} role="status">${texts[made] ?? made}</p>`;
}

function Theme() {
  const [theme, set] = useState(kept);
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("penteract-theme", theme);
    } catch {
      // a browser that keeps nothing
    }
  }, [theme]);
  return html`<div class="theme" role="group" aria-label="Theme">${THEMES.map((name) => html`<button type="button" key=${name}
    aria-pressed=${theme === name} onClick=${() => set(name)}>${name}</button>`)}</div>`;
}

function kept() {
  try {
    const found = localStorage.getItem("penteract-theme");
    return THEMES.includes(found) ? found : "auto";
  } catch {
    return "auto";
  }
}

async function begin() {
  const page = document.getElementById("page");
  document.documentElement.dataset.theme = kept();
  const { hash } = location;
  try {
    const [opening, linked] = await Promise.all([askOne({ kind: "opening" }), fromFragment(hash)]);
    if (opening.kind !== "opening") throw new Error(opening.text);
    page.replaceChildren();
    const first = linked ?? { question: opening.question, pp_rank: null, view: VIEWS[0] };
    render(html`<${App} opening=${opening} first=${first} strange=${!linked && hash !== ""} />`, page);
  } catch (error) {
    const told = document.createElement("p");
    told.className = "waiting";
    told.textContent = `The explorer does not answer: ${error.message}`;
    page.replaceChildren(told);
  }
}

begin();
