// The search of the Layouts view: asked for when the controls rest, followed while it runs, dropped when they move.
import { Newest, ask } from "./ask.js";
import { useEffect, useRef, useState } from "./html.js";

const PAUSE = 250; // ms without a change before a search is asked for
const NOTHING = { answer: null, points: [], axes: null, others: [], busy: false, text: "", error: "", done: false };

/** What a search is about: all of the question but the chosen layout, and the options but the other layout. */
function keyOf({ question, search }) {
  const { layout, ...rest } = question;
  const gpus = ["dp", "tp", "pp", "cp"].reduce((product, axis) => product * (layout[axis] ?? 1), 1);
  return JSON.stringify([rest, gpus, search && { ...search, against: null }]);
}

/** The newest search of a state, while the view shows it. -> what it has found, and how to stop it. */
export function useSearch(state) {
  const [found, set] = useState(NOTHING);
  const stopping = useRef(null);
  const key = state.view === "layouts" ? keyOf(state) : "";
  useEffect(() => {
    if (!key) return undefined;
    const stop = new AbortController();
    stopping.current = () => {
      stop.abort();
      set((old) => ({ ...old, busy: false, done: true, text: `Stopped. ${old.text}` }));
    };
    set((old) => ({ ...old, busy: true, done: false, error: "", text: "The planner searches …" }));
    const { question, search } = state;
    const options = search && { ...search, against: null };
    const take = (row) => {
      if (!stop.signal.aborted) set((old) => taken(old, row));
    };
    const timer = setTimeout(async () => {
      try {
        await ask({ kind: "search", question, search: options }, take, stop.signal);
        if (stop.signal.aborted) return;
        set((old) => ({ ...old, busy: false, others: [] }));
        await ask({ kind: "what_if", question, search: options }, take, stop.signal);
      } catch {
        // stopped by a newer state, or the server has gone: the price says so
      }
      if (!stop.signal.aborted) set((old) => ({ ...old, busy: false, done: true }));
    }, PAUSE);
    return () => {
      clearTimeout(timer);
      stop.abort();
    };
  }, [key]);
  return [found, () => stopping.current?.()];
}

/** What is found, with one more row of the answer. */
function taken(old, row) {
  switch (row.kind) {
    case "search_progress":
      return { ...old, text: row.best ? `${row.text}. So far: ${row.best.name}, ${row.best.speed}` : row.text };
    case "search":
      return { ...old, answer: row, points: row.points, axes: row, text: `${row.found}. The front is drawn …` };
    case "front_step":
      return { ...old, points: [...old.points, { ...row.point, front: true }] };
    case "search_end":
      return { ...old, points: row.points, axes: row, text: `${old.answer.found}. ${row.text}` };
    case "what_if":
      return { ...old, others: [...old.others, row] };
    case "error":
      return { ...old, error: row.text, text: "" };
    default:
      return old;
  }
}

/** The chosen layout's step from ideal to predicted, and the layout that it is compared with: followed as a price. */
export function useCompare({ question, search, view }) {
  const [found, set] = useState(null);
  const newest = useRef(null);
  newest.current ??= new Newest((answer) => answer.kind !== "error" && set(answer), () => {});
  useEffect(() => {
    if (view === "layouts") newest.current.ask({ kind: "compare", question, search });
  }, [question, search, view]);
  return found;
}
