// What the middle of the page says while there is nothing to show yet.

import { copyText, h } from "./dom.js";
import { t } from "./i18n.js";

const BETTER = [
  ["localpaged pull Qwen/Qwen3-0.6B", "empty.pull"],
  ["localpaged serve --model Qwen/Qwen3-0.6B", "empty.start"],
];

function command(text, note) {
  const copy = h("button", { class: "lp-code-copy", type: "button", "aria-label": t("app.copy.text", { text }) }, t("app.copy"));
  copy.addEventListener("click", () => copyText(text, copy));
  return h("div", { class: "lp-command" }, h("code", {}, text), h("span", {}, note), copy);
}

/** The page without a conversation. state: /api/state or null. */
export function emptyPage(state, use) {
  const engine = state?.engine;
  const remote = state?.features?.kv === false;
  const parts = [
    h("h2", {}, t("empty.title")),
    h("p", {}, t(remote ? "empty.text.remote" : "empty.text")),
  ];
  if (engine === "dead") {
    parts.push(
      h("div", { class: "lp-card-note bad", role: "alert" }, h("b", {}, t(remote ? "empty.away" : "empty.dead")), state.error ?? t("empty.dead.text")),
    );
  } else if (engine !== "ready") {
    parts.push(h("div", { class: "lp-card-note" }, h("b", {}, t(remote ? "empty.asking" : "empty.loading")), t("empty.already")));
  }
  parts.push(
    h("div", { class: "lp-ideas" }, ...[1, 2, 3, 4].map((place) => t(`empty.idea.${place}`)).map((idea) => h("button", { type: "button", onclick: () => use(idea) }, idea))),
  );
  if (state?.is_default_model) {
    parts.push(
      h(
        "div",
        { class: "lp-card-note" },
        h("b", {}, t("empty.small", { name: state.model?.name ?? t("empty.embedded") })),
        t("empty.small.text"),
        ...BETTER.map(([text, note]) => command(text, t(note))),
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
    h("h2", {}, t("empty.missing")),
    h("p", {}, message),
    h("p", {}, h("button", { class: "lp-btn", type: "button", onclick: fresh }, t("list.new"))),
  );
}
