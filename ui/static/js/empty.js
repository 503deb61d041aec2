// What the middle of the page says while there is nothing to show yet.

import { copyText, h } from "./dom.js";

const IDEAS = [
  "Suggest a name for a small museum in a lighthouse, with one line on why.",
  "Explain to a ten-year-old why the sea is salty.",
  "Write a Python function that removes duplicates from a list and keeps the order.",
  "Give me three plans for a rainy Sunday at home.",
];
const BETTER = [
  ["localpaged pull Qwen/Qwen3-0.6B", "fetch a better one"],
  ["localpaged serve --model Qwen/Qwen3-0.6B", "and start with it"],
];

function command(text, note) {
  const copy = h("button", { class: "lp-code-copy", type: "button", "aria-label": `Copy: ${text}` }, "Copy");
  copy.addEventListener("click", () => copyText(text, copy));
  return h("div", { class: "lp-command" }, h("code", {}, text), h("span", {}, note), copy);
}

/** The page without a conversation. state: /api/state or null. */
export function emptyPage(state, use) {
  const engine = state?.engine;
  const remote = state?.features?.kv === false;
  const parts = [
    h("h2", {}, "Ask once, compare several answers"),
    h("p", {}, `They are written side by side${remote ? "" : " and share the memory of your question"}. Choose one and go on from it.`),
  ];
  if (engine === "dead") {
    parts.push(
      h("div", { class: "lp-card-note bad", role: "alert" }, h("b", {}, remote ? "There is no server to answer. " : "The model is not running. "), state.error ?? "It stopped. Your next message starts it again; the conversations are safe."),
    );
  } else if (engine !== "ready") {
    parts.push(h("div", { class: "lp-card-note" }, h("b", {}, remote ? "The server is being asked for its model. " : "The model is loading. "), "You can write already; the answer starts as soon as it is there."));
  }
  parts.push(
    h("div", { class: "lp-ideas" }, ...IDEAS.map((idea) => h("button", { type: "button", onclick: () => use(idea) }, idea))),
  );
  if (state?.is_default_model) {
    parts.push(
      h(
        "div",
        { class: "lp-card-note" },
        h("b", {}, `${state.model?.name ?? "The embedded model"} is very small. `),
        "It comes with localpaged so that everything can be tried at once, and it gets many things wrong. For answers worth keeping:",
        ...BETTER.map(([text, note]) => command(text, note)),
      ),
    );
  }
  return h("div", { class: "lp-empty" }, ...parts);
}

/** A conversation that is not there. */
export function missingPage(message, fresh) {
  return h(
    "div",
    { class: "lp-empty" },
    h("h2", {}, "This conversation cannot be shown"),
    h("p", {}, message),
    h("p", {}, h("button", { class: "lp-btn", type: "button", onclick: fresh }, "New conversation")),
  );
}
