// Questions to the planner, which answers in objects: by the server that sent this page, or, of an exported page, by
// workers of the page itself.

export const VERSION = 1;

const STATIC = document.querySelector('meta[name="answers"]').content === "static";
const own = STATIC ? import("./static.js") : null;

/** Call `changed` with how answers are made: "served", "export" (made at export), "live", or what went wrong. */
export async function watch(changed) {
  if (own) (await own).watch(changed);
  else changed("served");
}

/** Ask, and call `row` with each object of the answer. Rejects if there is no answer, or when `signal` aborts. */
export async function ask(request, row, signal) {
  if (own) return (await own).ask({ version: VERSION, ...request }, row, signal);
  const response = await fetch(request.files || request.bench?.file ? "./api/files" : "./api/ask", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ version: VERSION, ...request }),
    signal,
  });
  if (!response.ok) throw new Error(await response.text());
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) row(JSON.parse(line));
  }
}

/** Ask for the only object of an answer. */
export async function askOne(request, signal) {
  let found = null;
  await ask(request, (row) => (found = row), signal);
  return found;
}

/**
 * Asks for the newest of many requests: one at a time, so that a slider is followed while it moves. What was asked
 * before the newest answer is dropped, and an older answer never comes after a newer one.
 */
export class Newest {
  constructor(answered, failed) {
    this.answered = answered;
    this.failed = failed;
    this.next = null;
    this.busy = false;
  }

  ask(request) {
    this.next = request;
    if (!this.busy) this.#pump();
  }

  async #pump() {
    this.busy = true;
    while (this.next) {
      const request = this.next;
      this.next = null;
      try {
        this.answered(await askOne(request), request, this.next !== null);
      } catch (error) {
        this.failed(error);
      }
    }
    this.busy = false;
  }
}
