// The mesh on its nodes: one cell for each rank, the groups of one of them in the colours of their dimensions.
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { Figure, useWidth } from "./figure.js";
import { CanvasPen, SvgPen } from "./pens.js";
import { drawMesh, inRuns, meshColours, meshOf, placeOn, rankAt, together } from "./mesh_drawing.js";
import { useTheme } from "./theme.js";
import { Term, tipAt } from "./tip.js";

/** Ranks as cells. `paint`: as of `drawMesh`, with the rank that is pointed at; `about`: what a rank is, in a line; `look`: choose one. */
export function Grid({ answer, paint, about, look, label, changes, hot, point }) {
  const [ref, width] = useWidth();
  const canvas = useRef(null);
  const theme = useTheme();
  const geo = useMemo(() => width && meshOf(answer, width), [answer.world, answer.per_node, width]);
  useEffect(() => {
    if (!geo) return;
    performance.clearMeasures("mesh");
    const begun = performance.now();
    drawMesh(new CanvasPen(canvas.current, width, geo.height, meshColours(canvas.current)), geo, paint);
    performance.measure("mesh", { start: begun, end: performance.now() });
  }, [geo, hot, theme, ...changes]);
  const found = (event) => {
    const box = canvas.current.getBoundingClientRect();
    return rankAt(geo, event.clientX - box.left, event.clientY - box.top);
  };
  const over = (event) => {
    const rank = found(event);
    if (rank === null) return leave();
    if (rank !== hot) point(rank);
    tipAt(about(rank), event.clientX + 12, event.clientY + 16);
  };
  const leave = () => {
    tipAt(null);
    point(null);
  };
  const key = (event) => {
    const now = hot ?? answer.rank;
    const along = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: geo.across < geo.each ? geo.across : geo.columns * geo.each,
      ArrowUp: -(geo.across < geo.each ? geo.across : geo.columns * geo.each), PageDown: geo.each, PageUp: -geo.each, Home: -answer.world, End: answer.world }[event.key];
    if (event.key === "Enter" || event.key === " ") look(now);
    else if (along === undefined) return;
    else point(Math.max(0, Math.min(answer.world - 1, now + along)));
    event.preventDefault();
  };
  const shown = hot ?? answer.rank;
  return html`<div class="plot" ref=${ref}>
    ${geo && html`<canvas ref=${canvas} class="mesh" width=${width} height=${geo.height} style=${{ width: `${width}px`, height: `${geo.height}px` }} tabindex="0"
      role="slider" aria-label=${label} aria-valuemin="0" aria-valuemax=${answer.world - 1} aria-valuenow=${shown} aria-valuetext=${about(shown)}
      onPointerMove=${over} onPointerLeave=${leave} onPointerDown=${(event) => {
        const rank = event.button ? null : found(event);
        if (rank !== null) look(rank);
      }} onKeyDown=${key} onBlur=${leave}></canvas>`}
    <p class="reading">${about(shown)}</p>
  </div>`;
}

/** What a rank is: its number, its place and its coordinates. */
export function rankText(answer, rank) {
  const coordinates = answer.axes.map((axis) => `${axis.axis} ${placeOn(axis, rank)}`).join(", ");
  return `rank ${rank} · node ${Math.floor(rank / answer.per_node)}, GPU ${rank % answer.per_node}${coordinates && ` · ${coordinates}`}`;
}

/** The SVG of a drawing of ranks. */
export function meshSvg(answer, element, paint) {
  const geo = meshOf(answer, element.clientWidth);
  const pen = new SvgPen(geo.width, geo.height, meshColours(element));
  drawMesh(pen, geo, paint);
  return pen.written();
}

/** All ranks, and the groups of one. `set`: ranks of a row of traffic, with a dimension; `look`: choose a rank. */
export function Mesh({ answer, set, look, copies, stale, terms }) {
  const [hot, point] = useState(null);
  const [only, show] = useState(null); // the axis whose groups are shown; null: all
  const frame = useRef(null);
  const rank = hot ?? answer.rank;
  const axes = answer.axes.filter((axis) => only === null || axis.axis === only);
  const pp = answer.axes.find((axis) => axis.axis === "pp");
  const paint = (one) => {
    if (one === rank) return { fill: "ink", text: "sheet", framed: true };
    if (set && hot === null) return inRuns(set.ranks, one) ? { fill: set.dimension || "other", text: set.dimension ? "sheet" : "on-other" } : { fill: "sunk", text: "ink-3" };
    const own = axes.filter((axis) => together(axis, rank, one));
    const first = own.find((axis) => axis.coordinate) ?? own[0];
    const alike = pp && placeOn(pp, one) === placeOn(pp, rank);
    if (!first) return { fill: alike ? "line" : "sunk", text: "ink-3" };
    return { fill: first.axis, text: "sheet", dot: first.axis !== "ep" && own.some((axis) => axis.axis === "ep") ? "ep" : null };
  };
  const about = (one) => rankText(answer, one);
  const columns = ["Axis", "Size", "Ranks of the group", "Links"];
  const rows = answer.axes.map((axis) => [`${axis.label} (${axis.axis})`, axis.size, axis.text, axis.link_text]);
  const file = () => ({
    columns: ["Rank", "Node", "GPU", ...answer.axes.map((axis) => axis.axis)],
    rows: Array.from({ length: answer.world }, (_, one) => [one, Math.floor(one / answer.per_node), one % answer.per_node, ...answer.axes.map((axis) => placeOn(axis, one))]),
  });
  return html`<${Figure} id="mesh" title="Ranks on their nodes" source="predicted · the mesh that a run makes" about=${terms.mesh} stale=${stale} copies=${copies}
    columns=${columns} rows=${rows} file=${file} drawing=${() => meshSvg(answer, frame.current, paint)}>
    <p class="quiet nodes">${answer.nodes_text}</p>
    <div ref=${frame}><${Grid} answer=${answer} paint=${paint} about=${about} look=${look} hot=${hot} point=${point} label="A rank; Enter chooses it" changes=${[answer, set, only]} /></div>
    <ul class="legend groups" aria-label=${`Groups of rank ${answer.rank}`}>
      <li><i class="swatch" style=${{ background: "var(--ink)" }}></i>${hot === null ? "Chosen" : "Pointed at"} <b>rank ${rank}</b> <small></small></li>
      ${answer.axes.map((axis) => html`<li key=${axis.axis} class=${`dim-${axis.axis}`}>
        <button type="button" aria-pressed=${only === axis.axis} aria-label=${`Show groups of ${axis.axis} alone`} onClick=${() => show(only === axis.axis ? null : axis.axis)}><span class="badge">${axis.axis}</span></button>
        <${Term} text=${axis.about}>${axis.label}<//> <b>${axis.text}</b> <small>${axis.link_text}</small></li>`)}
      ${pp && html`<li><i class="swatch" style=${{ background: "var(--line)" }}></i>Same pipeline rank <b></b> <small></small></li>`}
    </ul>
    <p class="quiet">Point at a rank to see its groups, and choose it to see its traffic below. Arrow keys go from rank to rank, Page keys from node to node.</p>
  <//>`;
}

