// The Ranks view: the mesh on nodes and links, the traffic of one rank, and who holds a parameter.
import { Newest } from "./ask.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { Holders } from "./holders.js";
import { Mesh } from "./mesh.js";
import { Traffic } from "./traffic.js";

/** The newest answer about ranks, followed while a slider moves, where it is looked at. */
export function useRanks({ question, rank, parameter, view }) {
  const [answer, set] = useState(null);
  const newest = useRef(null);
  newest.current ??= new Newest((found) => found.kind === "ranks" && set(found), () => {});
  useEffect(() => {
    if (view === "ranks") newest.current.ask({ kind: "ranks", question, ...(rank != null && { rank }), ...(parameter && { parameter }) });
  }, [question, rank, parameter, view]);
  return answer;
}

/** The headline of the view. */
export function ranksSum(answer, terms) {
  return answer && {
    what: `Traffic of rank ${answer.rank} in a step`, term: terms.traffic, number: answer.number, verdict: answer.verdict, good: true,
    facts: answer.facts, headline: `${answer.headline} · ${answer.place}`, notes: [],
  };
}

/** The view. */
export function RanksView({ answer, state, setState, terms, copies, stale, take }) {
  const [picked, pick] = useState(null); // a row of the traffic
  useEffect(() => pick(null), [answer?.rank, answer?.question]);
  if (!answer) return html`<section class="figure"><p class="waiting" role="status">The traffic is counted …</p></section>`;
  const look = (rank) => setState({ ...state, rank });
  const choose = (parameter) => setState({ ...state, parameter });
  return html`
    <${Mesh} answer=${answer} set=${answer.traffic[picked] ?? null} look=${look} copies=${copies} stale=${stale} terms=${terms} />
    <${Traffic} answer=${answer} pick=${pick} picked=${picked} copies=${copies} stale=${stale} terms=${terms} take=${take} />
    <${Holders} answer=${answer} choose=${choose} look=${look} copies=${copies} stale=${stale} terms=${terms} />`;
}
