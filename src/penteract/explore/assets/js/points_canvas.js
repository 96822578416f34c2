// A canvas of points: pointed at, or gone through by arrow keys in the order of the axis across.
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { useWidth } from "./figure.js";
import { colours } from "./lanes_drawing.js";
import { CanvasPen, SvgPen } from "./pens.js";
import { draw, geometry, pointAt } from "./points_drawing.js";
import { useTheme } from "./theme.js";
import { tipAt } from "./tip.js";

/** Colours of points, as the page's styles have them. */
function palette(element) {
  const style = getComputedStyle(element);
  const token = (name) => style.getPropertyValue(`--${name}`).trim();
  return { ...colours(element, { kinds: [] }), accent: token("accent"), strong: token("parameters"), front: token("tp"),
    faint: token("gradients"), bad: token("bad"), beyond: token("beyond") };
}

/** The points as an SVG by itself. `frame`: an element of the page, as wide as the drawing. */
export function pointsSvg(frame, points, axes, how) {
  const geo = geometry(frame.clientWidth);
  const pen = new SvgPen(geo.width, geo.height, palette(frame));
  draw(pen, points, axes, geo, how);
  return pen.written();
}

/**
 * `about` tells a point; `hint` is told where none is looked at; `choose` is called with a point, and whether Shift was held.
 * `how`: marks, limit, diagonal, first, as `draw` takes them.
 */
export function PointsCanvas({ points, axes, about, hint, label, count, choose, how }) {
  const [ref, width] = useWidth();
  const canvas = useRef(null);
  const [hot, setHot] = useState(null);
  const theme = useTheme();
  const geo = useMemo(() => geometry(width), [width]);
  const along = useMemo(() => points.filter((point) => point.kind === "strong" && point.x <= axes.across.most).sort((a, b) => a.x - b.x), [points, axes]);
  const there = hot && points.includes(hot) ? hot : null;
  useEffect(() => {
    if (!width) return;
    performance.clearMeasures("points");
    const begun = performance.now();
    draw(new CanvasPen(canvas.current, width, geo.height, palette(canvas.current)), points, axes, geo, { ...how, hot: there });
    performance.measure("points", { start: begun, end: performance.now() });
  }, [points, axes, geo, there, theme, JSON.stringify((how.marks ?? []).map((one) => one.point.name))]);
  const over = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const point = pointAt(points, axes, geo, event.clientX - box.left, event.clientY - box.top);
    setHot(point);
    tipAt(point && about(point), event.clientX + 12, event.clientY + 16);
  };
  const leave = () => {
    setHot(null);
    tipAt(null);
  };
  const key = (event) => {
    if (event.key === "Enter" && there) choose?.(there, event.shiftKey);
    const place = along.indexOf(there);
    const next = { ArrowRight: place + 1, ArrowLeft: place < 0 ? along.length - 1 : place - 1, Home: 0, End: along.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    setHot(along[Math.max(0, Math.min(along.length - 1, next))] ?? null);
  };
  return html`<div class="plot" ref=${ref}>
    <canvas ref=${canvas} class="lanes" width=${width} height=${geo.height} style=${{ width: `${width}px`, height: `${geo.height}px` }} tabindex="0" role="slider"
      aria-label=${label} aria-valuemin="0" aria-valuemax=${Math.max(0, along.length - 1)} aria-valuenow=${Math.max(0, along.indexOf(there))}
      aria-valuetext=${there ? about(there) : count} onPointerMove=${over} onPointerLeave=${leave} onBlur=${leave}
      onClick=${(event) => there && choose?.(there, event.shiftKey)} onKeyDown=${key}></canvas>
    <p class="reading"><span>${there ? about(there) : hint}</span></p>
  </div>`;
}
