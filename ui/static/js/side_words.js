// Gradio draws the controls on the right with English labels; in another language theirs are put in their place.

import { language, t } from "./i18n.js";

const LABELS = ["prompt", "temperature", "top_p", "top_k", "min_p", "penalty", "longest", "seed"];

/** Translate the panel, and again whatever Gradio draws anew. */
export function translateSide() {
  const side = document.getElementById("lp-side");
  if (language === "en" || !side) return;
  const put = () => {
    // Gradio keeps a second, hidden set of the tabs to measure them by.
    for (const tabs of side.querySelectorAll(".tab-container")) setText(tabs.querySelectorAll("button"), [t("side.parameters"), t("side.memory")]);
    const note = side.querySelector(".lp-side-note");
    if (note) setText([note], [t("side.note")]);
    for (const name of LABELS) {
      const control = document.getElementById(`lp-${name}`);
      if (!control) continue;
      const label = t(`side.${name}`);
      const text = control.querySelector('[data-testid="block-info"], label > span');
      if (text) setText([text], [label]);
      const set = (selector, attribute, value) => {
        for (const one of control.querySelectorAll(selector)) if (one.getAttribute(attribute) !== value) one.setAttribute(attribute, value);
      };
      if (["prompt", "longest", "seed"].includes(name)) set("textarea, input", "placeholder", t(`side.${name}.hint`));
      set('input[type="number"][aria-label]', "aria-label", t("side.number", { name: label }));
      set('input[type="range"]', "aria-label", label);
      set("button[aria-label]", "aria-label", t("side.reset", { name: label }));
      set("button[title]", "title", t("side.reset", { name: label }));
    }
  };
  put();
  new MutationObserver(put).observe(side, { childList: true, subtree: true, characterData: true, attributeFilter: ["aria-label", "title", "placeholder"] });
}

function setText(elements, texts) {
  texts.forEach((text, place) => {
    const element = elements[place];
    const node = element && [...element.childNodes].find((one) => one.nodeType === Node.TEXT_NODE && one.data.trim());
    if (node && node.data.trim() !== text) node.data = text;
  });
}
