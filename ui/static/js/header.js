// The line on top: title, model, how full the window is, and the controls of the page.

import { h, icon } from "./dom.js";
import { t } from "./i18n.js";
import { inlineEdit } from "./inline_edit.js";

export class Header {
  /** actions: {toggleList, toggleSide, stopAll, rename(title)}. */
  constructor(actions) {
    this.actions = actions;
    this.shown = ""; // the title; empty before there is one
    this.titleButton = h("button", { class: "lp-title", type: "button", dir: "auto", onclick: () => this.editTitle() });
    this.title = h("h1", {}, this.titleButton);
    this.chip = h("span", { class: "lp-chip" });
    this.counts = h("span", { class: "lp-counts" });
    this.history = h("i", { class: "history" });
    this.draft = h("i", { class: "draft" });
    this.reply = h("i", { class: "reply" });
    this.bar = h("div", { class: "lp-bar" }, this.history, this.draft, this.reply);
    this.percent = h("span", { class: "lp-percent" });
    this.meter = h("div", { class: "lp-meter", role: "img" }, this.counts, this.bar, this.percent);
    this.meter.hidden = true; // until something is counted
    this.stopAll = h("button", { class: "lp-btn ghost lp-stop-all", type: "button", onclick: () => actions.stopAll() }, t("head.stop"));
    const tool = (name, picture, run, extra = "") =>
      h("button", { class: `lp-tool ${extra}`, type: "button", title: name, "aria-label": name, onclick: run }, icon(picture));
    this.element = h(
      "header",
      { class: "lp-head" },
      tool(t("list.name"), "menu", () => actions.toggleList(), "lp-open-list"),
      this.title,
      this.chip,
      this.meter,
      this.stopAll,
      tool(t("head.theme"), "sun", () => globalThis.localpagedPreferences.toggleTheme()),
      tool(t("head.side"), "sliders", () => actions.toggleSide(), "lp-open-side"),
    );
    this.setTitle("", false);
    this.stopAll.hidden = true;
  }

  /** editable: there is a conversation that can be named. */
  setTitle(title, editable) {
    this.shown = title;
    this.editable = editable;
    const text = title || t("app.untitled");
    this.titleButton.textContent = text;
    this.titleButton.title = `${text}\n${t("head.rename")}`;
    if (!this.title.contains(document.activeElement)) this.showTitle();
    document.title = title ? `${title} – localpaged` : "localpaged";
  }

  showTitle() {
    const plain = h("span", { class: "lp-title", dir: "auto" }, t("app.untitled"));
    this.title.replaceChildren(this.editable ? this.titleButton : plain);
  }

  editTitle() {
    const field = inlineEdit({
      value: this.shown,
      label: t("row.title"),
      save: (title) => this.actions.rename(title),
      done: (byKey) => {
        this.showTitle();
        if (byKey) this.titleButton.focus();
      },
    });
    this.title.replaceChildren(field);
  }

  /** state: /api/state. */
  setModel(state) {
    const { model, engine } = state ?? {};
    const dead = engine === "dead";
    const remote = state?.features?.kv === false;
    document.body.classList.toggle("lp-remote", remote);
    this.chip.className = dead ? "lp-chip bad" : "lp-chip";
    if (dead) this.chip.textContent = t(remote ? "head.away" : "head.stopped");
    else if (engine === "ready" && remote) {
      this.chip.textContent = `${model.name} · ${new URL(model.address).host}`;
      const { name, address, max_model_len: n } = model;
      this.chip.title = t(n ? "head.remote.window" : "head.remote", { name, address, n });
      return;
    } else if (engine === "ready" && model) {
      const device = { cpu: "CPU", cuda: "GPU" }[model.device.split(":")[0]] ?? model.device;
      this.chip.textContent = `${model.name} · ${device}`;
      this.chip.title = t("head.model", { ...model, n: model.max_model_len });
      return;
    } else this.chip.textContent = t(remote ? "head.asking" : "head.loading");
    this.chip.title = state?.error ?? this.chip.textContent;
  }

  /** Tokens of the window: what is there (null: not known), what is being written, what an answer may take. */
  setWindow({ history, draft, reply, window }) {
    this.meter.hidden = !window || history === null;
    if (this.meter.hidden) return;
    const used = history + (draft ?? 0);
    const room = Math.max(0, window - used);
    const answer = Math.min(reply ?? room, room);
    const part = (value) => `${Math.min(100, (100 * value) / window)}%`;
    this.history.style.width = part(history);
    this.draft.style.width = part(draft ?? 0);
    this.reply.style.width = part(answer);
    const over = used >= window;
    this.meter.classList.toggle("over", over);
    this.counts.textContent = over
      ? t("head.over", { n: used - window + 1 })
      : t("head.counts", { history, draft: draft ?? "…", reply: answer });
    const filled = Math.round((100 * (used + answer)) / window);
    this.percent.textContent = t("head.percent", { percent: filled, window });
    const label = t("head.meter", { history, draft: draft ?? 0, reply: answer, window });
    this.meter.setAttribute("aria-label", label);
    this.meter.title = label;
  }
}
