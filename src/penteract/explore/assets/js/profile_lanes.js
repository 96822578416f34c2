// One step in time: predicted above measured, of a rank that the reader chooses.
import { html, useMemo, useRef } from "./html.js";
import { Figure } from "./figure.js";
import { Kinds } from "./lanes.js";
import { LanesCanvas, Zooms, useZoom } from "./lanes_canvas.js";
import { colours, draw, geometry } from "./lanes_drawing.js";
import { SvgPen } from "./pens.js";

const FAR = 3; // times as long: then each step is drawn over the whole width, until the reader decides

/** The lanes. `chosen`: the op that is marked; `own`: the view's part of the state; `put` changes it. */
export function ProfileLanes({ figures, chosen, own, put, terms, copies, stale }) {
  const given = figures.lanes;
  const frame = useRef(null);
  const wide = own.wide ?? farApart(given);
  const answer = useMemo(() => (wide ? widened(given) : given), [given, wide]);
  const view = useZoom(answer.end || 1, own.zoom, (zoom) => put({ zoom }), own.name);
  const columns = ["Lane", "Whose", "Step", ...given.kinds.map((kind) => kind.label)];
  const rows = given.lanes.map((lane) => [lane.label, lane.gpus, lane.end, ...lane.times.map((time) => time.text)]);
  const file = () => ({
    columns: ["Lane", "Whose", "Kind", "Start, ps", "End, ps", "What"],
    rows: given.lanes.flatMap((lane) => [...lane.blocks, ...lane.other_streams].map((one) => [lane.label, lane.gpus, given.kinds[one.kind].label, one.start, one.end, one.text])),
  });
  const drawing = () => {
    const geo = geometry(answer, frame.current.clientWidth);
    const pen = new SvgPen(geo.width, geo.height, colours(frame.current, answer));
    draw(pen, answer, geo, view.shown, null, null, chosen?.number ?? -1);
    return pen.written();
  };
  const look = (lane, block) => block?.op >= 0 && put({ op: block.op });
  return html`<${Figure} id="profile-lanes" title=${`The step of rank ${figures.rank}, predicted above measured`} source="predicted · measured under the profiler" stale=${stale} copies=${copies}
    about=${terms["profile lanes"]} columns=${columns} rows=${rows} file=${file} drawing=${given.missing ? null : drawing}>
    <div class="lane-tools">
      <${RankChoice} figures=${figures} put=${put} />
      ${!given.missing && html`<span class="zooms" role="group" aria-label="Time axis">
        <button type="button" aria-pressed=${!wide} onClick=${() => put({ wide: false })}>One axis</button>
        <button type="button" aria-pressed=${wide} onClick=${() => put({ wide: true })}>Each whole</button></span>
      <${Zooms} view=${view} zoom=${view.zoom} />`}
    </div>
    ${given.missing ? html`<p class="quiet">${given.missing} <code class="command">penteract profile latest</code></p>` : html`
      <div ref=${frame}><${LanesCanvas} answer=${answer} shown=${view.shown} zoom=${view.zoom} move=${view.move} look=${look} op=${chosen?.number ?? -1} label="An op of the step"
        about=${(lane) => `${lane.label}, ${lane.gpus}`} hint="Point at a lane, or move through it by arrow keys; + and − zoom, Enter shows the kernels of an op. A line is under every call of the chosen one." /></div>
      ${wide && html`<p class="quiet">Each step is drawn over the whole width; the axis is that of the longer one. Times in texts are true.</p>`}
      <${Kinds} answer=${given} label="Kinds of time, of the measured step" />`}
  <//>`;
}

/** Which rank the figures are about. */
function RankChoice({ figures, put }) {
  return html`<label class="rank-choice">Rank <select value=${figures.rank} onChange=${(event) => put({ rank: Number(event.currentTarget.value), op: undefined })}>
    ${figures.ranks.map((one) => html`<option key=${one.rank} value=${one.rank}>${`${one.rank} · pipeline rank ${one.pp_rank} · works ${one.work.text}`}</option>`)}</select></label>`;
}

function farApart({ lanes }) {
  const [one, other] = lanes.map((lane) => lane.end);
  return other !== undefined && Math.max(one, other) > FAR * Math.min(one, other);
}

/** The same lanes, each over the whole axis. */
function widened(answer) {
  const lanes = answer.lanes.map((lane) => {
    const by = answer.end / lane.end;
    const moved = (one) => ({ ...one, start: one.start * by, end: one.end * by });
    return { ...lane, end: answer.end, other_streams: lane.other_streams.map(moved),
      blocks: lane.blocks.map((block) => ({ ...moved(block), intervals: block.intervals.map((n, i) => (i % 2 ? n * by : n)) })) };
  });
  return { ...answer, lanes };
}
