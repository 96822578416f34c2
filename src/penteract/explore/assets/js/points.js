// Priced layouts as points of memory and speed, with the front; and which layouts are searched.
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { Figure, useWidth } from "./figure.js";
import { CanvasPen, SvgPen, colours } from "./lanes_drawing.js";
import { draw, geometry, pointAt } from "./points_drawing.js";
import { useTheme } from "./theme.js";
import { Term, tipAt } from "./tip.js";

const told = (point) => `${point.name}: ${point.amount.text}, ${point.speed}, ${point.step}${point.fits ? "" : ", does not fit"}`;
const TABLE = 200; // rows of the table; the file has all

/** The points of a search. `take`: choose a layout; `put`: other options of the search; `stop`: stop searching. */
export function Points({ search, state, terms, copies, stale, take, against, put, stop }) {
  const { answer, points, axes, done, text, error } = search;
  const frame = useRef(null);
  const shown = useMemo(() => (state.only === "fits" ? points.filter((point) => point.fits) : points), [points, state.only]);
  const marks = marksOf(shown, state);
  const rows = (some) => some.map((p) => [p.name, p.amount.text, p.amount.bytes, p.speed, p.step, p.seconds, p.simulated ? "simulated" : "bound",
    p.fits ? "fits" : "too large", p.front ? "front" : ""]);
  const columns = ["Layout", "Memory", "Bytes", "Tokens/s/GPU", "Step", "Seconds", "Step is", "Fits", "Front"];
  const drawing = () => {
    const geo = geometry(frame.current.clientWidth);
    const pen = new SvgPen(geo.width, geo.height, palette(frame.current));
    draw(pen, shown, axes, answer.card, geo, null, marks);
    return pen.written();
  };
  return html`<${Figure} id="points" title="Priced layouts: memory and speed" source="predicted · memory exact, times simulated" about=${terms.points}
    stale=${stale} copies=${copies} columns=${columns} rows=${rows(shown.slice(0, TABLE))} file=${() => ({ columns, rows: rows(shown) })} drawing=${answer ? drawing : null}>
    <${Filters} answer=${answer} state=${state} put=${put} />
    <div class="search-line" role="status"><span>${text}</span>
      ${!done && html`<button type="button" onClick=${stop}>Stop</button>`}</div>
    ${error && html`<p class="wrong" role="alert">${error}</p>`}
    ${axes ? html`<div ref=${frame}><${Canvas} points=${shown} axes=${axes} card=${answer.card} marks=${marks} choose=${(point, other) => (other ? against(point.layout) : take(point))} /></div>
      <ul class="legend" aria-label="Marks">
        ${[["simulated", "simulated", terms.simulated], ["front", "the front", terms.front], ["bound", "priced: at most this fast", terms.bound], ["misses", "does not fit", ""]].map(([kind, label, about]) =>
          html`<li key=${kind}><i class=${`swatch round ${kind}`} aria-hidden="true"></i><${Term} text=${about}>${label}<//></li>`)}
      </ul>` : html`<p class="waiting">${error ? "" : "The planner searches …"}</p>`}
  <//>`;
}

/** The chosen layout and the one that it is compared with, where they are among the points. */
function marksOf(points, state) {
  const same = (layout) => points.find((point) => alike(point.layout, layout));
  const found = [[state.question.layout, "A"], [state.search?.against, "B"]].map(([layout, letter]) => ({ letter, point: layout && same(layout) }));
  return found.filter((one) => one.point);
}

/** Whether two layouts have the same settings; degrees of 1 may be left out. */
export function alike(a, b) {
  const plain = (layout) => JSON.stringify(Object.entries(layout).filter(([, value]) => value !== 1).sort());
  return plain(a) === plain(b);
}

function palette(element) {
  const style = getComputedStyle(element);
  const token = (name) => style.getPropertyValue(`--${name}`).trim();
  return { ...colours(element, { kinds: [] }), accent: token("accent"), simulated: token("parameters"), front: token("tp"),
    bound: token("gradients"), misses: token("bad"), beyond: token("beyond") };
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

function Canvas({ points, axes, card, marks, choose }) {
  const [ref, width] = useWidth();
  const canvas = useRef(null);
  const [hot, setHot] = useState(null);
  const theme = useTheme();
  const geo = useMemo(() => geometry(width), [width]);
  const along = useMemo(() => points.filter((point) => point.simulated && point.amount.bytes <= axes.memory.most).sort((a, b) => a.amount.bytes - b.amount.bytes), [points, axes]);
  const there = hot && points.includes(hot) ? hot : null;
  useEffect(() => {
    if (!width) return;
    performance.clearMeasures("points");
    const begun = performance.now();
    draw(new CanvasPen(canvas.current, width, geo.height, palette(canvas.current)), points, axes, card, geo, there, marks);
    performance.measure("points", { start: begun, end: performance.now() });
  }, [points, axes, geo, there, theme, JSON.stringify(marks.map((one) => one.point.name))]);
  const over = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const point = pointAt(points, axes, geo, event.clientX - box.left, event.clientY - box.top);
    setHot(point);
    tipAt(point && told(point), event.clientX + 12, event.clientY + 16);
  };
  const leave = () => {
    setHot(null);
    tipAt(null);
  };
  const key = (event) => {
    if (event.key === "Enter" && there) choose(there, event.shiftKey);
    const place = along.indexOf(there);
    const next = { ArrowRight: place + 1, ArrowLeft: place < 0 ? along.length - 1 : place - 1, Home: 0, End: along.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    setHot(along[Math.max(0, Math.min(along.length - 1, next))] ?? null);
  };
  const place = Math.max(0, along.indexOf(there));
  return html`<div class="plot" ref=${ref}>
    <canvas ref=${canvas} class="lanes" width=${width} height=${geo.height} style=${{ width: `${width}px`, height: `${geo.height}px` }} tabindex="0" role="slider"
      aria-label="A simulated layout, by memory" aria-valuemin="0" aria-valuemax=${Math.max(0, along.length - 1)} aria-valuenow=${place}
      aria-valuetext=${there ? told(there) : `${points.length} layouts`} onPointerMove=${over} onPointerLeave=${leave} onBlur=${leave}
      onClick=${(event) => there && choose(there, event.shiftKey)} onKeyDown=${key}></canvas>
    <p class="reading"><span>${there ? told(there) : "Point at a layout, or move by arrow keys through those that were simulated; a click, or Enter, chooses one (A); with Shift, compares with it (B)."}</span></p>
  </div>`;
}
