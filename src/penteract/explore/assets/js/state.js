// What the page is about, as one value; and that value as a link: compressed, in the fragment of the address.

const PREFIX = "#q=";

/** The views of the page; a link without one opens the first. */
export const VIEWS = ["memory", "schedules", "layouts", "ranks", "runs"];

/** The value at a path such as "layout.tp"; undefined if the question leaves it to the planner. */
export function at(question, name) {
  return name.split(".").reduce((part, key) => part?.[key], question);
}

/** The question with another value at a path; undefined leaves it to the planner. */
export function put(question, name, value) {
  const [first, second] = name.split(".");
  if (second === undefined) return { ...question, [first]: value };
  const part = { ...question[first] };
  if (value === undefined) delete part[second];
  else part[second] = value;
  return { ...question, [first]: part };
}

async function through(bytes, transform) {
  return new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(transform)).arrayBuffer());
}

/** A state as a fragment. */
export async function toFragment(state) {
  const bytes = await through(new TextEncoder().encode(JSON.stringify(state)), new CompressionStream("deflate-raw"));
  const text = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
  return PREFIX + btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/** The state of a fragment; null if it has none. */
export async function fromFragment(fragment) {
  if (!fragment.startsWith(PREFIX)) return null;
  try {
    const text = atob(fragment.slice(PREFIX.length).replaceAll("-", "+").replaceAll("_", "/"));
    const bytes = await through(Uint8Array.from(text, (c) => c.charCodeAt(0)), new DecompressionStream("deflate-raw"));
    const state = JSON.parse(new TextDecoder().decode(bytes));
    if (!state || typeof state.question !== "object") return null;
    const view = VIEWS.includes(state.view) ? state.view : VIEWS[0];
    const { question, stage = null, search, only, rank, parameter, runs } = state;
    return { question, stage, view, search, only, rank, parameter, runs };
  } catch {
    return null;
  }
}
