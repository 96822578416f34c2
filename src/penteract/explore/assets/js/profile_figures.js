// Ranks beside each other, memory by owner, and what makes the difference of two profiles.
import { html } from "./html.js";
import { Bars } from "./bars.js";
import { Figure } from "./figure.js";
import { Term } from "./tip.js";

const [SLOW, FAST] = [20, 8]; // of many ranks: how many of those with the most and with the least work are drawn

/** The skew of ranks: of each what its step consists of. */
export function Skew({ figures, put, terms, copies, stale }) {
  const { ranks } = figures;
  const names = [...new Map(ranks.flatMap((rank) => rank.parts.map((part) => [part.name, part.label])))];
  const most = Math.max(1, ...ranks.map((rank) => rank.step.picoseconds));
  const rows = ranks.map((rank) => [rank.rank, rank.pp_rank, rank.step.text, rank.work.text, rank.waits.text, rank.more, ...names.map(([name]) => rank.parts.find((part) => part.name === name)?.took.text ?? "0")]);
  const sorted = [...ranks].sort((a, b) => b.work.picoseconds - a.work.picoseconds);
  const drawn = ranks.length <= SLOW + FAST ? ranks : [...sorted.slice(0, SLOW), ...sorted.slice(-FAST)];
  const kinds = figures.lanes.kinds;
  const look = (part) => `kind-${kinds[part.kind]?.name ?? "unmatched"}`;
  return html`<${Figure} id="skew" title="The ranks beside each other" source="measured under the profiler" stale=${stale} copies=${copies} about=${terms.skew}
    columns=${["Rank", "Pipeline rank", "Step", "Works", "Waits", "Work against the median of its pipeline rank", ...names.map(([, label]) => label)]} rows=${rows}>
    <p class="quiet">${figures.ranks_about}${drawn.length < ranks.length ? ` Drawn are the ${SLOW} that work longest and the ${FAST} that work least, of ${ranks.length}.` : ""}</p>
    <${Bars} label="Ranks: what each step consists of" side=${150} room=${290} rows=${drawn.map((rank) => {
      let at = 0;
      const line = rank.parts.map((part) => ({ from: at, to: (at += part.took.picoseconds / most), look: look(part) }));
      const much = `works ${rank.work.text} (${rank.more}) · waits ${rank.waits.text}`;
      return { key: rank.rank, label: `rank ${rank.rank}, pipeline rank ${rank.pp_rank}`, much, lines: [line], chosen: rank.shown, choose: () => put({ rank: rank.rank, op: undefined }),
        title: `Rank ${rank.rank} of pipeline rank ${rank.pp_rank}: ${much}. ${rank.parts.map((part) => `${part.label} ${part.took.text}`).join(", ")}` };
    })} />
    <p class="quiet">Colours are those of the lanes. Choose a rank to see its lanes, its ops and its memory.</p>
  <//>`;
}

/** Memory by owner, measured beside predicted. */
export function Owners({ figures, terms, copies, stale }) {
  const { memory } = figures;
  const rows = memory.owners.map((one) => [one.label, one.measured.text, one.process || !memory.planned ? "" : one.predicted.text, one.process || !memory.planned ? "" : one.change, one.measured.bytes, one.predicted.bytes]);
  const columns = ["Owner", "Measured", "Predicted", "Measured less predicted", "Measured, bytes", "Predicted, bytes"];
  const most = Math.max(1, memory.axis.most);
  const live = memory.live.map((one) => [`alive at the peak: ${one.name}`, one.amount.text, "", "", one.amount.bytes, ""]);
  return html`<${Figure} id="owners" title=${`Memory of rank ${memory.rank} by owner`} source="measured · predicted" stale=${stale} copies=${copies} about=${terms.owners}
    columns=${columns} rows=${rows} file=${() => ({ columns, rows: [...rows, ...live] })}>
    <dl class="facts wide">${[["Measured at the peak", memory.total.text], ["Predicted", memory.predicted.text], ["Measured less predicted", memory.change], ...memory.facts.map((fact) => [fact.label, fact.text])]
      .map(([label, text]) => html`<div key=${label}><dt>${label}</dt><dd>${text}</dd></div>`)}</dl>
    <${Bars} label="Owners of memory: measured above predicted" side=${200} room=${230} rows=${memory.owners.map((one) => ({ key: one.name, label: one.label,
      much: one.process ? `${one.measured.text}, beside tensors` : memory.planned ? `${one.measured.text} · predicted ${one.predicted.text}` : one.measured.text,
      title: `${one.label}: measured ${one.measured.text}${one.process || !memory.planned ? "" : `, predicted ${one.predicted.text}, ${one.change}`}`,
      lines: [[{ from: 0, to: one.measured.bytes / most, look: "of-run" }], ...(memory.planned ? [[{ from: 0, to: one.predicted.bytes / most, look: "of-plan" }]] : [])] }))} />
    <ul class="legend words"><li><i class="swatch of-run"></i> measured: ${memory.basis}</li>${memory.planned && html`<li><i class="swatch of-plan"></i> predicted: the plan, with one block for all registers</li>`}</ul>
    <h3 class="sub"><${Term} text=${terms["alive at the peak"]}>Alive at the peak<//>, during ${memory.at}</h3>
    ${memory.live.length === 0 && html`<p class="quiet">No register is alive then.</p>`}
    <ul class="reasons">${memory.live.map((one) => html`<li key=${one.name}><b>${one.amount.text}</b> ${one.share} · ${one.count} of ${one.name}</li>`)}</ul>
  <//>`;
}

/** Two profiles: which parts and which ops make the difference. */
export function Compared({ comparison, several, copies, stale, put }) {
  const found = comparison && !comparison.wrong ? comparison : null;
  const cells = (what) => (row) => [what, row.label, row.a, row.b, row.change, row.size, row.share];
  const rows = found ? [...found.parts.map(cells("part")), ...found.ops.map(cells("op"))] : [];
  return html`<${Figure} id="compared" title="Two profiles: what makes the difference" source="measured" stale=${stale} copies=${copies} drawing=${found ? undefined : null}
    about="Parts are those of the rank with the most work, ops those of the slowest rank of each pipeline rank, under the profiler." columns=${["What", "Name", "A", "B", "B less A", "B less A, ps", "Of A's step"]} rows=${rows}>
    ${!comparison && html`<p class="quiet">${several ? "Choose a profile to compare with: B in the list above." : "With a second profile, here is what makes the difference: open it above, or have it beside the first."} <code class="command">penteract profile A B</code></p>`}
    ${comparison?.wrong && html`<p class="quiet">${comparison.wrong}</p>`}
    ${found && html`
      <p class=${`change-of ${found.slower ? "more" : "less"}`}>${found.verdict}</p>
      <p class="quiet axes">A ${found.a}<br />B ${found.b}</p>
      ${found.about.length > 0 && html`<ul class="reasons">${found.about.map((text) => html`<li key=${text}>${text}</li>`)}</ul>`}
      <h3 class="sub">Parts</h3>
      <${Diverging} rows=${found.parts} label="Parts: B less A" />
      <h3 class="sub">Ops, the largest change first</h3>
      <${Diverging} rows=${found.ops} label="Ops: B less A" />
      ${found.left_out && html`<p class="quiet">${found.left_out}</p>`}`}
    ${comparison && html`<p><button type="button" onClick=${() => put({ against: undefined })}>Compare with nothing</button></p>`}
  <//>`;
}

/** Changes to both sides of 0. */
function Diverging({ rows, label }) {
  const low = Math.min(0, ...rows.map((row) => row.size));
  const high = Math.max(0, ...rows.map((row) => row.size));
  const whole = Math.max(1, high - low);
  const x = (size) => (size - low) / whole;
  return html`<${Bars} label=${label} side=${330} room=${230} zero=${x(0)} rows=${rows.map((row, i) => ({ key: i, label: row.label, much: `${row.change} · ${row.a} → ${row.b}`,
    title: `${row.label}: ${row.change}, ${row.share} of A's step; ${row.a} in A, ${row.b} in B`,
    lines: [[{ from: x(Math.min(0, row.size)), to: x(Math.max(0, row.size)), look: row.size > 0 ? "worse" : "better" }]] }))} />`;
}
