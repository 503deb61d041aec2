// The keys of the whole page, and how they are called.

import { t } from "./i18n.js";

const MAC = /Mac/.test(navigator.platform);
const CONTROL = MAC ? "⌘" : "Ctrl";

/** What the settings list: [keys, what they do]. */
export const SHORTCUTS = [
  [[CONTROL, "K"], "search"],
  [[MAC ? "⌥" : "Alt", "N"], "new"],
  [["Enter"], "send"],
  [["Shift", "Enter"], "line"],
  [["1–8"], "choose"],
  [["←", "→"], "cards"],
  [["↑", "↓"], "rows"],
  [["Shift", "F10"], "menu"],
  [["F2"], "rename"],
  [["Del"], "delete"],
  [["Esc"], "close"],
].map(([keys, what]) => [keys, t(`keys.${what}`)]);

/** on: {search(), fresh(), close(), choose(digit, typing)}; choose tells whether there was something to choose. */
export function listenForKeys(on) {
  addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.isComposing || document.querySelector("dialog[open]")) return;
    if ((event.ctrlKey || event.metaKey) && !event.altKey && event.key.toLowerCase() === "k") {
      event.preventDefault();
      on.search();
    } else if (event.altKey && !event.ctrlKey && !event.metaKey && event.code === "KeyN") {
      event.preventDefault();
      on.fresh();
    } else if (event.key === "Escape") on.close();
    else if (!event.ctrlKey && !event.metaKey && !event.altKey && /^[1-8]$/.test(event.key)) {
      const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
      if (on.choose(event.key, typing ? event.target : null)) event.preventDefault();
    }
  });
}
