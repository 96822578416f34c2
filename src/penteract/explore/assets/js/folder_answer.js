// What a folder holds, asked for again and again while somebody looks at it: runs and sweeps are written meanwhile.
import { askOne } from "./ask.js";
import { useEffect, useState } from "./html.js";

const EVERY = 2000; // ms between two looks

/**
 * -> [the newest answer of the request's kind, what was wrong or "", a setter of that]. `request`: null while nobody
 * looks. It is asked anew when one of `parts` changes, and on a timer where a server can look again.
 */
export function useFolderAnswer(request, parts) {
  const [answer, set] = useState(null);
  const [error, fail] = useState("");
  useEffect(() => {
    if (!request) return undefined;
    const stop = new AbortController();
    let timer = 0;
    const look = async () => {
      try {
        const found = await askOne(request, stop.signal);
        if (stop.signal.aborted) return;
        fail(found?.kind === "error" ? found.text : "");
        if (found?.kind === request.kind) set(found);
        if (found?.served) timer = setTimeout(look, EVERY);
      } catch {
        // the page has gone on, or the server has gone: the price says so
      }
    };
    look();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, parts);
  return [answer, error, fail];
}
