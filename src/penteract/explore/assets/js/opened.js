// Files that the reader opens in the page: they stay in it, and go to the planner's machine with each question about them.
import { useState } from "./html.js";
import { packed } from "./state.js";

const LARGEST = 2 ** 26; // bytes of a file
const MOST = 8; // files

/** Whether the text of a file is a model's config.json. */
export function isConfig(text) {
  const found = parsed(text);
  return Boolean(found) && found.kind !== "profile" && ("model_type" in found || "hidden_size" in found);
}

/** Whether the text of a file is a profile. */
export const isProfile = (text) => parsed(text)?.kind === "profile";

function parsed(text) {
  try {
    const found = JSON.parse(text);
    return found && typeof found === "object" && !Array.isArray(found) ? found : null;
  } catch {
    return null;
  }
}

/** The opened profiles, and a function that opens some more: it resolves to their names. */
export function useOpened() {
  const [files, set] = useState([]);
  const open = async (some) => {
    let all = files;
    const names = [];
    for (const file of some) {
      if (file.size > LARGEST) continue;
      const data = await packed(await file.text());
      const same = all.find((one) => one.data === data);
      const name = same?.name ?? unlike(file.name.slice(0, 100) || "profile.json", all.map((one) => one.name));
      if (!same) all = [{ name, data }, ...all].slice(0, MOST);
      names.push(name);
    }
    set(all);
    return names;
  };
  return [files, open];
}

/** A name that none of these is. */
function unlike(name, names) {
  for (let i = 1; ; i += 1) {
    const found = i > 1 ? `${name} (${i})` : name;
    if (!names.includes(found)) return found;
  }
}
