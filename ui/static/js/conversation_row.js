// One conversation in the list: its title, where its KV is, what a search found in it, and its menu.

import { h, icon } from "./dom.js";
import { t } from "./i18n.js";

export const titleOf = (one) => one.title || t("app.untitled");

/** one: as the API lists it. on: {open(id, message), menu(one, place)}. */
export function conversationRow(one, current, on) {
  const title = titleOf(one);
  const kept = one.running ? "running" : one.kv;
  const dot = kept && h("i", { class: `lp-dot ${kept}`, role: "img", title: t(`kv.${kept}`), "aria-label": t(`kv.${kept}`) });
  const name = h("span", { class: "lp-row-title", dir: "auto" }, ...(one.marked_title ? marked(one.marked_title) : [title]));
  const open = h(
    "button",
    { class: "lp-row-open", type: "button", title, "data-key": `open-${one.id}`, tabindex: "-1", "aria-current": current ? "page" : null, onclick: () => on.open(one.id) },
    name,
    dot ?? h("i", { class: "lp-dot" }),
  );
  const more = h(
    "button",
    { class: "lp-tool lp-row-menu", type: "button", title: t("list.more"), "aria-label": t("list.menu", { title }), "aria-haspopup": "menu", "data-key": `menu-${one.id}`, tabindex: "-1" },
    icon("more"),
  );
  more.addEventListener("click", () => on.menu(one, more.getBoundingClientRect(), more));
  const hits = one.hits.map((hit) =>
    h("button", { class: "lp-hit", type: "button", dir: "auto", "data-key": `hit-${hit.message}`, tabindex: "-1", onclick: () => on.open(one.id, hit.message) }, ...marked(plain(hit.snippet))),
  );
  const unseen = one.num_hits - one.hits.length;
  const row = h(
    "li",
    { class: current ? "lp-row on" : "lp-row", "data-id": String(one.id) },
    open,
    more,
    ...hits,
    unseen > 0 && h("p", { class: "lp-unseen" }, t("list.hits", { n: unseen })),
  );
  row.addEventListener("contextmenu", (event) => {
    event.preventDefault();
    // By the keyboard's menu key there is no place of the pointer.
    const byKey = event.button !== 2 || (event.clientX === 0 && event.clientY === 0);
    const { clientX: left, clientY: bottom } = event;
    on.menu(one, byKey ? more.getBoundingClientRect() : { left, bottom, top: bottom }, event.target.closest("[data-key]") ?? open);
  });
  return row;
}

const BEFORE_CHARS = 24; // so that what matched is within the two lines

/** Without the marks of Markdown, and from shortly before what matched. */
function plain(text) {
  const line = text.replace(/\*\*|`+|(^|\n)#+ /g, "$1").replace(/\s+/g, " ");
  const match = line.indexOf("\u0002");
  if (match <= BEFORE_CHARS) return line;
  const begin = match - BEFORE_CHARS;
  const space = line.indexOf(" ", begin);
  return `…${line.slice(space > 0 && space < match ? space + 1 : begin)}`;
}

/** What matched stands between the marks that the server sets. */
function marked(text) {
  return text.split(/[\u0002\u0003]/).map((part, place) => (place % 2 ? h("mark", {}, part) : part));
}
