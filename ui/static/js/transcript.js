// The chosen branch of a conversation, from its first message to the answers that are open.

import { copyText, h, icon, rate, seconds } from "./dom.js";
import { t } from "./i18n.js";
import { MarkdownText } from "./markdown.js";
import { LETTERS } from "./candidate.js";
import { Deck, latestOf } from "./deck.js";

/** The message that a new one would answer; undefined while a choice is open. view: as the API gives it, or null. */
export function leafOf(view) {
  if (!view?.turns.length) return null;
  if (view.open_candidates.length) return undefined;
  const last = view.turns.at(-1).message;
  return last.role === "assistant" ? last.id : last.parent;
}

export class Transcript {
  /** actions: {choose, stop, stopAll, regenerate, goOn, edit, switchTo, reopen, earlier, server}. */
  constructor(actions) {
    this.actions = actions;
    this.element = h("div", { class: "lp-thread", role: "log", "aria-live": "off", "aria-label": t("talk.name") });
    this.rows = new Map(); // what is drawn, by message id
    this.deck = null;
    this.allAnswers = false;
  }

  clear(...content) {
    this.rows.clear();
    this.deck = null;
    this.element.replaceChildren(...content);
  }

  /** Draw a view of the API, leaving alone what is the same as before. */
  show(view) {
    this.view = view;
    const elements = [];
    if (view.num_earlier) {
      elements.push(
        h(
          "button",
          { class: "lp-btn ghost lp-earlier", type: "button", onclick: () => this.actions.earlier() },
          t("talk.earlier", { n: view.num_earlier }),
        ),
      );
    }
    const { messages, hidden } = this.answers(view);
    const fresh = new Map();
    const inDeck = new Set(messages.map((message) => message.id));
    const figures = messages[0] ?? null;
    view.turns.forEach((turn, place) => {
      if (inDeck.has(turn.message.id)) return;
      const next = view.turns[place + 1]?.message ?? figures;
      const row = this.row(turn, next, view.num_earlier + place);
      fresh.set(turn.message.id, row);
      elements.push(row.element);
    });
    const key = messages.map((message) => message.id).join();
    if (!messages.length) {
      this.deck = null;
    } else if (this.deck?.key === key) {
      this.deck.update(messages);
    } else {
      const before = this.deck;
      this.deck = new Deck(messages, { hidden, actions: this.actions, server: this.actions.server });
      this.deck.key = key;
      // Of the same job, whose phase is not told again.
      if (before?.cards.some((card) => inDeck.has(card.message.id))) this.deck.goOnFrom(before);
    }
    if (this.deck) elements.push(this.deck.element);
    this.rows = fresh;
    this.element.replaceChildren(...elements);
  }

  /** Lay all answers side by side, those of earlier requests too. */
  showAll() {
    this.allAnswers = true;
    this.show(this.view);
  }

  /** What to keep on top: the question while several answers to it are side by side, or a page that is read from its beginning; else null. */
  anchor() {
    if (!this.deck) return this.element.querySelector(":scope > .lp-empty");
    if (this.deck.cards.length < 2) return null;
    return this.element.querySelector(":scope > .lp-turn.user:nth-last-child(2)");
  }

  /** The answers to lay side by side: the open ones, or a single one that is being written. */
  answers(view) {
    const open = view.open_candidates;
    if (open.length) {
      const messages = this.allAnswers ? open : latestOf(open);
      return { messages, hidden: open.length - messages.length };
    }
    const last = view.turns.at(-1)?.message;
    return { messages: last?.state === "running" ? [last] : [], hidden: 0 };
  }

  row(turn, next, place) {
    const { message } = turn;
    const timings = next?.role === "assistant" ? next.timings : null;
    const isLast = turn === this.view.turns.at(-1);
    const { state, text, finish_reason: finish } = message;
    const key = JSON.stringify([state, finish, text.length, turn.siblings, message.role === "user" && timings, isLast]);
    const before = this.rows.get(message.id);
    if (before?.key === key) return before;
    const element = message.role === "user" ? this.userRow(turn, timings, place) : this.answerRow(turn, isLast);
    return { key, element };
  }

  switcher(turn) {
    const ids = turn.siblings;
    if (ids.length < 2) return null;
    const place = ids.indexOf(turn.message.id);
    const go = (step) => () => this.actions.switchTo(ids[(place + step + ids.length) % ids.length]);
    const what = turn.message.role === "user" ? "version" : "answer";
    return h(
      "span",
      { class: "lp-switch", role: "group", "aria-label": t(`talk.${what}.place`, { place: place + 1, count: ids.length }) },
      h("button", { type: "button", "aria-label": t(`talk.${what}.previous`), onclick: go(-1) }, icon("left")),
      h("span", {}, `${place + 1} / ${ids.length}`),
      h("button", { type: "button", "aria-label": t(`talk.${what}.next`), onclick: go(1) }, icon("right")),
    );
  }

  userRow(turn, timings, place) {
    const { message } = turn;
    const bubble = h("div", { class: "lp-user", dir: "auto" }, message.text);
    const copy = h("button", { class: "lp-link", type: "button" }, t("app.copy"));
    copy.addEventListener("click", () => copyText(message.text, copy));
    const edit = h("button", { class: "lp-link", type: "button" }, t("talk.edit"));
    const known = timings && timings.num_cached_tokens !== null && timings.num_computed_tokens !== null;
    const meta = h(
      "div",
      { class: "lp-meta right" },
      h("span", { class: "lp-quiet-actions" }, copy, edit),
      this.switcher(turn),
      known && h("span", {}, t("talk.reused", { reused: timings.num_cached_tokens, computed: timings.num_computed_tokens })),
      h("span", {}, t("talk.turn", { n: Math.floor(place / 2) + 1 })),
    );
    const element = h("article", { class: "lp-turn user", "data-id": String(message.id), "aria-label": t("talk.you") }, bubble, meta);
    edit.addEventListener("click", () => this.editing(element, message));
    return element;
  }

  editing(element, message) {
    const before = [...element.childNodes];
    const area = h("textarea", { class: "lp-edit", "aria-label": t("talk.edit.label"), dir: "auto", rows: "1" });
    area.value = message.text;
    const fit = () => {
      area.style.height = "auto";
      area.style.height = `${area.scrollHeight + 2}px`;
    };
    const cancel = () => element.replaceChildren(...before);
    const send = async () => {
      if (!area.value.trim()) return area.focus();
      if (!(await this.actions.edit(message, area.value))) area.focus();
    };
    area.addEventListener("input", fit);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    element.replaceChildren(
      area,
      h(
        "div",
        { class: "lp-meta right" },
        h("span", {}, t("talk.edit.note")),
        h("button", { class: "lp-btn ghost", type: "button", onclick: cancel }, t("app.cancel")),
        h("button", { class: "lp-btn primary", type: "button", onclick: send }, t("write.send")),
      ),
    );
    fit();
    area.focus();
  }

  answerRow(turn, isLast) {
    const { message } = turn;
    const body = h("div", { class: "lp-md" });
    const text = new MarkdownText(body);
    text.append(message.text);
    text.finish();
    if (message.state === "error" || message.state === "interrupted") {
      const interrupted = message.text
        ? t("talk.interrupted")
        : t("talk.interrupted.empty");
      body.append(h("p", { class: "lp-problem" }, message.error ?? interrupted));
    }
    const copy = h("button", { class: "lp-link", type: "button" }, t("app.copy"));
    copy.addEventListener("click", () => copyText(message.text, copy));
    const link = (name, run) => h("button", { class: "lp-link", type: "button", onclick: run }, name);
    const continues = this.actions.server.state?.features?.continue_answer !== false;
    const timings = message.timings ?? {};
    const figures = [];
    if (message.finish_reason === "length") figures.push(t("talk.cut"));
    if (message.finish_reason === "cancelled") figures.push(t("talk.stopped"));
    if (timings.num_tokens) figures.push(t("tokens", { n: timings.num_tokens }));
    if (timings.tokens_per_s) figures.push(rate(timings.tokens_per_s));
    if (timings.ttft_s) figures.push(t("unit.first", { time: seconds(timings.ttft_s) }));
    return h(
      "article",
      { class: "lp-turn assistant", "data-id": String(message.id), "aria-label": t("talk.answer") },
      body,
      h(
        "div",
        { class: "lp-meta" },
        turn.siblings.length > 1 && h("b", { class: "lp-letter", style: `--k: var(--c${(message.candidate ?? 0) % 8})` }, LETTERS[message.candidate ?? 0]),
        this.switcher(turn),
        message.text && copy,
        turn.siblings.length > 1 && link(t("talk.compare"), () => this.actions.reopen(message.parent)),
        isLast && message.text && message.finish_reason !== "stop" && continues && link(t("talk.continue"), () => this.actions.goOn(message.id)),
        link(t(message.text ? "talk.again" : "talk.retry"), () => this.actions.regenerate(message.parent)),
        h("span", { class: "lp-meta-end" }, figures.join(" · ")),
      ),
    );
  }
}
