// The mark of lanes: a canvas of bars over time, and the part of it that is looked at.
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { useWidth } from "./figure.js";
import { colours, draw, geometry, indexAt, laneAt } from "./lanes_drawing.js";
import { CanvasPen } from "./pens.js";
import { useTheme } from "./theme.js";
import { tipAt } from "./tip.js";

const CLOSEST = 64; // the deepest zoom that has marks of its own
const RESTS = 400; // ms without a change before the zoom is part of the link
const NEAR = 1e-9; // shares of the axis that are equal

/**
 * The moments between which lanes are drawn. `end`: of the axis; `linked`: shares of it from the link, or undefined: all;
 * `keep`: told the shares once they rest; `of`: what is looked at: another one is drawn whole.
 */
export function useZoom(end, linked, keep, of) {
  const [view, setView] = useState(linked ?? null);
  const known = useRef(JSON.stringify(linked ?? null)); // what the link has
  useEffect(() => {
    const other = JSON.stringify(linked ?? null);
    if (other === known.current) return;
    known.current = other;
    setView(linked ?? null);
  }, [linked]);
  const looked = useRef(of);
  useEffect(() => {
    if (looked.current === of) return;
    looked.current = of;
    setView(linked ?? null);
  }, [of]);
  useEffect(() => {
    const rested = view && view.map((share) => Number(share.toFixed(6)));
    if (JSON.stringify(rested) === known.current) return undefined;
    const timer = setTimeout(() => {
      known.current = JSON.stringify(rested);
      keep(rested ?? undefined);
    }, RESTS);
    return () => clearTimeout(timer);
  }, [view]);
  const shown = { from: view ? view[0] * end : 0, to: view ? view[1] * end : end };
  const long = shown.to - shown.from;
  const move = (from, wide) => {
    const start = Math.max(0, Math.min(from, end - wide));
    setView(wide >= end * (1 - NEAR) ? null : [start / end, (start + wide) / end]);
  };
  const zoom = (by, around = (shown.from + shown.to) / 2) => {
    const wide = Math.max(end / CLOSEST, Math.min(end, long / by));
    move(around - ((around - shown.from) / long) * wide, wide);
  };
  return { shown, move, zoom, whole: long >= end * (1 - NEAR), closest: long <= (end / CLOSEST) * (1 + NEAR), out: () => setView(null) };
}

/** Buttons for what keys and the wheel do too. `zoom`: by a factor, around what is looked at. */
export function Zooms({ view, zoom }) {
  return html`<span class="zooms" role="group" aria-label="Zoom">
    <button type="button" aria-label="Zoom out" disabled=${view.whole} onClick=${() => zoom(0.5)}>−</button>
    <button type="button" aria-label="Zoom in" disabled=${view.closest} onClick=${() => zoom(2)}>+</button>
    <button type="button" disabled=${view.whole} onClick=${view.out}>Whole step</button>
  </span>`;
}

/**
 * Lanes on a canvas, to point at, drag, zoom and walk through by keys. `shown`: between which moments; `at`: where the step stands,
 * or null; `look`: told which lane and which block were chosen; `label`: what a block is; `about`: a lane in a sentence; `hint`: shown until something is looked at;
 * `op`: the number of the op whose blocks are marked, while no other one is looked at.
 */
export function LanesCanvas({ answer, shown, at = null, zoom, move, look, label, about, hint, op = -1 }) {
  const [ref, width] = useWidth();
  const canvas = useRef(null);
  const drag = useRef(null);
  const [hot, setHot] = useState(null); // { lane, block }
  const theme = useTheme();
  const geo = useMemo(() => geometry(answer, width), [answer, width]);
  const moment = (x) => shown.from + ((x - geo.side) / geo.inner) * (shown.to - shown.from);
  const there = hot && answer.lanes[hot.lane]?.blocks[hot.block] ? hot : null;
  const marked = (there && answer.lanes[there.lane].blocks[there.block].op) ?? op;
  useEffect(() => {
    if (!width) return;
    performance.clearMeasures("lanes");
    const begun = performance.now();
    draw(new CanvasPen(canvas.current, width, geo.height, colours(canvas.current, answer)), answer, geo, shown, there, at, marked);
    performance.measure("lanes", { start: begun, end: performance.now() });
  }, [answer, geo, shown.from, shown.to, hot, at, theme, marked]);
  useWheel(canvas, (by, x) => zoom(by, moment(x)), [answer, shown.from, shown.to, geo]);
  const found = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const where = laneAt(geo, answer.lanes.length, y);
    if (!where) return null;
    const lane = answer.lanes[where.lane];
    const when = moment(x);
    const near = (2 * (shown.to - shown.from)) / geo.inner;
    const span = where.others && lane.other_streams.find((one) => one.start - near <= when && when <= one.end + near);
    return { x, lane: where.lane, label: x < geo.side, block: indexAt(lane.blocks, when), span };
  };
  const over = (event) => {
    if (drag.current) {
      const by = ((drag.current.x - event.clientX) / geo.inner) * (drag.current.to - drag.current.from);
      if (Math.abs(drag.current.x - event.clientX) > 3) drag.current.moved = true;
      move(drag.current.from + by, drag.current.to - drag.current.from);
      return;
    }
    const one = found(event);
    if (!one) return leave();
    const lane = answer.lanes[one.lane];
    setHot((old) => (one.label ? null : old && old.lane === one.lane && old.block === one.block ? old : { lane: one.lane, block: one.block }));
    tipAt(one.label ? about(lane) : one.span ? one.span.text : lane.blocks[one.block].text,
      event.clientX + 12, event.clientY + 16);
  };
  const leave = () => {
    tipAt(null);
    setHot(null);
  };
  const down = (event) => {
    if (event.button) return;
    drag.current = { x: event.clientX, from: shown.from, to: shown.to, moved: false };
    canvas.current.setPointerCapture(event.pointerId);
  };
  const up = (event) => {
    const moved = drag.current?.moved;
    drag.current = null;
    const one = moved ? null : found(event);
    if (one) look(answer.lanes[one.lane], one.label ? null : answer.lanes[one.lane].blocks[one.block]);
  };
  const key = (event) => {
    const now = there ?? { lane: 0, block: indexAt(answer.lanes[0].blocks, shown.from) };
    const next = stepped(answer, now, event.key, there !== null);
    if (event.key === "+" || event.key === "-") zoom(event.key === "+" ? 2 : 0.5, answer.lanes[now.lane].blocks[now.block].start);
    else if (event.key === "Enter") look(answer.lanes[now.lane], there && answer.lanes[now.lane].blocks[now.block]);
    else if (!next) return;
    event.preventDefault();
    if (!next) return;
    setHot(next);
    const block = answer.lanes[next.lane].blocks[next.block];
    if (block.end < shown.from || block.start > shown.to) move(block.start - (shown.to - shown.from) / 4, shown.to - shown.from);
  };
  const lane = answer.lanes[there?.lane ?? 0];
  const text = there ? `${lane.label}: ${lane.blocks[there.block].text}` : `${answer.lanes.length} ${answer.lanes.length > 1 ? "lanes" : "lane"} of ${answer.seconds}`;
  return html`<div class="plot" ref=${ref}>
    <canvas ref=${canvas} class="lanes" width=${width} height=${geo.height} style=${{ width: `${width}px`, height: `${geo.height}px` }} tabindex="0"
      role="slider" aria-label=${label} aria-valuemin="0" aria-valuemax=${lane.blocks.length - 1} aria-valuenow=${there?.block ?? 0}
      aria-valuetext=${text} onPointerMove=${over} onPointerLeave=${leave} onPointerDown=${down} onPointerUp=${up}
      onPointerCancel=${() => (drag.current = null)} onKeyDown=${key} onBlur=${leave}></canvas>
    <p class="reading">${there ? html`<b>${lane.label}</b> · <span>${lane.blocks[there.block].text}</span>` : html`<span>${hint}</span>`}</p>
  </div>`;
}

/** The block that a key leads to; null for another key. */
function stepped(answer, { lane, block }, key, begun) {
  const { blocks } = answer.lanes[lane];
  const along = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -blocks.length, End: blocks.length }[key];
  if (along !== undefined) return { lane, block: Math.max(0, Math.min(blocks.length - 1, block + (begun ? along : 0))) };
  const across = { ArrowDown: 1, ArrowUp: -1 }[key];
  if (across === undefined) return null;
  const other = Math.max(0, Math.min(answer.lanes.length - 1, lane + (begun ? across : 0)));
  return { lane: other, block: indexAt(answer.lanes[other].blocks, blocks[block].start) };
}

/** Zoom by the wheel with Ctrl, or by two fingers: without, the wheel scrolls the page. */
function useWheel(canvas, zoom, changes) {
  useEffect(() => {
    const turned = (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoom(2 ** (-event.deltaY / 200), event.clientX - canvas.current.getBoundingClientRect().left);
    };
    const element = canvas.current;
    element.addEventListener("wheel", turned, { passive: false });
    return () => element.removeEventListener("wheel", turned);
  }, changes);
}
