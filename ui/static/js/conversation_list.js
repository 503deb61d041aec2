// The conversations on the left: search, rename, pin, delete with a way back.

import * as api from "./api.js";
import { count, h, icon, toast } from "./dom.js";

/** Where a conversation's keys and values are, and what that means for its next message. */
const KEPT = {
  host: "In memory: the next message computes only what is new",
  disk: "On disk: read in when it is opened",
  none: "Not kept: the next message computes it again",
};

export class ConversationList {
  /** actions: {open(id), fresh(), renamed(conversation), removed(id)}. */
  constructor(actions) {
    this.actions = actions;
    this.current = null;
    this.search = h("input", {
      class: "lp-search",
      type: "search",
      "aria-label": "Search conversations",
      placeholder: "Search",
      autocomplete: "off",
      oninput: () => this.searchSoon(),
    });
    this.rows = h("div", { class: "lp-rows" });
    this.element = h(
      "nav",
      { class: "lp-left", "aria-label": "Conversations" },
      h("div", { class: "lp-brand" }, h("span", {}, "localpaged"), h("kbd", { title: "Search" }, /Mac/.test(navigator.platform) ? "⌘K" : "Ctrl K")),
      h("button", { class: "lp-btn lp-new", type: "button", onclick: () => actions.fresh() }, icon("plus"), "New conversation"),
      this.search,
      this.rows,
    );
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        this.search.value = "";
        this.refresh();
        this.search.blur();
      }
    });
  }

  searchSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.refresh(), 120);
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
    this.search.placeholder = found.total ? `Search ${count(found.total)} conversation${found.total === 1 ? "" : "s"}` : "Search";
    this.conversations = found.conversations;
    this.draw(query);
  }

  draw(query = this.search.value.trim()) {
    const midnight = new Date().setHours(0, 0, 0, 0) / 1000;
    const groups = [
      ["Pinned", (one) => one.pinned],
      ["Today", (one) => one.updated >= midnight],
      ["Yesterday", (one) => one.updated >= midnight - 86400],
      ["Earlier", () => true],
    ];
    const rest = new Set(this.conversations ?? []);
    const elements = [];
    for (const [name, belongs] of groups) {
      const members = [...rest].filter(belongs);
      if (!members.length) continue;
      elements.push(h("h2", { class: "lp-group" }, name));
      for (const one of members) {
        rest.delete(one);
        elements.push(this.row(one));
      }
    }
    if (!elements.length) {
      const text = query ? `Nothing matches “${query}”.` : "Your conversations will be listed here.";
      elements.push(h("p", { class: "lp-none" }, text));
    }
    this.rows.replaceChildren(...elements);
  }

  row(one) {
    const title = one.title || "New conversation";
    const name = h("span", { class: "lp-row-title", dir: "auto" }, title);
    const open = h(
      "button",
      { class: "lp-row-open", type: "button", title, "aria-current": one.id === this.current ? "page" : null, onclick: () => this.actions.open(one.id) },
      h("i", { class: `lp-dot ${one.running ? "on" : (one.kv ?? "none")}`, title: one.running ? "answering" : KEPT[one.kv] }),
      h("span", { class: "lp-row-text" }, name, one.snippet && !repeats(one.snippet, title) ? snippet(one.snippet) : null),
    );
    const tool = (label, picture, run) =>
      h("button", { type: "button", class: "lp-tool", title: label, "aria-label": `${label}: ${title}`, onclick: run }, icon(picture));
    const row = h(
      "div",
      { class: one.id === this.current ? "lp-row on" : "lp-row" },
      open,
      h(
        "span",
        { class: "lp-row-tools" },
        tool("Rename", "pencil", () => this.rename(row, open, one)),
        tool(one.pinned ? "Unpin" : "Pin", "pin", () => this.pin(one)),
        tool("Delete", "trash", () => this.remove(one)),
      ),
    );
    return row;
  }

  rename(row, open, one) {
    const field = h("input", { class: "lp-rename", "aria-label": "Title", maxlength: "300" });
    field.value = one.title;
    const done = async (keep) => {
      if (field.done) return;
      field.done = true;
      const title = field.value.trim();
      if (keep && title && title !== one.title) {
        try {
          this.actions.renamed(await api.changeConversation(one.id, { title }));
        } catch (error) {
          toast(error.message);
        }
      }
      this.refresh();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") done(true);
      if (event.key === "Escape") done(false);
    });
    field.addEventListener("blur", () => done(true));
    row.replaceChildren(field);
    field.focus();
    field.select();
  }

  async pin(one) {
    try {
      await api.changeConversation(one.id, { pinned: !one.pinned });
    } catch (error) {
      toast(error.message);
    }
    this.refresh();
  }

  async remove(one) {
    try {
      await api.deleteConversation(one.id);
    } catch (error) {
      toast(error.message);
      return;
    }
    this.actions.removed(one.id);
    this.refresh();
    toast(`Deleted “${(one.title || "New conversation").slice(0, 40)}”`, {
      label: "Undo",
      run: async () => {
        try {
          await api.restoreConversation(one.id);
          this.actions.open(one.id);
        } catch (error) {
          toast(error.message);
        }
        this.refresh();
      },
    });
  }
}

/** Whether a snippet says no more than the title above it. */
function repeats(text, title) {
  return text.replace(/[\u0002\u0003]/g, "").startsWith(title.replace(/…$/, ""));
}

/** What matched, between the marks that the server sets. */
function snippet(text) {
  const parts = text.split(/[\u0002\u0003]/).map((part, place) => (place % 2 ? h("mark", {}, part) : part));
  return h("span", { class: "lp-snippet", dir: "auto" }, ...parts);
}
