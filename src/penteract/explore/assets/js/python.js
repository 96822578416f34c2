// The worker of an exported page: a Python for browsers, with the planner's sources, that answers as the server does.
import { loadPyodide } from "../../pyodide/pyodide.mjs";

const ROOT = new URL("../../", import.meta.url);
const PROGRAM = `
import json, sys
from pathlib import Path
sys.path.insert(0, "/sources")
from penteract.explore.answering import answer
from penteract.explore.measured_sweeps.read_sweeps import SweepFolders

folder = Path("/sources/sweeps")
sweeps = SweepFolders(folder, dated=False) if folder.is_dir() else None
profiles = []

def rows(text, tell):
    asked = json.loads(text)
    told = lambda row: tell(json.dumps(row, allow_nan=False))
    if asked["request"].get("kind") == "profile" and not profiles:
        from penteract.explore.training_runs.read_profiles import ProfileFolders
        given = Path("/sources/profiles")
        profiles.append(ProfileFolders((given,) if given.is_dir() else (), dated=False))  # it keeps what it has parsed
    for row in answer(asked["request"], asked["opening"], told, profiles=next(iter(profiles), None), sweeps=sweeps):
        yield json.dumps(row, allow_nan=False)

rows
`;
let stopped = 0; // the number of the last request that was stopped

const ready = (async () => {
  const sources = fetch(new URL("penteract.zip", ROOT)).then((response) => response.arrayBuffer());
  const python = await loadPyodide({ indexURL: new URL("pyodide/", ROOT).href });
  python.unpackArchive(await sources, "zip", { extractDir: "/sources" });
  return python.runPython(PROGRAM);
})();
ready.then(
  () => postMessage({ ready: true }),
  (error) => postMessage({ failed: String(error.message ?? error) }),
);

onmessage = async ({ data }) => {
  if (data.stop) {
    stopped = data.stop;
    return;
  }
  const ask = await ready;
  const answers = ask(data.text, (row) => postMessage({ number: data.number, row }));
  try {
    for (const row of answers) {
      postMessage({ number: data.number, row });
      await new Promise((go) => setTimeout(go)); // a request to stop is read between two rows
      if (stopped === data.number) break;
    }
    postMessage({ number: data.number, end: true });
  } catch (error) {
    postMessage({ number: data.number, end: true, failed: String(error.message ?? error) });
  } finally {
    answers.destroy();
  }
};
