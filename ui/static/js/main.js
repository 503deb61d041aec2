// The entrance: gr.HTML's js_on_load calls mountChat and mountKv; Gradio's controls call the bridge.

import { Chat } from "./chat.js";
import { translateSide } from "./side_words.js";

const CONTROLS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
let chat = null;
let kvElement = null;

/** Draw the chat into Gradio's component. trigger tells Gradio to read the controls' values anew. */
export function mountChat(element, trigger) {
  if (chat) return;
  chat = new Chat(element, { sync: () => trigger("select") });
  document.getElementById("lp-boot")?.remove();
  if (kvElement) chat.showKvIn(kvElement);
  chat.begin();
  translateSide();
}

export function mountKv(element) {
  kvElement = element;
  chat?.showKvIn(element);
}

globalThis.localpaged = {
  /** A control was moved: its values in the order of CONTROLS. An empty number means: none. */
  setSampling(...values) {
    if (!chat) return;
    const sampling = Object.fromEntries(CONTROLS.map((name, place) => [name, values[place]]));
    for (const name of ["max_tokens", "seed"]) {
      const value = sampling[name];
      sampling[name] = value === null || value === "" || Number.isNaN(Number(value)) ? null : Math.trunc(Number(value));
    }
    if (sampling.max_tokens !== null && sampling.max_tokens < 1) sampling.max_tokens = null;
    if (CONTROLS.some((name) => sampling[name] !== chat.settings.sampling[name])) chat.setSampling(sampling);
  },
  setSystemPrompt(text) {
    if (chat && text !== chat.settings.systemPrompt) chat.setSystemPrompt(text ?? "");
  },
  /** What the controls should show: the sampling values, then the system prompt. */
  controls() {
    return chat ? [...CONTROLS.map((name) => chat.settings.sampling[name]), chat.settings.systemPrompt] : [];
  },
};
