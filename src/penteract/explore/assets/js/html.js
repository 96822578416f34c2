// Preact and htm as one tag: html`<p>…</p>`.
import { h } from "../vendor/preact.mjs";
import htm from "../vendor/htm.mjs";

export const html = htm.bind(h);
export { render } from "../vendor/preact.mjs";
export { useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/hooks.mjs";
