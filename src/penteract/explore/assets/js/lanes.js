// Every pipeline rank of a step as a lane: to look at, to zoom into, to play and to scrub.
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { Figure, useWidth } from "./figure.js";
import { CanvasPen, SvgPen, colours, draw, flightAt, geometry, indexAt, laneAt } from "./lanes_drawing.js";
import { Player } from "./player.js";
import { useTheme } from "./theme.js";
import { Term, tipAt } from "./tip.js";

const CLOSEST = 64; // the deepest zoom that has marks of its own

/** The lanes of an answer. `look`: choose the rank that the other figures are about; `stood`: told where the step stands. */
export function Lanes({ answer, terms, copies, stale, look, stood }) {
  const [view, setView] = useState(null); // the moments between which lanes are drawn; null: all
  const [place, setPlace] = useState(null); // the mark at which the step stands; null: at none
  const frame = useRef(null);
  const marks = answer?.marks.at(-1) ?? [];
  const shown = answer && (view && view.to <= answer.end ? view : { from: 0, to: answer.end });
  const mark = place === null ? null : marks[Math.min(place, marks.length - 1)];
  const at = mark ? mark.at * answer.end : null;
  const columns = answer ? ["Rank", "GPUs", ...answer.kinds.map((kind) => kind.label), "Bubble of this lane", "Most in flight", "Activations"] : [];
  const idle = answer?.kinds.findIndex((kind) => kind.name === "idle");
  const rows = answer?.lanes.map((lane) => [lane.label, lane.gpus, ...lane.times.map((time) => time.text), lane.times[idle].share, lane.most,
    lane.activations.text]) ?? [];
  const move = (from, long) => {
    const start = Math.max(0, Math.min(from, answer.end - long));
    setView(long >= answer.end ? null : { from: start, to: start + long });
  };
  const zoom = (by, around = at !== null && at >= shown.from && at <= shown.to ? at : (shown.from + shown.to) / 2) => {
    const long = Math.max(answer.end / CLOSEST, Math.min(answer.end, (shown.to - shown.from) / by));
    move(around - ((around - shown.from) / (shown.to - shown.from)) * long, long);
  };
  const stand = (number) => {
    setPlace(number);
    const moment = marks[number].at * answer.end;
    stood({ share: moment / (answer.lanes[0].end - answer.lanes[0].begin), seconds: answer.seconds });
    if (moment < shown.from || moment > shown.to) move(moment, shown.to - shown.from);
  };
  const file = () => ({
    columns: ["Rank", "Pass", "Kind", "Start, ps", "End, ps", "What"],
    rows: answer.lanes.flatMap((lane) => [
      ...lane.blocks.map((block) => [lane.stage, block.name, answer.kinds[block.kind].label, block.start, block.end, block.text]),
      ...lane.other_streams.map((span) => [lane.stage, "", answer.kinds[span.kind].label, span.start, span.end, span.text]),
    ]),
  });
  const drawing = () => {
    const geo = geometry(answer, frame.current.clientWidth);
    const pen = new SvgPen(geo.width, geo.height, colours(frame.current, answer));
    draw(pen, answer, geo, shown, null, at);
    return pen.written();
  };
  return html`<${Figure} id="lanes" title="Each pipeline rank over the step" source="predicted · simulated with measured rates" stale=${stale} copies=${copies}
    about=${terms.lanes} columns=${columns} rows=${rows} file=${answer && file} drawing=${answer && drawing}>
    ${answer ? html`
      <div class="lane-tools">
        <${Player} marks=${marks} place=${place} stand=${stand} />
        <span class="zooms" role="group" aria-label="Zoom">
          <button type="button" aria-label="Zoom out" disabled=${shown.to - shown.from >= answer.end} onClick=${() => zoom(0.5)}>−</button>
          <button type="button" aria-label="Zoom in" disabled=${shown.to - shown.from <= answer.end / CLOSEST} onClick=${() => zoom(2)}>+</button>
          <button type="button" disabled=${shown.to - shown.from >= answer.end} onClick=${() => setView(null)}>Whole step</button>
        </span>
      </div>
      <div ref=${frame}><${Canvas} answer=${answer} shown=${shown} at=${at} zoom=${zoom} move=${move} look=${look} /></div>
      ${at !== null && html`<${Now} answer=${answer} at=${at} text=${mark.text} />`}
      <${Kinds} answer=${answer} terms=${terms} />
      ${answer.note && html`<p class="quiet">${answer.note}</p>`}` : html`<p class="waiting" role="status">The step is simulated …</p>`}
  <//>`;
}

function Canvas({ answer, shown, at, zoom, move, look }) {
  const [ref, width] = useWidth();
  const canvas = useRef(null);
  const drag = useRef(null);
  const [hot, setHot] = useState(null); // { lane, block }
  const theme = useTheme();
  const geo = useMemo(() => geometry(answer, width), [answer, width]);
  const moment = (x) => shown.from + ((x - geo.side) / geo.inner) * (shown.to - shown.from);
  const there = hot && answer.lanes[hot.lane]?.blocks[hot.block] ? hot : null;
  useEffect(() => {
    if (!width) return;
    performance.clearMeasures("lanes");
    const begun = performance.now();
    draw(new CanvasPen(canvas.current, width, geo.height, colours(canvas.current, answer)), answer, geo, shown, there, at);
    performance.measure("lanes", { start: begun, end: performance.now() });
  }, [answer, geo, shown.from, shown.to, hot, at, theme]);
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
    tipAt(one.label ? `${lane.label}, ${lane.gpus}: at most ${lane.most} in flight, activations ${lane.activations.text}` : one.span ? one.span.text : lane.blocks[one.block].text,
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
    if (one) look(answer.lanes[one.lane].stage);
  };
  const key = (event) => {
    const now = there ?? { lane: 0, block: indexAt(answer.lanes[0].blocks, shown.from) };
    const next = stepped(answer, now, event.key, there !== null);
    if (event.key === "+" || event.key === "-") zoom(event.key === "+" ? 2 : 0.5, answer.lanes[now.lane].blocks[now.block].start);
    else if (event.key === "Enter") look(answer.lanes[now.lane].stage);
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
      role="slider" aria-label="A pass of a pipeline rank" aria-valuemin="0" aria-valuemax=${lane.blocks.length - 1} aria-valuenow=${there?.block ?? 0}
      aria-valuetext=${text} onPointerMove=${over} onPointerLeave=${leave} onPointerDown=${down} onPointerUp=${up}
      onPointerCancel=${() => (drag.current = null)} onKeyDown=${key} onBlur=${leave}></canvas>
    <p class="reading">${there ? html`<b>${lane.label}</b> · <span>${lane.blocks[there.block].text}</span>` : html`<span>${answer.missing ||
      "Point at a lane, or move through it by arrow keys; + and − zoom, Enter looks into a rank."}</span>`}</p>
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

/** What every rank does at a moment. */
function Now({ answer, at, text }) {
  return html`<div class="standing" role="region" tabindex="0" aria-label=${`Every rank at ${text}`}><h3>${`At ${text}`}</h3><ul>${answer.lanes.map((lane) => {
    const running = at >= lane.begin && at < lane.end;
    const block = lane.blocks[indexAt(lane.blocks, at)];
    return html`<li key=${lane.stage}><b>${lane.label.split(" (")[0]}</b> <i class="swatch" style=${{ background: `var(--lane-${running ? answer.kinds[block.kind].name : "idle"})` }}></i>
      ${running ? block.text : "another step"} <small>${flightAt(lane.flight, at)} in flight</small></li>`;
  })}</ul></div>`;
}

/** What the colours mean, with the time of all lanes. */
function Kinds({ answer, terms }) {
  const some = answer.kinds.filter((_, i) => answer.lanes.some((lane) => lane.times[i].picoseconds > 0));
  return html`<ul class="legend kinds" aria-label="Kinds of time, of all lanes shown">${some.map((kind) => html`<li key=${kind.name}>
    <i class="swatch" aria-hidden="true" style=${{ background: `var(--lane-${kind.name})` }}></i>
    <${Term} text=${kind.about}>${kind.label}<//> <b>${kind.seconds}</b> <small>${kind.share}</small></li>`)}
    <li><i class="swatch" aria-hidden="true" style=${{ background: "var(--lane-flight)" }}></i>
      <${Term} text=${terms["in flight"]}>In flight<//> <b>${`at most ${answer.most}`}</b> <small></small></li></ul>`;
}
