// The fullest rank's bytes by owner, and by the line of code that allocates them; and each distinct rank.
import { html, useMemo, useState } from "./html.js";
import { Figure, useWidth } from "./figure.js";
import { Term } from "./tip.js";

const OWNERS = 46; // heights, in pixels
const BLOCKS = 74;
const TOP = 30;
const AXIS = 26;
const SMALLEST = 3; // pixels of a block of its own
const LETTER = 6.7; // width of a letter, about

/** Where the memory of one rank goes. */
export function Memory({ figures, terms, copies, stale }) {
  const all = useMemo(() => figures.owners.flatMap((owner) => owner.blocks.map((block) => ({ owner, block }))), [figures]);
  const largest = all.reduce((best, one) => (one.block.amount.bytes > (best?.block.amount.bytes ?? -1) ? one : best), null);
  const [picked, pick] = useState(null);
  const shown = all.find((one) => keyOf(one) === picked) ?? largest;
  const rows = all.map(({ owner, block }) => [owner.label, `${block.what} ${block.detail}`, block.amount.text,
    block.amount.bytes, block.share, `${block.times}${block.formula}`, `${block.times}${block.numbers}`, block.line]);
  return html`<${Figure} id="memory" title=${`Where the memory of ${figures.rank_label} goes`} stale=${stale} copies=${copies}
    source="predicted · exact" about=${terms.predicted}
    columns=${["Owner", "What", "Memory", "Bytes", "Share", "Formula", "Numbers", "Line"]} rows=${rows}>
    <${Bars} figures=${figures} shown=${shown} pick=${pick} />
    <${Legend} owners=${figures.owners} />
    ${shown && html`<${Detail} one=${shown} figures=${figures} all=${all} pick=${pick} terms=${terms} />`}
  <//>`;
}

const keyOf = (one) => one && `${one.owner.name}/${one.block.what}/${one.block.detail}/${one.block.line}/${one.block.formula}`;

function Bars({ figures, shown, pick }) {
  const [ref, width] = useWidth();
  const x = (bytes) => (bytes / figures.axis.most) * Math.max(1, width - 1);
  const height = TOP + OWNERS + BLOCKS + AXIS;
  let from = 0;
  const parts = figures.owners.map((owner) => {
    const part = { owner, from };
    from += owner.amount.bytes;
    return part;
  });
  return html`<div class="plot" ref=${ref}>
    ${width > 0 && html`<svg class="chart" width=${width} height=${height} role="group"
      aria-label=${`${figures.verdict} ${figures.owners.map((o) => `${o.label} ${o.amount.text}`).join(", ")}`}>
      <${Grid} axis=${figures.axis} x=${x} top=${TOP} bottom=${height - AXIS} width=${width} />
      ${parts.map(({ owner, from: start }) => html`<${OwnerBar} key=${owner.name} owner=${owner} start=${start} x=${x}
        shown=${shown} pick=${pick} />`)}
      <${CardLines} card=${figures.card} x=${x} top=${TOP} bottom=${height - AXIS} width=${width} />
    </svg>`}
  </div>`;
}

function OwnerBar({ owner, start, x, shown, pick }) {
  const left = x(start);
  const wide = x(owner.amount.bytes);
  if (wide <= 0) return null;
  const label = fitting(wide - 12, `${owner.label}  ${owner.amount.text}`, owner.label);
  let at = start;
  let rest = null;
  const blocks = [];
  for (const block of owner.blocks) {
    if (block.amount.bytes <= 0) continue;
    if (x(block.amount.bytes) < SMALLEST) {
      rest ??= { from: at, bytes: 0, first: block, count: 0 };
      rest.bytes += block.amount.bytes;
      rest.count += 1;
    } else blocks.push({ block, from: at });
    at += block.amount.bytes;
  }
  return html`<g class=${`owner-${owner.name}`}>
    <rect class="owner" x=${left} y=${TOP} width=${Math.max(0, wide - 1)} height=${OWNERS} rx="3" />
    <text class="on" x=${left + 8} y=${TOP + OWNERS / 2} dominant-baseline="central">${label}</text>
    ${blocks.map(({ block, from }, i) => html`<${Block} key=${i} block=${block} owner=${owner} left=${x(from)}
      wide=${x(block.amount.bytes)} odd=${i % 2} on=${shown?.block === block} pick=${pick} />`)}
    ${rest && html`<rect class="rest" x=${x(rest.from)} y=${TOP + OWNERS + 2} width=${Math.max(0.5, x(rest.bytes) - 0.5)}
      height=${BLOCKS - 2}><title>${`${rest.count} smaller: the table has them`}</title></rect>`}
  </g>`;
}

function Block({ block, owner, left, wide, odd, on, pick }) {
  const y = TOP + OWNERS + 2;
  const choose = () => pick(keyOf({ owner, block }));
  const key = (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      choose();
    }
  };
  const lines = [fitting(wide - 12, block.what, shortened(block.what)), fitting(wide - 12, block.amount.text)];
  return html`<g class=${`block${odd ? " odd" : ""}${on ? " chosen" : ""}`} role="button" tabindex="0" aria-pressed=${on}
    onClick=${choose} onKeyDown=${key}>
    <title>${`${block.what} ${block.detail}: ${block.amount.text}, ${block.share}`}</title>
    <rect x=${left} y=${y} width=${Math.max(0.5, wide - 1)} height=${BLOCKS - 2} rx="3" />
    <text class="on small" aria-hidden="true" x=${left + 7} y=${y + 24}>${lines[0]}</text>
    <text class="on small strong" aria-hidden="true" x=${left + 7} y=${y + 44}>${lines[1]}</text>
  </g>`;
}

const shortened = (what) => what.replace(/^layers\.\*\./, "").replace(/ \[.*$/, "");
const fitting = (wide, ...texts) => texts.find((text) => text.length * LETTER <= wide) ?? "";

/** Marks of the axis of bytes. */
export function Grid({ axis, x, top, bottom, width }) {
  let last = -Infinity;
  return html`<g class="grid">${axis.ticks.map((tick) => {
    const at = x(tick.at);
    const free = at - last > 56 && at < width - 24;
    if (free) last = at;
    return html`<g key=${tick.at}>
      <line x1=${at} x2=${at} y1=${top} y2=${bottom + 4} />
      ${free && html`<text x=${at} y=${bottom + 18} text-anchor=${tick.at ? "middle" : "start"}>${tick.text}</text>`}
    </g>`;
  })}</g>`;
}

/** The card's line, and how far tensors may go; beyond it is shaded. */
export function CardLines({ card, x, top, bottom, width, labels = true }) {
  if (!card.drawn || !card.usable.bytes) return null;
  const usable = x(card.usable.bytes);
  const end = x(card.amount.bytes);
  const text = `usable ${card.usable.text}`;
  const inside = usable - 6 > text.length * LETTER;
  return html`<g class="card-lines">
    <rect class="beyond" x=${usable} y=${top - 4} width=${Math.max(0, width - usable)} height=${bottom - top + 4} />
    <line class="usable" x1=${usable} x2=${usable} y1=${top - 20} y2=${bottom} />
    <line class="end" x1=${end} x2=${end} y1=${top - 4} y2=${bottom} />
    ${labels && html`<text x=${inside ? usable - 6 : usable + 6} y=${top - 12} text-anchor=${inside ? "end" : "start"}>${text}</text>`}
    ${labels && inside && width - usable > 130 && html`<text class="quiet" x=${usable + 6} y=${top - 12}>${`${card.name} ${card.amount.text}`}</text>`}
  </g>`;
}

/** The owners, with what they are. */
export function Legend({ owners }) {
  return html`<ul class="legend">${owners.map((owner) => html`<li key=${owner.name} class=${`owner-${owner.name}`}>
    <i class="swatch" aria-hidden="true"></i>
    <${Term} text=${owner.about}>${owner.label}<//>
    <b>${owner.amount.text}</b> <small>${owner.share}</small>
  </li>`)}</ul>`;
}

const NAME = /(dp|tp|pp|cp|ep)(?![a-z])/g;

/** A formula with the names of dimensions in their colours. */
function Formula({ text }) {
  return text.split(NAME).map((part, i) => (i % 2 ? html`<b key=${i} class=${`dim-${part}`}>${part}</b>` : part));
}

/** One block: its formula, its numbers and its line of code. */
function Detail({ one, figures, all, pick, terms }) {
  const { owner, block } = one;
  const source = figures.sources[block.line];
  const plain = block.formula === block.numbers;
  const names = Object.entries(figures.legend).filter(([name]) => new RegExp(`(^|[^A-Za-z])${name}($|[^A-Za-z])`).test(block.formula));
  const place = all.findIndex((other) => keyOf(other) === keyOf(one));
  const go = (step) => pick(keyOf(all[(place + step + all.length) % all.length]));
  return html`<div class=${`detail owner-${owner.name}`} aria-live="polite">
    <div class="head">
      <div>
        <p class="kind"><i class="swatch" aria-hidden="true"></i>${owner.label}</p>
        <h3>${block.what}</h3>
        <p class="about">${block.detail}</p>
      </div>
      <p class="much"><b>${block.amount.text}</b><span>${block.share}</span></p>
      <p class="steps">
        <button type="button" aria-label="Previous block" onClick=${() => go(-1)}>‹</button>
        <button type="button" aria-label="Next block" onClick=${() => go(1)}>›</button>
      </p>
    </div>
    <div class="halves">
      <div>
        ${plain ? html`<p class="formula none">No formula: it depends on how it is packed or scheduled.</p>` : html`
          <p class="formula"><span class="times"><${Term} text=${block.times.includes("in flight") ? terms["in flight"] : ""}>${block.times}<//></span><${Formula} text=${block.formula} /></p>
          <p class="formula numbers">= <span class="times">${block.times}</span>${block.numbers} B</p>`}
        ${names.length > 0 && html`<dl>${names.map(([name, text]) => html`<div key=${name}><dt><${Formula} text=${name} /></dt><dd>${text}</dd></div>`)}</dl>`}
      </div>
      ${source ? html`<figure class="code"><figcaption>${block.line}</figcaption>
        <pre tabindex="0">${source.lines.map((line, i) => html`<code key=${i} class=${source.first + i === source.line ? "it" : ""}><i>${source.first + i}</i>${line || " "}</code>`)}</pre>
      </figure>` : block.line && html`<p class="code-name">${block.line}</p>`}
    </div>
  </div>`;
}

/** Each distinct rank at a glance: pipeline ranks with the same memory are one row. */
export function Ranks({ figures, copies, look, stale }) {
  const [ref, width] = useWidth();
  const names = figures.owners.map((owner) => owner.name);
  const rows = figures.ranks.map((rank) => [rank.label, rank.gpus, rank.amount.text, rank.amount.bytes, ...rank.owners.map((o) => o.text)]);
  const side = width < 560 ? 0 : 150;
  const inner = width - (side ? side + 84 : 0);
  const x = (bytes) => (bytes / figures.axis.most) * Math.max(1, inner - 1);
  const step = side ? 34 : 52;
  const height = TOP + figures.ranks.length * step + AXIS;
  return html`<${Figure} id="ranks" title="Each distinct rank" source="predicted · exact" stale=${stale} copies=${copies}
    about="GPUs of a pipeline rank hold alike amounts; neighbouring pipeline ranks with the same memory are one row. Choose one to see where its memory goes."
    columns=${["Rank", "GPUs", "Memory", "Bytes", ...figures.owners.map((o) => o.label)]} rows=${rows}>
    <div class="plot" ref=${ref}>${width > 0 && html`<svg class="chart" width=${width} height=${height} role="group" aria-label="Memory of each distinct rank">
      <g transform=${`translate(${side} 0)`}>
        <${Grid} axis=${figures.axis} x=${x} top=${TOP} bottom=${height - AXIS} width=${inner} />
      </g>
      ${figures.ranks.map((rank, i) => {
        const y = TOP + i * step + (side ? 4 : 22);
        let from = 0;
        const choose = () => look(rank.pp_ranks[0]);
        return html`<g key=${rank.label} class=${`rank${rank.shown ? " chosen" : ""}`} role="button" tabindex="0" aria-pressed=${rank.shown} onClick=${choose}
          onKeyDown=${(event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), choose())}>
          <title>${`${rank.label}, ${rank.gpus}: ${rank.amount.text}${rank.fits ? "" : ", does not fit"}`}</title>
          <rect class="hit" x="0" y=${y - (side ? 4 : 20)} width=${width} height=${step} />
          <text aria-hidden="true" x=${0} y=${side ? y + 13 : y - 6} dominant-baseline=${side ? "central" : "auto"}>${rank.label}</text>
          <g transform=${`translate(${side} 0)`}>${rank.owners.map((amount, k) => {
            const left = x(from);
            from += amount.bytes;
            return html`<rect key=${k} class=${`owner owner-${names[k]}`} x=${left} y=${y} width=${Math.max(0, x(amount.bytes) - 0.5)} height="26" />`;
          })}</g>
          <text aria-hidden="true" class=${rank.fits ? "much" : "much over"} x=${width} y=${side ? y + 13 : y - 6}
            text-anchor="end" dominant-baseline=${side ? "central" : "auto"}>${rank.amount.text}</text>
        </g>`;
      })}
      <g transform=${`translate(${side} 0)`}>
        <${CardLines} card=${figures.card} x=${x} top=${TOP} bottom=${height - AXIS} width=${inner} />
      </g>
    </svg>`}</div>
  <//>`;
}
