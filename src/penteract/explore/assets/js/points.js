// Priced layouts as points of memory and speed, with the front; and which layouts are searched.
import { html, useMemo, useRef } from "./html.js";
import { Figure } from "./figure.js";
import { PointsCanvas, pointsSvg } from "./points_canvas.js";
import { Term } from "./tip.js";

const told = (point) => `${point.name}: ${point.amount.text}, ${point.speed}, ${point.step}${point.fits ? "" : ", does not fit"}`;
const TABLE = 200; // rows of the table; the file has all

/** The points of a search. `take`: choose a layout; `put`: other options of the search; `stop`: stop searching. */
export function Points({ search, state, terms, copies, stale, take, against, put, stop }) {
  const { answer, points, axes, done, text, error } = search;
  const frame = useRef(null);
  const shown = useMemo(() => (state.only === "fits" ? points.filter((point) => point.fits) : points), [points, state.only]);
  const marked = useMemo(() => shown.map(asMark), [shown]);
  const scaled = useMemo(() => axes && { across: { ...axes.memory, label: "memory of the fullest rank" }, up: { ...axes.speed, label: "tokens/s/GPU" } }, [axes]);
  const usable = answer?.card.drawn && answer.card.usable.bytes;
  const how = { marks: marksOf(marked, state), limit: usable ? { at: usable, text: `usable ${answer.card.usable.text}` } : null };
  const rows = (some) => some.map((p) => [p.name, p.amount.text, p.amount.bytes, p.speed, p.step, p.seconds, p.simulated ? "simulated" : "bound",
    p.fits ? "fits" : "too large", p.front ? "front" : ""]);
  const columns = ["Layout", "Memory", "Bytes", "Tokens/s/GPU", "Step", "Seconds", "Step is", "Fits", "Front"];
  const drawing = () => pointsSvg(frame.current, marked, scaled, how);
  return html`<${Figure} id="points" title="Priced layouts: memory and speed" source="predicted · memory exact, times simulated" about=${terms.points}
    stale=${stale} copies=${copies} columns=${columns} rows=${rows(shown.slice(0, TABLE))} file=${() => ({ columns, rows: rows(shown) })} drawing=${answer ? drawing : null}>
    <${Filters} answer=${answer} state=${state} put=${put} />
    <div class="search-line" role="status"><span>${text}</span>
      ${!done && html`<button type="button" onClick=${stop}>Stop</button>`}</div>
    ${error && html`<p class="wrong" role="alert">${error}</p>`}
    ${axes ? html`<div ref=${frame}><${PointsCanvas} points=${marked} axes=${scaled} how=${how} about=${(mark) => told(mark.point)} label="A simulated layout, by memory" count=${`${shown.length} layouts`}
      hint="Point at a layout, or move by arrow keys through those that were simulated; a click, or Enter, chooses one (A); with Shift, compares with it (B)."
      choose=${({ point }, other) => (other ? against(point.layout) : take(point))} /></div>
      <ul class="legend" aria-label="Marks">
        ${[["simulated", "simulated", terms.simulated], ["front", "the front", terms.front], ["bound", "priced: at most this fast", terms.bound], ["misses", "does not fit", ""]].map(([kind, label, about]) =>
          html`<li key=${kind}><i class=${`swatch round ${kind}`} aria-hidden="true"></i><${Term} text=${about}>${label}<//></li>`)}
      </ul>` : html`<p class="waiting">${error ? "" : "The planner searches …"}</p>`}
  <//>`;
}

/** A layout as a point of the drawing. */
function asMark(point) {
  return { x: point.amount.bytes, y: point.rate, kind: !point.fits ? "bad" : point.simulated ? "strong" : "faint", front: point.front, name: point.name, point };
}

/** The chosen layout and the one that it is compared with, where they are among the points. */
function marksOf(marks, state) {
  const same = (layout) => marks.find((mark) => alike(mark.point.layout, layout));
  const found = [[state.question.layout, "A"], [state.search?.against, "B"]].map(([layout, letter]) => ({ letter, point: layout && same(layout) }));
  return found.filter((one) => one.point);
}

/** Whether two layouts have the same settings; degrees of 1 may be left out. */
export function alike(a, b) {
  const plain = (layout) => JSON.stringify(Object.entries(layout).filter(([, value]) => value !== 1).sort());
  return plain(a) === plain(b);
}

/** What layouts may have, setting by setting: values that are held; none of a setting: any. */
function Filters({ answer, state, put }) {
  const fix = state.search?.fix ?? {};
  const toggle = (setting, value) => {
    const now = fix[setting] ?? [];
    const next = now.includes(value) ? now.filter((one) => one !== value) : [...now, value];
    const rest = Object.fromEntries(Object.entries({ ...fix, [setting]: next }).filter(([, values]) => values.length));
    put({ fix: rest });
  };
  const held = Object.keys(fix).length;
  return html`<div class="filters" role="group" aria-label="Which layouts">
    ${(answer?.filters ?? []).map((one) => html`<fieldset key=${one.setting} class=${one.dimension && `dim-${one.dimension}`}>
      <legend>${one.dimension ? html`<b class="badge">${one.dimension}</b>` : one.label}</legend>
      ${one.values.map(({ value, text }) => html`<button type="button" key=${text} aria-pressed=${(fix[one.setting] ?? []).includes(value)}
        aria-label=${`${one.label} ${text}`} onClick=${() => toggle(one.setting, value)}>${text}</button>`)}
    </fieldset>`)}
    <fieldset><legend>Show</legend>
      <button type="button" aria-pressed=${state.only === "fits"} onClick=${() => put({}, state.only === "fits" ? undefined : "fits")}>only what fits</button>
      ${held > 0 && html`<button type="button" onClick=${() => put({ fix: {} })}>any layout</button>`}</fieldset>
  </div>`;
}
