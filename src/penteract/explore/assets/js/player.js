// Plays a step: a mark after the other, from where it stands.
import { html, useEffect, useRef, useState } from "./html.js";

const LASTS = 9000; // ms of a step
const COARSE = 24; // moments of a step, for those who want less motion

/** Play, stop, and a slider over the marks of a step. `stand`: go to a mark. */
export function Player({ marks, place, stand }) {
  const [plays, setPlays] = useState(false);
  const now = useRef(null);
  now.current = { marks, place, stand };
  useEffect(() => {
    if (!plays) return undefined;
    const least = matchMedia("(prefers-reduced-motion: reduce)").matches ? COARSE : Infinity;
    const first = (now.current.place ?? 0) >= now.current.marks.length - 1 ? 0 : now.current.place ?? 0;
    const begun = performance.now();
    let frame = 0;
    const tick = (time) => {
      const last = now.current.marks.length - 1;
      const steps = Math.min(last, least);
      const gone = first / last + Math.max(0, time - begun) / LASTS;
      const next = Math.min(last, Math.round((Math.floor(gone * steps) / steps) * last));
      if (next !== now.current.place) now.current.stand(next);
      if (next >= last) setPlays(false);
      else frame = requestAnimationFrame(tick);
    };
    frame = requestAnimationFrame(tick);
    return () => cancelAnimationFrame(frame);
  }, [plays]);
  if (marks.length < 2) return null;
  const at = Math.min(place ?? 0, marks.length - 1);
  return html`<button type="button" class="play" onClick=${() => setPlays(!plays)}>${plays ? "Pause" : "Play"}</button>
    <input type="range" class="scrub" aria-label="Moment of the step" min="0" max=${marks.length - 1} value=${at} aria-valuetext=${marks[at].text}
      onInput=${(event) => {
        setPlays(false);
        stand(Number(event.currentTarget.value));
      }} />
    <output class="moment">${marks[at].text}</output>`;
}
