// Every pipeline rank of a step as a lane: to look at, to zoom into, to play and to scrub.
import { html, useRef, useState } from "./html.js";
import { Figure } from "./figure.js";
import { LanesCanvas, Zooms, useZoom } from "./lanes_canvas.js";
import { colours, draw, flightAt, geometry, indexAt } from "./lanes_drawing.js";
import { SvgPen } from "./pens.js";
import { Player } from "./player.js";
import { Term } from "./tip.js";

/**
 * The lanes of an answer. `look`: choose the rank that the other figures are about; `stood`: told where the step stands;
 * `linked`: the zoom of the link, and `keep` puts it there.
 */
export function Lanes({ answer, terms, copies, stale, look, stood, linked, keep }) {
  const [place, setPlace] = useState(null); // the mark at which the step stands; null: at none
  const frame = useRef(null);
  const marks = answer?.marks.at(-1) ?? [];
  const view = useZoom(answer?.end ?? 1, linked, keep);
  const { shown, move } = view;
  const mark = place === null ? null : marks[Math.min(place, marks.length - 1)];
  const at = mark ? mark.at * answer.end : null;
  const columns = answer ? ["Rank", "GPUs", ...answer.kinds.map((kind) => kind.label), "Bubble of this lane", "Most in flight", "Activations"] : [];
  const idle = answer?.kinds.findIndex((kind) => kind.name === "idle");
  const rows = answer?.lanes.map((lane) => [lane.label, lane.gpus, ...lane.times.map((time) => time.text), lane.times[idle].share, lane.most,
    lane.activations.text]) ?? [];
  const zoom = (by, around = at !== null && at >= shown.from && at <= shown.to ? at : undefined) => view.zoom(by, around);
  const stand = (number) => {
    setPlace(number);
    const moment = marks[number].at * answer.end;
    stood({ share: moment / (answer.lanes[0].end - answer.lanes[0].begin), seconds: answer.seconds });
    if (moment < shown.from || moment > shown.to) move(moment, shown.to - shown.from);
  };
  const file = () => ({
    columns: ["Rank", "Pass", "Kind", "Start, ps", "End, ps", "What"],
    rows: answer.lanes.flatMap((lane) => [
      ...lane.blocks.map((block) => [lane.pp_rank, block.name, answer.kinds[block.kind].label, block.start, block.end, block.text]),
      ...lane.other_streams.map((span) => [lane.pp_rank, "", answer.kinds[span.kind].label, span.start, span.end, span.text]),
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
        <${Zooms} view=${view} zoom=${zoom} />
      </div>
      <div ref=${frame}><${LanesCanvas} answer=${answer} shown=${shown} at=${at} zoom=${zoom} move=${move} look=${(lane) => look(lane.pp_rank)} label="A pass of a pipeline rank"
        about=${(lane) => `${lane.label}, ${lane.gpus}: at most ${lane.most} in flight, activations ${lane.activations.text}`}
        hint=${answer.missing || "Point at a lane, or move through it by arrow keys; + and − zoom, Enter looks into a rank."} /></div>
      ${at !== null && html`<${Now} answer=${answer} at=${at} text=${mark.text} />`}
      <${Kinds} answer=${answer}>
        <li><i class="swatch" aria-hidden="true" style=${{ background: "var(--lane-flight)" }}></i>
          <${Term} text=${terms["in flight"]}>In flight<//> <b>${`at most ${answer.most}`}</b> <small></small></li><//>
      ${answer.note && html`<p class="quiet">${answer.note}</p>`}` : html`<p class="waiting" role="status">The step is simulated …</p>`}
  <//>`;
}

/** What every rank does at a moment. */
function Now({ answer, at, text }) {
  return html`<div class="standing" role="region" tabindex="0" aria-label=${`Every rank at ${text}`}><h3>${`At ${text}`}</h3><ul>${answer.lanes.map((lane) => {
    const running = at >= lane.begin && at < lane.end;
    const block = lane.blocks[indexAt(lane.blocks, at)];
    return html`<li key=${lane.pp_rank}><b>${lane.label.split(" (")[0]}</b> <i class="swatch" style=${{ background: `var(--lane-${running ? answer.kinds[block.kind].name : "idle"})` }}></i>
      ${running ? block.text : "another step"} <small>${flightAt(lane.flight, at)} in flight</small></li>`;
  })}</ul></div>`;
}

/** What the colours mean, with the time of each kind. */
export function Kinds({ answer, label = "Kinds of time, of all lanes shown", children }) {
  const some = answer.kinds.filter((_, i) => answer.lanes.some((lane) => lane.times[i].picoseconds > 0));
  return html`<ul class="legend kinds" aria-label=${label}>${some.map((kind) => html`<li key=${kind.name}>
    <i class="swatch" aria-hidden="true" style=${{ background: `var(--lane-${kind.name})` }}></i>
    <${Term} text=${kind.about}>${kind.label}<//> <b>${kind.seconds}</b> <small>${kind.share}</small></li>`)}${children}</ul>`;
}
