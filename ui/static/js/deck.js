// The answers to one message side by side, while they are written and until one is chosen.

import { announce, bytes, h } from "./dom.js";
import { t } from "./i18n.js";
import { Candidate } from "./candidate.js";

/** The answers that belong together: those of the latest request, at the end of the list. */
export function latestOf(messages) {
  const begin = messages.findLastIndex((message) => message.candidate === 0);
  return begin > 0 ? messages.slice(begin) : messages;
}

export class Deck {
  /** messages: the answers shown. hidden: how many earlier ones are not. actions: what buttons do. */
  constructor(messages, { hidden = 0, actions, server }) {
    this.actions = actions;
    this.server = server;
    this.cards = messages.map((message, place) => new Candidate(message, place, actions));
    this.grid = h(
      "div",
      { class: "lp-deck", "data-n": String(messages.length), role: "group", "aria-label": t("deck.name") },
      ...this.cards.map((card) => card.element),
    );
    this.note = h("b", {});
    this.share = h("span", {});
    this.saved = h("span", { class: "lp-saved" });
    this.hint = h("span", { class: "lp-deck-hint" });
    this.earlier = h(
      "button",
      { class: "lp-btn ghost", type: "button", onclick: () => actions.showEarlier() },
      t("deck.earlier", { n: hidden }),
    );
    this.earlier.hidden = !hidden;
    this.again = h("button", { class: "lp-btn ghost", type: "button", onclick: () => actions.regenerate() }, t("talk.again"));
    this.summary = h(
      "div",
      { class: "lp-summary" },
      this.note,
      this.share,
      this.saved,
      h("span", { class: "lp-gap" }),
      this.hint,
      this.earlier,
      this.again,
    );
    this.problem = null;
    this.element = h("div", { class: messages.length === 1 ? "lp-deck-frame solo" : "lp-deck-frame" }, this.grid, this.summary);
    this.grid.addEventListener("keydown", (event) => this.moveFocus(event));
    this.show();
  }

  get running() {
    return this.cards.some((card) => card.running);
  }

  /** Apply an event of the stream of a job on these messages. Returns whether it was the last. */
  take(event, messages) {
    const card = (part) => this.cards.find((one) => one.message.id === messages[part.i]);
    if (event.type === "snapshot") {
      this.prefill = event.prefill;
      for (const part of event.candidates) card(part)?.take(part, true);
      this.setPhase(event.phase);
    } else if (event.type === "phase") {
      this.setPhase(event.phase);
    } else if (event.type === "prefill") {
      this.prefill = event;
      this.setPhase(this.phase);
    } else if (event.type === "tokens") {
      for (const part of event.candidates) card(part)?.take(part, false);
    }
    this.show();
    return event.type === "done" || (event.type === "snapshot" && event.phase === "done");
  }

  /** Take what the server stored of the same answers. */
  update(messages) {
    messages.forEach((message, place) => this.cards[place].update(message));
    this.show();
  }

  /** Stand in the phase of a deck that showed the same job. */
  goOnFrom({ phase, prefill }) {
    this.prefill = prefill;
    if (phase) this.setPhase(phase);
  }

  setPhase(phase) {
    this.phase = phase;
    for (const card of this.cards) if (card.running) card.setPhase(phase, this.prefill);
  }

  show() {
    const running = this.running;
    const count = this.cards.length;
    this.showProblem();
    this.note.textContent = t(this.server.remote ? "answers" : "deck.prefill", { n: count });
    const shared = Math.max(0, ...this.cards.map((card) => card.figures.num_shared_blocks ?? 0));
    const own = this.cards.reduce((sum, card) => sum + (card.figures.num_own_blocks ?? 0), 0);
    const alone = this.cards.reduce(
      (sum, card) => sum + (card.figures.num_shared_blocks ?? 0) + (card.figures.num_own_blocks ?? 0),
      0,
    );
    const saved = alone - own - shared;
    this.share.textContent = saved > 0 ? t("deck.shared", { n: Math.round((100 * (alone - own)) / alone) }) : "";
    const each = this.server.kv?.bytes_per_block;
    this.saved.textContent = saved > 0 && each ? t("deck.saved", { size: bytes(saved * each) }) : "";
    this.again.hidden = running;
    this.hint.textContent = running || count < 2 ? "" : t(innerWidth < 600 ? "deck.hint.short" : "deck.hint", { n: count });
    this.grid.classList.toggle("open", !running);
  }

  /** What went wrong with all of them is said once, below them. */
  showProblem() {
    const problems = new Set(this.cards.map((card) => card.problem()));
    const [first] = problems;
    const same = this.cards.length > 1 && problems.size === 1 ? first : null;
    if (same === this.problem) return;
    this.problem = same;
    this.trouble?.remove();
    this.trouble = same && h("p", { class: "lp-problem", role: "alert" }, same);
    if (same) this.summary.before(this.trouble);
    for (const card of this.cards) {
      card.saidElsewhere = Boolean(same);
      card.showProblem();
    }
  }

  /** Say once that all answers are there. */
  announceEnd() {
    const failed = this.cards.filter((card) => card.message.state === "error").length;
    announce(failed ? t("deck.failed", { n: failed }) : t("deck.complete", { n: this.cards.length }));
  }

  cardOf(key) {
    return this.cards[Number(key) - 1] ?? null;
  }

  focusFirst() {
    this.cards[0]?.element.focus();
    this.grid.scrollIntoView({ block: "nearest" });
  }

  moveFocus(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const place = this.cards.findIndex((card) => card.element === event.target);
    if (!step || place < 0) return;
    event.preventDefault();
    this.cards[(place + step + this.cards.length) % this.cards.length].element.focus();
  }
}
