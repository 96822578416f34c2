// The theme, for what does not follow it by itself.
import { useEffect, useState } from "./html.js";

/** A number that changes with the theme: a canvas does not follow it by itself. */
export function useTheme() {
  const [count, set] = useState(0);
  useEffect(() => {
    const changed = () => set((n) => n + 1);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const seen = new MutationObserver(changed);
    dark.addEventListener("change", changed);
    seen.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    document.fonts?.ready.then(changed);
    return () => {
      dark.removeEventListener("change", changed);
      seen.disconnect();
    };
  }, []);
  return count;
}
