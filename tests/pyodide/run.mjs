// Unpacks a zip of Python sources into Pyodide's own file system and runs a program over them:
//   node run.mjs SOURCES.zip PROGRAM.py
// Prints {"ready": SECONDS}, how long the interpreter took to be there, and then what the program prints.
import { readFile } from "node:fs/promises";
import { loadPyodide } from "pyodide";

const [sources, program] = process.argv.slice(2);
const began = performance.now();
const python = await loadPyodide({ stdout: (line) => console.log(line), stderr: (line) => console.error(line) });
console.log(JSON.stringify({ ready: (performance.now() - began) / 1000 }));

try {
  python.unpackArchive(new Uint8Array(await readFile(sources)), "zip", { extractDir: "/sources" });
  python.runPython("import sys; sys.path.insert(0, '/sources')");
  python.runPython(await readFile(program, "utf8"));
} catch (error) {
  console.error(error.message); // Python's traceback, without the megabyte of source that node would quote
  process.exitCode = 1;
}
