// Explanations on hover and on focus: one element for all of them, read to those who listen.
import { html, useEffect, useState } from "./html.js";

const WIDTH = 300;
let show = () => {};

/** The element that explains; there is one. */
export function Tip() {
  const [tip, set] = useState(null);
  show = set;
  useEffect(() => {
    const escape = (event) => event.key === "Escape" && set(null);
    const scroll = () => set(null);
    addEventListener("keydown", escape);
    addEventListener("scroll", scroll, true);
    return () => {
      removeEventListener("keydown", escape);
      removeEventListener("scroll", scroll, true);
    };
  }, []);
  const style = tip && { left: `${tip.left}px`, top: `${tip.top}px`, maxWidth: `${WIDTH}px` };
  return html`<div id="tip" role=${tip ? "tooltip" : undefined} class=${tip ? "tip" : "tip hidden"} style=${style}>${tip?.text ?? ""}</div>`;
}

/** Explain what is at a place of the window, such as a mark of a canvas; null: nothing. */
export function tipAt(text, left, top) {
  show(text ? { text, left: Math.max(8, Math.min(left, innerWidth - WIDTH - 16)), top: Math.min(top, innerHeight - 80) } : null);
}

/** Properties of an element that is explained by `text`. */
export function explained(text) {
  if (!text) return {};
  const open = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const left = Math.max(8, Math.min(box.left, innerWidth - WIDTH - 16));
    show({ text, left, top: box.bottom + 6 });
  };
  const close = () => show(null);
  return { onMouseEnter: open, onFocus: open, onMouseLeave: close, onBlur: close, "aria-describedby": "tip" };
}

/** A word with its explanation. */
export function Term({ text, children }) {
  return text ? html`<span class="term" tabindex="0" ...${explained(text)}>${children}</span>` : children;
}
