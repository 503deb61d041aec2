// Where a message is written: Enter sends, Shift+Enter makes a line. A draft outlives a reload.

import { h, icon } from "./dom.js";
import { t } from "./i18n.js";

export class Composer {
  /** actions: {send, stopAll, draft(text), openSettings, setCount}. */
  constructor(actions) {
    this.actions = actions;
    this.key = "draft:new";
    this.area = h("textarea", { class: "lp-write", rows: "1", dir: "auto", "aria-label": t("write.message") });
    this.number = h(
      "select",
      { class: "lp-btn", "aria-label": t("write.number"), onchange: () => actions.setCount(Number(this.number.value)) },
      ...[1, 2, 3, 4, 5, 6, 7, 8].map((n) => h("option", { value: String(n) }, t("answers", { n }))),
    );
    this.temperature = h("button", { class: "lp-btn ghost", type: "button", onclick: () => actions.openSettings() });
    this.price = h("span", { class: "lp-price" });
    this.sendButton = h("button", { class: "lp-btn primary", type: "submit" }, t("write.send"));
    this.stopButton = h("button", { class: "lp-btn", type: "button", onclick: () => actions.stopAll() }, icon("stop"), t("write.stop"));
    this.form = h(
      "form",
      { class: "lp-box" },
      this.area,
      h("div", { class: "lp-tools" }, this.number, this.temperature, this.price, this.stopButton, this.sendButton),
    );
    this.banner = h("div", { class: "lp-banner", role: "status" });
    this.banner.hidden = true;
    this.element = h("div", { class: "lp-composer" }, h("div", { class: "lp-composer-inner" }, this.banner, this.form));
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      actions.send(this.area.value);
    });
    this.area.addEventListener("input", () => this.changed());
    this.area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        actions.send(this.area.value);
      }
    });
    this.setMode({ running: false, choosing: 0, chosen: null });
  }

  changed() {
    this.fit();
    try {
      if (this.area.value) localStorage.setItem(this.key, this.area.value);
      else localStorage.removeItem(this.key);
    } catch {
      // A full or forbidden storage only costs the draft.
    }
    this.actions.draft(this.area.value);
  }

  fit() {
    this.area.style.height = "auto";
    this.area.style.height = `${Math.min(this.area.scrollHeight, innerHeight * 0.4)}px`;
  }

  /** Take up the draft of a conversation. */
  use(conversation) {
    this.key = `draft:${conversation ?? "new"}`;
    let draft = "";
    try {
      draft = localStorage.getItem(this.key) ?? "";
    } catch {
      // As above.
    }
    this.area.value = draft;
    this.fit();
    this.actions.draft(draft);
  }

  /** The draft was taken as a message of a conversation. */
  sent(conversation) {
    this.area.value = "";
    this.changed();
    this.key = `draft:${conversation}`;
  }

  setPrice(text, title = "") {
    this.price.textContent = text;
    this.price.title = title;
  }

  set(text) {
    this.area.value = text;
    this.changed();
    this.area.focus();
  }

  showSampling({ n, temperature }) {
    this.number.value = String(n);
    this.temperature.textContent = `T ${temperature}`;
    this.temperature.setAttribute("aria-label", t("write.temperature", { value: temperature }));
  }

  setMode({ running, choosing, chosen }) {
    this.sendButton.hidden = running;
    this.stopButton.hidden = !running;
    this.form.classList.toggle("choosing", choosing > 1 && !running);
    const keys = innerWidth < 600 ? "" : t("write.keys");
    this.area.placeholder = running
      ? t("write.answering")
      : choosing > 1
        ? t(innerWidth < 600 ? "write.choose" : "write.choose.key", { n: choosing })
        : chosen
          ? t("write.reply", { letter: chosen }) + keys
          : t("write.new") + keys;
  }

  setBanner(text, kind = "note") {
    this.banner.hidden = !text;
    this.banner.className = `lp-banner ${kind}`;
    if (this.banner.textContent !== text) this.banner.textContent = text ?? "";
  }

  nudge() {
    this.form.classList.remove("nudge");
    void this.form.offsetWidth;
    this.form.classList.add("nudge");
  }
}
