// The line on top: title, model, how full the window is, and the controls of the page.

import { count, h, icon } from "./dom.js";

export class Header {
  /** actions: {toggleList, toggleSide, stopAll, rename(title)}. */
  constructor(actions) {
    this.title = h("h1", { dir: "auto" }, "New conversation");
    this.chip = h("span", { class: "lp-chip" });
    this.counts = h("span", { class: "lp-counts" });
    this.history = h("i", { class: "history" });
    this.draft = h("i", { class: "draft" });
    this.reply = h("i", { class: "reply" });
    this.bar = h("div", { class: "lp-bar" }, this.history, this.draft, this.reply);
    this.percent = h("span", { class: "lp-percent" });
    this.meter = h("div", { class: "lp-meter", role: "img" }, this.counts, this.bar, this.percent);
    this.stopAll = h("button", { class: "lp-btn ghost lp-stop-all", type: "button", onclick: () => actions.stopAll() }, "Stop all");
    const tool = (name, picture, run, extra = "") =>
      h("button", { class: `lp-tool ${extra}`, type: "button", title: name, "aria-label": name, onclick: run }, icon(picture));
    this.element = h(
      "header",
      { class: "lp-head" },
      tool("Conversations", "menu", () => actions.toggleList(), "lp-open-list"),
      this.title,
      this.chip,
      this.meter,
      this.stopAll,
      tool("Light or dark", "sun", () => globalThis.localpagedTheme.toggle()),
      tool("Parameters and KV", "sliders", () => actions.toggleSide(), "lp-open-side"),
    );
    this.stopAll.hidden = true;
  }

  setTitle(title) {
    this.title.textContent = title || "New conversation";
    this.title.title = this.title.textContent;
    document.title = title ? `${title} – localpaged` : "localpaged";
  }

  /** state: /api/state. */
  setModel(state) {
    const { model, engine } = state ?? {};
    const dead = engine === "dead";
    const remote = state?.features?.kv === false;
    document.body.classList.toggle("lp-remote", remote);
    this.chip.className = dead ? "lp-chip bad" : "lp-chip";
    if (dead) this.chip.textContent = remote ? "Server not there" : "Model stopped";
    else if (engine === "ready" && remote) {
      this.chip.textContent = `${model.name} · ${new URL(model.address).host}`;
      const window = model.max_model_len ? `, window of ${count(model.max_model_len)} tokens` : "";
      this.chip.title = `${model.name} on the server at ${model.address}${window}`;
      return;
    } else if (engine === "ready" && model) {
      const device = { cpu: "CPU", cuda: "GPU" }[model.device.split(":")[0]] ?? model.device;
      this.chip.textContent = `${model.name} · ${device}`;
      this.chip.title = `${model.architecture}, ${model.dtype} on ${model.device}, window of ${count(model.max_model_len)} tokens`;
      return;
    } else this.chip.textContent = remote ? "Asking the server…" : "Loading the model…";
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
      ? `${count(used - window + 1)} tokens too many`
      : `history ${count(history)} · draft ${draft === null ? "…" : count(draft)} · reply ${count(answer)}`;
    const filled = Math.round((100 * (used + answer)) / window);
    this.percent.textContent = `${filled} % of ${count(window)}`;
    const label = `Context: history ${count(history)}, draft ${count(draft ?? 0)}, reply up to ${count(answer)} of ${count(window)} tokens`;
    this.meter.setAttribute("aria-label", label);
    this.meter.title = label;
  }
}
