// One answer as a column: its letter and state, its text, its figures, and what can be done with it.

import { copyText, h, icon, rate, seconds } from "./dom.js";
import { t } from "./i18n.js";
import { MarkdownText } from "./markdown.js";

export const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
const FINISH = ["length", "cancelled", "error"];

export class Candidate {
  /** message: as the API gives it. place: its place in the deck. actions: {choose, stop, focusNext}. */
  constructor(message, place, actions) {
    this.message = message;
    this.place = place;
    this.actions = actions;
    this.figures = { ...(message.timings ?? {}) };
    this.phase = "queued";
    this.prefill = null;
    this.follows = true;

    this.state = h("span", { class: "lp-card-state" });
    this.sub = h("span", { class: "lp-card-sub" });
    this.describe();
    this.body = h("div", { class: "lp-card-body lp-md", tabindex: "-1" });
    this.numbers = h("div", { class: "lp-card-numbers" });
    this.bar = h("div", { class: "lp-share" }, h("i", { class: "shared" }), h("i", { class: "own" }));
    this.blocks = h("div", { class: "lp-card-blocks" });
    this.chooseButton = h(
      "button",
      { class: "lp-btn primary", type: "button", onclick: () => actions.choose(this) },
      t("deck.choose"),
      h("kbd", {}, String(place + 1)),
    );
    this.stopButton = h("button", { class: "lp-btn", type: "button", onclick: () => actions.stop(this) }, t("write.stop"));
    this.copyButton = h("button", { class: "lp-btn ghost", type: "button", title: t("app.copy"), "aria-label": t("app.copy") }, icon("copy"));
    this.copyButton.addEventListener("click", () => copyText(this.text.text, this.copyButton));
    this.element = h(
      "section",
      {
        class: "lp-card",
        tabindex: "0",
        "aria-label": t("deck.card", { letter: LETTERS[place] }),
        style: `--k: var(--c${place % 8})`,
      },
      h("header", { class: "lp-card-head" }, h("b", {}, LETTERS[place]), this.sub, this.state),
      this.body,
      h("footer", { class: "lp-card-foot" }, this.numbers, this.bar, this.blocks),
      h("div", { class: "lp-card-actions" }, this.chooseButton, this.stopButton, this.copyButton),
    );
    this.text = new MarkdownText(this.body);
    this.text.onGrow = () => this.keepTheEndInView();
    this.body.addEventListener("scroll", () => {
      this.follows = this.body.scrollHeight - this.body.scrollTop - this.body.clientHeight < 30;
    });
    if (message.text) this.text.append(message.text);
    if (!this.running) this.text.finish();
    this.show();
  }

  get running() {
    return this.message.state === "running";
  }

  describe() {
    const sampling = this.message.sampling ?? {};
    this.sub.textContent = sampling.seed === undefined || sampling.seed === null ? "" : t("card.seed", { n: String(sampling.seed) });
    const parts = Object.entries(sampling).map(([name, value]) => `${name.replaceAll("_", " ")} ${value ?? t("card.none")}`);
    this.sub.title = parts.join(", ");
  }

  /** Take a snapshot or a step of the job's event stream. */
  take(part, whole) {
    if (whole) this.text.set(part.text);
    else this.text.append(part.text);
    this.figures = {
      ...this.figures,
      num_tokens: part.tokens,
      tokens_per_s: part.tps,
      ttft_s: part.ttft,
      num_shared_blocks: part.shared,
      num_own_blocks: part.own,
    };
    if (part.state !== "running") {
      this.message = { ...this.message, state: part.state, finish_reason: part.finish, error: part.error };
      this.text.finish();
    }
    this.show();
  }

  /** Take the message as the server stored it. */
  update(message) {
    const wasRunning = this.running;
    this.message = message;
    this.describe();
    if (message.state === "running") return;
    this.figures = { ...this.figures, ...(message.timings ?? {}) };
    this.text.set(message.text);
    if (wasRunning) this.text.finish();
    this.show();
  }

  setPhase(phase, prefill) {
    this.phase = phase;
    this.prefill = prefill;
    this.show();
  }

  label() {
    const { state, finish_reason: finish } = this.message;
    if (state === "error" || state === "interrupted") return t(`state.${state}`);
    if (state === "complete") return t(`state.${FINISH.includes(finish) ? finish : "done"}`);
    if (this.phase === "loading") return t("state.loading");
    if (this.phase === "prefill" && this.prefill?.total) {
      return t("state.prefill.part", { n: Math.floor((100 * this.prefill.computed) / this.prefill.total) });
    }
    if (this.phase === "prefill" && this.prefill?.total === null) return t("state.waiting"); // for another server
    return t(`state.${["decoding", "prefill"].includes(this.phase) ? this.phase : "queued"}`);
  }

  show() {
    // Another server may not count its tokens: null.
    const { num_tokens: tokens, tokens_per_s: speed, ttft_s: first } = this.figures;
    const shared = this.figures.num_shared_blocks ?? 0;
    const own = this.figures.num_own_blocks ?? 0;
    const label = this.label();
    if (this.state.textContent !== label) this.state.textContent = label;
    this.element.dataset.state = this.running ? (this.phase === "decoding" ? "decoding" : "waiting") : this.message.state;
    this.numbers.replaceChildren(
      h("span", {}, tokens ? `${t("card.tokens", { n: tokens })}${speed ? ` · ${rate(speed)}` : ""}` : "\u00a0"),
      h("span", {}, first ? t("unit.first", { time: seconds(first) }) : ""),
    );
    const total = shared + own;
    this.bar.style.setProperty("--shared-part", total ? `${(100 * shared) / total}%` : "0%");
    this.bar.style.setProperty("--own-part", total ? `${(100 * own) / total}%` : "0%");
    this.blocks.textContent = total ? t("card.blocks", { shared, own }) : "\u00a0";
    this.stopButton.hidden = !this.running;
    this.chooseButton.classList.toggle("primary", !this.running);
    this.copyButton.hidden = !this.text.text && !tokens;
    this.chooseButton.hidden = !this.message.text && !this.text.text;
    this.showProblem();
  }

  /** What went wrong with this answer; null when nothing did. */
  problem() {
    if (this.message.state !== "error" && this.message.state !== "interrupted") return null;
    return this.message.error ?? t("talk.interrupted.card");
  }

  showProblem() {
    const text = this.saidElsewhere ? null : this.problem();
    this.note?.remove();
    this.note = text ? h("p", { class: "lp-problem" }, text) : null;
    if (this.note) this.body.append(this.note);
  }

  keepTheEndInView() {
    if (this.running && this.follows) this.body.scrollTop = this.body.scrollHeight;
  }
}
