// Answers of an exported page: those made at export until the planner runs in workers of the page, and theirs then.

const PATIENCE = 100; // ms in which a search stops
const SEARCHES = new Set(["step", "fits", "schedule", "schedules", "search", "what_if", "ranks", "profile", "bench"]);

const first = fetch(new URL("../../first.json", import.meta.url)).then((response) => response.json());
let live = false;
let tell = () => {};

/** Call `changed` with how answers are made now: "export", "live", or what went wrong. */
export function watch(changed) {
  tell = changed;
  changed(live ? "live" : "export");
}

/** A worker with Python. It answers one request at a time. */
class Worker_ {
  constructor() {
    this.worker = new Worker(new URL("./python.js", import.meta.url), { type: "module" });
    this.rows = new Map();
    this.ready = new Promise((go, fail) => {
      this.worker.onerror = () => fail(new Error("the worker does not start"));
      this.worker.onmessage = ({ data }) => {
        if (data.ready) go();
        else if (data.failed && !data.number) fail(new Error(data.failed));
        else this.rows.get(data.number)?.(data);
      };
    });
  }

  /** Ask; `row` gets each object. Resolves at the end. */
  ask(number, text, row) {
    return new Promise((go, fail) => {
      this.rows.set(number, (data) => {
        if (data.row) return row(JSON.parse(data.row));
        this.rows.delete(number);
        return data.failed ? fail(new Error(data.failed)) : go();
      });
      this.worker.postMessage({ number, text });
    });
  }
}

let numbers = 0;
let spare = null;

/** One request after another; a stopped one that does not end at once loses its worker to a warm one. */
class Lane {
  constructor(worker) {
    this.worker = worker;
    this.turn = Promise.resolve();
  }

  ask(text, row, signal) {
    const mine = this.turn.then(() => this.#answer(text, row, signal));
    this.turn = mine.catch(() => {});
    return mine;
  }

  async #answer(text, row, signal) {
    if (signal?.aborted) throw signal.reason;
    await this.worker.ready;
    const number = ++numbers;
    const worker = this.worker;
    const answered = worker.ask(number, text, (one) => signal?.aborted || row(one));
    if (!signal) return answered;
    let aborted = null;
    const gone = new Promise((_, fail) => {
      aborted = async () => {
        worker.worker.postMessage({ stop: number });
        const late = await Promise.race([answered.catch(() => {}), new Promise((go) => setTimeout(() => go("late"), PATIENCE))]);
        if (late === "late") {
          worker.worker.terminate();
          this.worker = spare ?? new Worker_();
          spare = new Worker_();
        }
        fail(signal.reason);
      };
      signal.addEventListener("abort", aborted, { once: true });
    });
    try {
      return await Promise.race([answered, gone]);
    } finally {
      signal.removeEventListener("abort", aborted);
    }
  }
}

let prices = null;
let searches = null;

function start() {
  prices = new Lane(new Worker_());
  prices.worker.ready.then(
    () => {
      live = true;
      tell("live");
      searches = new Lane(new Worker_());
      searches.worker.ready.then(() => (spare = new Worker_()));
    },
    (error) => tell(`the planner does not start: ${error.message}`),
  );
}

const same = (request, opening) => (request.kind === "bench" || JSON.stringify(request.question) === JSON.stringify(opening)) && (request.pp_rank ?? null) === null
  && request.search === undefined && request.rank === undefined && request.parameter === undefined
  && request.profile === undefined && request.files === undefined && (request.bench === undefined || Object.keys(request.bench).length === 0);

/** Answer a request: with what was made at export, if the planner does not run yet and that is what is asked. */
export async function ask(request, row, signal) {
  const made = await first;
  const opening = made.opening[0].question;
  if (!prices) start();
  if (request.kind === "opening" || request.kind === "runs" || (!live && made[request.kind] && same(request, opening))) {
    made[request.kind].forEach((one) => row(one));
    return;
  }
  const text = JSON.stringify({ request, opening });
  if (!SEARCHES.has(request.kind)) return prices.ask(text, row, signal);
  await prices.worker.ready;
  return searches.ask(text, row, signal);
}
