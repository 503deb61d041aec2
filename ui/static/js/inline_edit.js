// A field in place of a text: Enter and leaving it save, Escape does not.

import { h } from "./dom.js";

/** save(text) is called when the text differs from value; done() always, at the end. */
export function inlineEdit({ value, label, save, done }) {
  const field = h("input", { class: "lp-rename", "aria-label": label, maxlength: "300", dir: "auto" });
  field.value = value;
  let ended = false;
  const end = async (keep, byKey) => {
    if (ended) return;
    ended = true;
    const text = field.value.trim();
    if (keep && text !== value) await save(text);
    done(byKey);
  };
  field.addEventListener("keydown", (event) => {
    if (event.isComposing || (event.key !== "Enter" && event.key !== "Escape")) return;
    event.preventDefault();
    event.stopPropagation();
    end(event.key === "Enter", true);
  });
  field.addEventListener("blur", () => end(true, false));
  // Once it is in the page.
  queueMicrotask(() => {
    field.focus();
    field.select();
  });
  return field;
}
