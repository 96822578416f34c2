// What the page is about, as one value; and that value as a link: compressed, in the fragment of the address.

const PREFIX = "#q=";

/** The views of the page; a link without one opens the first. */
export const VIEWS = ["memory", "schedules", "layouts", "ranks", "runs", "bench", "profile"];

const LINKED = 2 ** 18; // letters of a file that a link holds, at most

/** Whether a link holds a file of the reader whole; else it has its name alone. */
export const isLinked = (file) => file.text !== undefined && file.text.length <= LINKED;

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

/** A text, compressed, in letters that an address may have. */
export async function packed(text) {
  const bytes = await through(new TextEncoder().encode(text), new CompressionStream("deflate-raw"));
  let letters = "";
  for (let i = 0; i < bytes.length; i += 8192) letters += String.fromCharCode(...bytes.subarray(i, i + 8192));
  return btoa(letters).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/** A state as a fragment. */
export async function toFragment(state) {
  const file = state.bench?.file;
  if (file && !isLinked(file)) state = { ...state, bench: { ...state.bench, file: { name: file.name } } };
  return PREFIX + (await packed(JSON.stringify(state)));
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
    const { question, pp_rank = null, search, only, rank, parameter, runs, bench, zoom, profile } = state;
    return { question, pp_rank, view, search, only, rank, parameter, runs, bench, zoom: isZoom(zoom) ? zoom : undefined, profile: profileOf(profile) };
  } catch {
    return null;
  }
}

/** Whether a value of a link is a part of an axis. */
const isZoom = (zoom) => Array.isArray(zoom) && zoom.length === 2 && zoom.every((share) => share >= 0 && share <= 1) && zoom[0] < zoom[1];

/** What a link says of the Profile view. */
function profileOf(found) {
  if (!found || typeof found !== "object") return undefined;
  const { zoom, ...rest } = found;
  return { ...rest, ...(isZoom(zoom) && { zoom }) };
}
