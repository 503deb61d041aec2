// The conversations on the left: search, groups, the row that the keyboard is on, and what is at the foot.

import * as api from "./api.js";
import { ConversationCommands } from "./conversation_commands.js";
import { conversationRow } from "./conversation_row.js";
import { announce, h, icon, toast } from "./dom.js";
import { t } from "./i18n.js";
import { inlineEdit } from "./inline_edit.js";
import { openMenu } from "./menu.js";
import { chooseFile, dropFiles, exportAll } from "./transfer.js";

export class ConversationList {
  /** actions: {open(id, message), fresh(), renamed(conversation), removed(id), settings()}. */
  constructor(actions) {
    this.actions = actions;
    this.current = null;
    this.conversations = null; // until they are known
    this.total = 0;
    this.drawn = new Map(); // rows by id
    this.showsArchived = false;
    this.editing = false;
    this.active = null; // the key of the row that Tab leads to
    this.commands = new ConversationCommands({
      changed: () => this.refresh(),
      rename: (one) => this.rename(one),
      open: actions.open,
      removed: actions.removed,
    });
    this.transfer = { changed: () => this.refresh(), open: actions.open };
    this.search = h("input", {
      class: "lp-search",
      type: "search",
      "aria-label": t("list.search.label"),
      placeholder: t("list.search"),
      autocomplete: "off",
      oninput: () => this.searchSoon(),
    });
    this.rows = h("div", { class: "lp-rows" });
    const transfer = h("button", { class: "lp-tool", type: "button", title: t("list.transfer"), "aria-label": t("list.transfer"), "aria-haspopup": "menu" }, icon("transfer"));
    transfer.addEventListener("click", () => this.transferMenu(transfer));
    this.element = h(
      "nav",
      { class: "lp-left", "aria-label": t("list.name") },
      h("div", { class: "lp-brand" }, h("span", {}, "localpaged"), h("kbd", { title: t("list.search") }, /Mac/.test(navigator.platform) ? "⌘K" : "Ctrl K")),
      h("button", { class: "lp-btn lp-new", type: "button", onclick: () => actions.fresh() }, icon("plus"), t("list.new")),
      this.search,
      this.rows,
      h("div", { class: "lp-foot" }, h("button", { class: "lp-btn ghost", type: "button", onclick: () => actions.settings() }, icon("gear"), t("settings.title")), transfer),
      h("div", { class: "lp-drop", "aria-hidden": "true" }, t("list.drop")),
    );
    this.search.addEventListener("keydown", (event) => this.searchKey(event));
    this.rows.addEventListener("keydown", (event) => this.rowKey(event));
    this.rows.addEventListener("focusin", (event) => this.activate(event.target.closest("[data-key]")));
    dropFiles(this.element, this.transfer);
  }

  transferMenu(button) {
    const items = [
      { label: t("transfer.import"), picture: "load", run: () => chooseFile(this.transfer) },
      null,
      { label: t("transfer.json"), picture: "save", run: () => exportAll("json") },
      { label: t("transfer.markdown"), picture: "save", run: () => exportAll("markdown") },
    ];
    openMenu({ items, label: t("list.transfer"), at: button.getBoundingClientRect(), back: () => button.focus() });
  }

  // Searching

  searchSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(async () => {
      await this.refresh();
      if (this.search.value.trim()) announce(t("list.found", { n: this.conversations?.length ?? 0 }));
    }, 120);
  }

  clear() {
    this.search.value = "";
    this.search.focus();
    this.refresh();
  }

  async refresh() {
    const query = this.search.value.trim();
    let found;
    try {
      found = await api.listConversations(query);
    } catch {
      return; // The banner says that the server is away.
    }
    if (query !== this.search.value.trim()) return;
    this.search.placeholder = found.total ? t("list.search.in", { n: found.total }) : t("list.search");
    this.conversations = found.conversations;
    this.total = found.total;
    this.draw();
  }

  // Drawing

  draw() {
    if (this.conversations === null || this.editing) return;
    const query = this.search.value.trim();
    // Rows that stay are moved, which takes the focus from them.
    const { activeElement } = document;
    const had = this.rows.contains(activeElement) ? (activeElement.dataset.key ?? "") : null;
    const place = this.stops().indexOf(activeElement);
    const midnight = new Date().setHours(0, 0, 0, 0) / 1000;
    const groups = [
      ["pinned", (one) => one.pinned && !one.archived],
      ["today", (one) => !one.archived && one.updated >= midnight],
      ["yesterday", (one) => !one.archived && one.updated >= midnight - 86400],
      ["earlier", (one) => !one.archived],
      ["archived", () => true],
    ];
    const rest = new Set(this.conversations);
    const before = this.drawn;
    this.drawn = new Map();
    const elements = [];
    for (const [name, belongs] of groups) {
      const members = [...rest].filter(belongs);
      for (const one of members) rest.delete(one);
      if (members.length) elements.push(this.group(name, members, before, Boolean(query)));
    }
    if (!elements.length) elements.push(...this.nothing(query));
    const unseen = query ? 0 : this.total - this.conversations.length;
    if (unseen > 0) elements.push(h("p", { class: "lp-none" }, t("list.rest", { n: unseen })));
    this.replace(elements, had, place);
  }

  group(name, members, before, searching) {
    const id = `lp-group-${name}`;
    const folds = name === "archived" && !searching;
    const open = !folds || this.showsArchived;
    const heading = folds
      ? h(
          "button",
          { type: "button", "aria-expanded": String(open), "aria-controls": `${id}-rows`, "data-key": "archived", tabindex: "-1", onclick: () => this.fold() },
          icon("right"),
          `${t("list.archived")} `,
          h("span", {}, String(members.length)),
        )
      : t(`list.${name}`);
    const rows = h("ul", { id: `${id}-rows`, "aria-labelledby": id }, ...(open ? members.map((one) => this.row(one, before)) : []));
    rows.hidden = !open;
    return h("section", {}, h("h2", { class: "lp-group", id }, heading), rows);
  }

  row(one, before) {
    const current = one.id === this.current;
    const key = JSON.stringify([one, current]);
    const same = before.get(one.id);
    const drawn =
      same?.key === key
        ? same
        : {
            key,
            element: conversationRow(one, current, {
              open: this.actions.open,
              menu: (one, at, from) => this.commands.menu(one, at, () => this.focus(from.dataset.key)),
            }),
          };
    this.drawn.set(one.id, drawn);
    return drawn.element;
  }

  nothing(query) {
    if (!query) return [h("p", { class: "lp-none" }, t("list.empty"))];
    return [
      h("p", { class: "lp-none" }, t("list.nothing", { query }), h("br"), h("small", {}, t("list.nothing.hint"))),
      h("button", { class: "lp-btn lp-clear", type: "button", onclick: () => this.clear() }, t("list.clear")),
    ];
  }

  /** Put what is drawn in its place. had: the key that had the focus, which it keeps, or what is at its place; null: none. */
  replace(elements, had, place) {
    const top = this.rows.scrollTop;
    this.rows.replaceChildren(...elements);
    this.rows.scrollTop = top;
    const stops = this.stops();
    const wanted = this.find(this.active) ?? this.find(`open-${this.current}`) ?? stops[0];
    this.activate(wanted);
    if (had !== null) (this.find(had) ?? stops[Math.min(Math.max(place, 0), stops.length - 1)] ?? this.search).focus({ preventScroll: true });
  }

  fold() {
    this.showsArchived = !this.showsArchived;
    this.draw();
  }

  // The keyboard: Tab leads to one row and its menu, the arrows to the others

  /** What the arrows go through. */
  stops() {
    return [...this.rows.querySelectorAll(".lp-row-open, .lp-hit, .lp-group button")];
  }

  find(key) {
    return key ? this.rows.querySelector(`[data-key="${key}"]`) : null;
  }

  focus(key) {
    (this.find(key) ?? this.search).focus();
  }

  activate(element) {
    if (!element) return;
    this.active = element.dataset.key;
    for (const one of this.rows.querySelectorAll('[tabindex="0"]')) one.tabIndex = -1;
    element.tabIndex = 0;
    const row = element.closest(".lp-row");
    for (const one of row?.querySelectorAll(".lp-row-open, .lp-row-menu") ?? []) one.tabIndex = 0;
  }

  async searchKey(event) {
    if (event.isComposing) return;
    if (event.key === "Escape" && this.search.value) {
      event.stopPropagation();
      this.clear();
    } else if (event.key === "ArrowDown") {
      event.preventDefault();
      this.stops()[0]?.focus();
    } else if (event.key === "Enter") {
      // The list may be behind what was just typed.
      await this.refresh();
      if (this.search.value.trim()) this.stops()[0]?.click();
    }
  }

  rowKey(event) {
    if (event.target.closest("input") || event.ctrlKey || event.metaKey || event.altKey) return;
    const stops = this.stops();
    const row = event.target.closest(".lp-row");
    const one = row && this.conversations.find((each) => String(each.id) === row.dataset.id);
    const main = row?.querySelector(".lp-row-open");
    const place = stops.indexOf(stops.includes(event.target) ? event.target : main);
    const to = { ArrowDown: place + 1, ArrowUp: place - 1, Home: 0, End: stops.length - 1 }[event.key];
    if (to !== undefined) (to < 0 ? this.search : stops[Math.min(to, stops.length - 1)]).focus();
    else if (event.key === "ArrowRight" && row) row.querySelector(".lp-row-menu").focus();
    else if (event.key === "ArrowLeft" && row) main.focus();
    else if (event.key === "F2" && one) this.rename(one);
    else if (event.key === "Delete" && one) this.commands.remove(one);
    else return;
    event.preventDefault();
  }

  rename(one) {
    const row = this.drawn.get(one.id)?.element;
    if (!row?.isConnected) return;
    this.editing = true;
    const field = inlineEdit({
      value: one.title,
      label: t("row.title"),
      save: async (title) => {
        try {
          this.actions.renamed(await api.changeConversation(one.id, { title }));
        } catch (error) {
          toast(error.message);
        }
      },
      done: (byKey) => {
        this.editing = false;
        this.drawn.delete(one.id);
        this.draw();
        if (byKey) this.focus(`open-${one.id}`);
        this.refresh();
      },
    });
    field.dataset.key = `open-${one.id}`; // which gets the focus next
    row.replaceChildren(field);
  }
}
