// Memory of one rank over the step: what stays, what is live, and the call that runs at each moment.
import { html, useMemo, useState } from "./html.js";
import { Figure, useWidth } from "./figure.js";
import { Term } from "./tip.js";

const HEIGHT = 280;
const TOP = 22;
const BOTTOM = 26;
const LEFT = 58;
const LETTER = 6.7; // width of a letter, about

/** The curve, with a line that follows the pointer and the arrow keys; else it is at `moment`, or at the peak. */
export function Step({ answer, terms, waiting, copies, stale, moment = null }) {
  const rows = useMemo(() => (answer?.points ?? []).map((p) => [p.total.text, p.total.bytes, p.activations, p.workspace, p.at, p.what]), [answer]);
  return html`<${Figure} id="step" title="Memory over the step" source="predicted · exact bytes, simulated times" stale=${stale || (waiting ? "stale" : "")}
    about="Each call of the program at the time at which the simulated clock has it, with the registers that are live then."
    columns=${["In use", "Bytes", "Live activations", "Workspace", "Share of the step", "Call"]} rows=${rows} copies=${copies}>
    ${answer ? html`<${Curve} answer=${answer} terms=${terms} moment=${moment} />` : html`<p class="waiting" role="status">The step is simulated …</p>`}
  <//>`;
}

function Curve({ answer, terms, moment }) {
  const [ref, width] = useWidth();
  const [place, setPlace] = useState(null);
  const { points, axis, card } = answer;
  const nearest = (share) => points.reduce((best, p, i) => (Math.abs(p.at - share) < Math.abs(points[best].at - share) ? i : best), 0);
  const stands = moment?.seconds === answer.seconds; // the same part of the step is shown
  const at = Math.min(place ?? (stands ? nearest(moment.share) : answer.peak), points.length - 1);
  const inner = Math.max(1, width - LEFT - 1);
  const x = (share) => LEFT + share * inner;
  const y = (bytes) => TOP + (1 - bytes / axis.most) * (HEIGHT - TOP - BOTTOM);
  const held = answer.held.filter((one) => one.amount.bytes > 0);
  let floor = 0;
  const bands = held.map((one) => ({ one, from: floor, to: (floor += one.amount.bytes) }));
  const base = floor;
  const area = (low, high) => {
    const top = points.map((p) => `${x(p.at).toFixed(1)},${y(high(p)).toFixed(1)}`);
    const back = points.map((p) => `${x(p.at).toFixed(1)},${y(low(p)).toFixed(1)}`).reverse();
    return `M${[...top, ...back].join("L")}Z`;
  };
  const paths = useMemo(() => width > 0 && points.length > 1 && {
    live: area(() => base, (p) => base + p.activations),
    work: area((p) => base + p.activations, (p) => base + p.activations + p.workspace),
  }, [answer, width]);
  const follow = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    setPlace(nearest((event.clientX - box.left - LEFT) / inner));
  };
  const key = (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20, Home: -points.length, End: points.length };
    if (!(event.key in steps)) return;
    event.preventDefault();
    setPlace(Math.max(0, Math.min(points.length - 1, at + steps[event.key])));
  };
  const point = points[at];
  let last = -Infinity; // where the last mark of time ends: marks that would cover it have no text
  const across = answer.across.filter((tick) => {
    const wide = LETTER * tick.text.length;
    const begin = x(tick.at) - (tick.at > 0.96 ? wide : tick.at ? wide / 2 : 0);
    if (begin < last + 6) return false;
    last = begin + wide;
    return true;
  });
  const usable = card.usable.bytes;
  return html`<div class="plot" ref=${ref}>
    ${width > 0 && point && html`<svg class="chart curve" width=${width} height=${HEIGHT} role="slider" tabindex="0" aria-label="A moment of the step"
      aria-valuemin="0" aria-valuemax=${points.length - 1} aria-valuenow=${at} aria-valuetext=${`${point.total.text}: ${point.what}`}
      onPointerMove=${follow} onPointerDown=${follow} onPointerLeave=${() => setPlace(null)} onKeyDown=${key}>
      <g class="grid">${axis.ticks.map((tick) => html`<g key=${tick.at}>
        <line x1=${LEFT} x2=${width} y1=${y(tick.at)} y2=${y(tick.at)} />
        <text x=${LEFT - 8} y=${y(tick.at)} text-anchor="end" dominant-baseline="central">${tick.text}</text></g>`)}
      ${across.map((tick, i) => html`<text key=${i} x=${x(tick.at)} y=${HEIGHT - 8}
          text-anchor=${tick.at > 0.96 ? "end" : i ? "middle" : "start"}>${tick.text}</text>`)}</g>
      ${bands.map(({ one, from, to }) => html`<g key=${one.name} class=${`owner-${one.name}`}>
        <rect class="owner" x=${LEFT} y=${y(to)} width=${inner} height=${Math.max(0.5, y(from) - y(to))} />
        ${y(from) - y(to) > 17 && html`<text class="on small" x=${LEFT + 8} y=${(y(from) + y(to)) / 2} dominant-baseline="central">${`${one.label} ${one.amount.text}`}</text>`}
      </g>`)}
      ${paths && html`<path class="live" d=${paths.live} /><path class="work" d=${paths.work} />`}
      ${card.drawn && usable > 0 && html`<g class="card-lines">
        <rect class="beyond" x=${LEFT} y=${TOP - 14} width=${inner} height=${Math.max(0, y(usable) - TOP + 14)} />
        <line class="usable" x1=${LEFT} x2=${width} y1=${y(usable)} y2=${y(usable)} />
        <text x=${width - 4} y=${y(usable) - 6} text-anchor="end">${`usable ${card.usable.text}`}</text></g>`}
      <line class="allocated" x1=${LEFT} x2=${width} y1=${y(answer.allocated.bytes)} y2=${y(answer.allocated.bytes)} />
      <g class="cursor"><line x1=${x(point.at)} x2=${x(point.at)} y1=${TOP - 12} y2=${HEIGHT - BOTTOM} />
        <circle cx=${x(point.at)} cy=${y(point.total.bytes)} r="4" /></g>
    </svg>
    <p class="reading"><b>${point.total.text}</b> in use ${place === null && !stands ? "at the peak" : ""} · <span>${point.what}</span></p>
    <p class="quiet">Dashed: <${Term} text=${terms.arena}>all that ${answer.rank_label} allocates<//>, ${answer.allocated.text}. ${answer.note}</p>`}
  </div>`;
}
