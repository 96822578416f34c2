// The frame of every figure: title, source, its data as a table, and copies.
import { html, useLayoutEffect, useRef, useState } from "./html.js";
import { Term } from "./tip.js";

/** The width of an element, in pixels, kept up to date. The element may come later than its component, and go. */
export function useWidth() {
  const [element, ref] = useState(null);
  const [width, set] = useState(0);
  useLayoutEffect(() => {
    if (element === null) return undefined;
    const measure = () => set(Math.floor(element.getBoundingClientRect().width));
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    measure();
    return () => observer.disconnect();
  }, [element]);
  return [ref, width];
}

/**
 * A figure. `columns` and `rows` are its data; `copies` are further things to copy: [label, function that gives it].
 * `file` gives the data of the file, at once or later, where that has more; `drawing` gives its SVG, where the figure is none itself; null: there is no drawing.
 */
export function Figure({ id, title, about, source, columns, rows, file, drawing, copies = [], stale, children }) {
  const [table, setTable] = useState(false);
  const [said, say] = useState("");
  const frame = useRef(null);
  const done = (text) => {
    say(text);
    setTimeout(() => say(""), 1600);
  };
  const csv = async () => {
    const data = file ? await file() : { columns, rows };
    return [data.columns, ...data.rows].map((row) => row.map(quoted).join(",")).join("\n") + "\n";
  };
  const drawn = () => (drawing ? drawing() : asSvg(frame.current.querySelector("svg.chart")));
  return html`<section class=${`figure ${stale}`} id=${id} aria-labelledby=${`${id}-title`} ref=${frame}>
    <header>
      <h2 id=${`${id}-title`}>${title}</h2>
      <p class="source"><${Term} text=${about}>${source}<//></p>
      <div class="tools">
        <button type="button" aria-pressed=${table} onClick=${() => setTable(!table)}>Table</button>
        <details class="menu" onFocusOut=${(event) => event.currentTarget.contains(event.relatedTarget) || (event.currentTarget.open = false)}>
          <summary>Copy</summary>
          <div>
            ${copies.map(([label, give]) => html`<button type="button" key=${label} onClick=${async () => {
              const text = await give();
              done((await copied(text)) ? `${label} copied` : "the browser does not let pages copy");
            }}>${label}</button>`)}
            <button type="button" onClick=${async () => download(`${id}.csv`, "text/csv", await csv())}>CSV</button>
            ${drawing !== null && html`<button type="button" onClick=${() => download(`${id}.svg`, "image/svg+xml", drawn())}>SVG</button>`}
          </div>
        </details>
        <span class="said" role="status">${said}</span>
      </div>
    </header>
    ${children}
    ${table && html`<${Table} columns=${columns} rows=${rows} caption=${title} />`}
  </section>`;
}

function Table({ columns, rows, caption }) {
  return html`<div class="table" tabindex="0" role="region" aria-label=${`${caption}, as a table`}><table>
    <caption class="hidden">${caption}</caption>
    <thead><tr>${columns.map((name) => html`<th scope="col" key=${name}>${name}</th>`)}</tr></thead>
    <tbody>${rows.map((row, i) => html`<tr key=${i}>${row.map((cell, j) =>
      j ? html`<td key=${j}>${cell}</td>` : html`<th scope="row" key=${j}>${cell}</th>`)}</tr>`)}</tbody>
  </table></div>`;
}

const quoted = (cell) => (/[",\n]/.test(String(cell)) ? `"${String(cell).replaceAll('"', '""')}"` : String(cell));

/** Copy a text. -> whether the browser let us. */
export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

/** Give the reader a file. */
export function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const LOOKS = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-family", "font-size", "font-weight",
  "text-anchor", "dominant-baseline"];

/** A drawing by itself: with the colours and type that the page's styles give it. */
function asSvg(svg) {
  const copy = svg.cloneNode(true);
  const both = [[svg, copy], ...Array.from(svg.querySelectorAll("*"), (e, i) => [e, copy.querySelectorAll("*")[i]])];
  for (const [from, to] of both) {
    const style = getComputedStyle(from);
    for (const look of LOOKS) to.setAttribute(look, style.getPropertyValue(look));
  }
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("viewBox", `0 0 ${svg.clientWidth} ${svg.clientHeight}`);
  return new XMLSerializer().serializeToString(copy);
}
