// The chat page: keeps what is shown, what is stored and what runs in step.

import * as api from "./api.js";
import { Composer } from "./composer.js";
import { ConversationList } from "./conversation_list.js";
import { LETTERS } from "./candidate.js";
import { announce, h, toast } from "./dom.js";
import { emptyPage, missingPage } from "./empty.js";
import { Header } from "./header.js";
import { KvPanel } from "./kv_panel.js";
import { Scroller } from "./scroller.js";
import { ServerWatch } from "./server_watch.js";
import { Settings } from "./settings.js";
import { Transcript } from "./transcript.js";
import { WindowCount } from "./window_count.js";

export class Chat {
  /** root: where to draw. bridge: {sync()} asks Gradio's controls to show the settings anew. */
  constructor(root, bridge) {
    this.bridge = bridge;
    this.view = null; // of the shown conversation, as the API gives it; null is a new one
    this.job = null;
    this.leaveJob = null;
    this.sending = false;
    const conversation = () => this.view?.conversation.id ?? null;
    this.settings = new Settings((fields) => {
      const id = conversation();
      if (id) this.attempt(() => api.changeConversation(id, fields));
    });
    this.server = new ServerWatch({
      state: (state) => (this.header.setModel(state), this.showBanner()),
      model: () => this.modelChanged(),
      kv: () => this.showKv(),
      away: () => this.showBanner(),
      back: () => this.serverIsBack(),
    });
    const stopAll = () => this.stopAll();
    this.header = new Header({
      stopAll,
      toggleList: () => this.frame.classList.toggle("list-open"),
      toggleSide: () => document.body.classList.toggle("lp-side-open"),
    });
    this.list = new ConversationList({
      open: (id) => this.open(id),
      fresh: () => this.open(null),
      renamed: (one) => {
        if (conversation() !== one.id) return;
        this.view.conversation.title = one.title;
        this.header.setTitle(one.title);
      },
      removed: (id) => conversation() === id && this.open(null),
    });
    this.transcript = new Transcript({
      choose: (card) => this.choose(card),
      stop: (card) => this.job && this.attempt(() => api.stop(this.job.id, [this.job.messages.indexOf(card.message.id)])),
      stopAll,
      regenerate: (user = this.view.turns.at(-1).message.id) =>
        this.write(() => api.regenerate(user, this.settings.sampling)),
      goOn: (answer) => this.write(() => api.continueAnswer(answer, this.settings.sampling)),
      edit: (message, text) => this.send(text, message.parent),
      switchTo: (id) => this.change(() => api.choose(id)),
      reopen: (id) => this.change(() => api.reopen(id)),
      showEarlier: () => {
        this.transcript.allAnswers = true;
        this.transcript.show(this.view);
      },
      earlier: () => this.loadEarlier(),
      server: this.server,
    });
    this.composer = new Composer({
      send: (text) => this.send(text),
      stopAll,
      draft: () => this.countSoon(),
      openSettings: () => this.openSettings(),
      setCount: (n) => this.setSampling({ n }),
    });
    this.window = new WindowCount(this.header, this.composer, this.settings);
    this.scroller = new Scroller(this.transcript.element);
    this.frame = h(
      "div",
      { class: "lp-frame" },
      h("div", { class: "lp-scrim", onclick: () => this.closeDrawers() }),
      this.list.element,
      this.header.element,
      this.scroller.element,
      this.scroller.down,
      this.composer.element,
      h("div", { id: "lp-announcer", class: "lp-hidden", "aria-live": "polite" }),
      h("div", { id: "lp-toast" }),
    );
    root.replaceChildren(this.frame);
    addEventListener("keydown", (event) => this.key(event));
    addEventListener("popstate", () => this.open(addressed(), false));
    addEventListener("focus", () => this.list.refresh());
    addEventListener("pagehide", () => this.settings.flush());
  }

  async begin() {
    const opened = this.open(addressed(), false);
    await Promise.all([this.server.refresh(), this.list.refresh(), opened]);
    this.showMiddle();
    this.server.refreshKv();
    this.countSoon();
    this.server.poll();
  }

  // The conversation that is shown

  async open(id, navigate = true) {
    this.closeDrawers();
    this.settings.flush();
    if (navigate) history.pushState(null, "", id ? `#/c/${id}` : "#/");
    this.opening = id;
    this.detach();
    this.transcript.allAnswers = false;
    let view = null;
    if (id) {
      try {
        view = await api.getConversation(id);
      } catch (error) {
        if (this.opening !== id) return;
        this.view = null;
        this.header.setTitle("");
        this.transcript.clear(missingPage(error.message, () => this.open(null)));
        return;
      }
    }
    if (this.opening !== id) return;
    this.settings.use(view?.conversation);
    this.composer.showSampling(this.settings.sampling);
    this.bridge.sync();
    this.list.current = id;
    this.list.draw();
    this.show(view);
    this.composer.use(id);
    this.scroller.begin(this.transcript.anchor());
    if (matchMedia("(min-width: 760px)").matches) this.composer.area.focus({ preventScroll: true });
  }

  show(view) {
    this.view = view;
    this.header.setTitle(view?.conversation.title ?? "");
    this.showMiddle();
    this.scroller.anchor = this.transcript.anchor();
    if (view?.job && this.job?.id !== view.job.id) this.attach(view.job);
    this.showMode();
    this.countSoon(0);
    this.showKv();
  }

  showMiddle() {
    if (this.view?.turns.length) this.transcript.show(this.view);
    else this.transcript.clear(emptyPage(this.server.state, (text) => this.composer.set(text)));
  }

  /** Do something that answers with a view, and show that. */
  async change(act) {
    const view = await this.attempt(act);
    if (view && view.conversation.id === this.view?.conversation.id) {
      this.transcript.allAnswers = false;
      this.show(view);
    }
    return view;
  }

  /** What it answers; null when it failed, which the reader is told. */
  async attempt(act) {
    try {
      return await act();
    } catch (error) {
      if (error.code === "offline") this.server.lost();
      else toast(error.message);
      return null;
    }
  }

  async reload() {
    const id = this.view?.conversation.id;
    if (!id) return;
    const view = await this.attempt(() => api.getConversation(id));
    if (view && this.view?.conversation.id === id) this.show(view);
  }

  async loadEarlier() {
    const { view } = this;
    const earlier = await this.attempt(() => api.getConversation(view.conversation.id, view.turns[0].message.id));
    if (!earlier || this.view !== view) return;
    const turns = [...earlier.turns, ...view.turns];
    this.scroller.keeping(() => this.show({ ...view, turns, num_earlier: earlier.num_earlier }));
  }

  /** The message that a new one would answer; undefined while a choice is open. */
  leaf() {
    if (!this.view?.turns.length) return null;
    if (this.view.open_candidates.length) return undefined;
    const last = this.view.turns.at(-1).message;
    return last.role === "assistant" ? last.id : last.parent;
  }

  // Asking and choosing

  /** Send a message under another (or as the first). Returns whether it was taken. */
  async send(text, parent = this.leaf()) {
    if (!text.trim() || this.sending) return false;
    if (this.job) {
      toast("This conversation is still answering. Wait for it, or stop it first.");
      return false;
    }
    if (parent === undefined) {
      this.composer.nudge();
      this.transcript.deck?.focusFirst();
      announce("Choose an answer first.");
      return false;
    }
    this.sending = true;
    const fromComposer = text === this.composer.area.value;
    const { sampling, systemPrompt } = this.settings;
    const started = await this.attempt(async () => {
      if (!this.view) {
        const fields = { system_prompt: systemPrompt, settings: this.settings.changes() };
        this.view = await api.createConversation(fields);
        this.opening = this.view.conversation.id;
        history.replaceState(null, "", `#/c/${this.opening}`);
        this.list.current = this.opening;
      }
      return api.sendMessage(this.view.conversation.id, parent, text, sampling);
    });
    this.sending = false;
    if (!started) return false;
    if (fromComposer) this.composer.sent(started.conversation);
    if (this.view?.conversation.id !== started.conversation) return true;
    await this.reload();
    this.scroller.begin(this.transcript.anchor());
    this.list.refresh();
    return true;
  }

  /** Start a job on messages that are there. */
  async write(start) {
    if (this.job || !(await this.attempt(start))) return;
    await this.reload();
    this.scroller.begin(this.transcript.anchor());
  }

  async choose(card) {
    if (await this.change(() => api.choose(card.message.id))) this.composer.area.focus({ preventScroll: true });
  }

  stopAll() {
    if (this.job) this.attempt(() => api.stop(this.job.id));
  }

  // The job that runs

  attach(job) {
    this.detach();
    this.job = job;
    this.leaveJob = api.followJob(job.id, {
      onEvent: (event) => this.take(event),
      onLost: () => this.server.lost(),
      onBack: () => this.server.found(),
      onGone: () => this.jobEnded(),
    });
    this.pollKv(this.job);
  }

  detach() {
    this.leaveJob?.();
    this.leaveJob = this.job = null;
  }

  take(event) {
    if (event.type === "unsaved") toast(`Not saved yet: ${event.message}`, null, 15_000);
    if (this.transcript.deck?.take(event, this.job.messages) || event.type === "done") {
      this.transcript.deck?.announceEnd();
      this.jobEnded();
    }
  }

  async jobEnded() {
    this.detach();
    await this.reload();
    this.list.refresh();
    await this.server.refresh();
    this.server.refreshKv();
  }

  async pollKv(job) {
    while (this.job === job) {
      await this.server.refreshKv();
      await new Promise((done) => setTimeout(done, 1000));
    }
  }

  // Around the conversation

  showMode() {
    const running = Boolean(this.job);
    const open = this.view?.open_candidates.length ? (this.transcript.deck?.cards.length ?? 0) : 0;
    const last = this.view?.turns.at(-1);
    const isChosen = last?.message.role === "assistant" && last.siblings.length > 1;
    const chosen = isChosen ? LETTERS[last.message.candidate ?? 0] : null;
    this.composer.setMode({ running, choosing: running ? 0 : open, chosen });
    this.header.stopAll.hidden = !running;
    this.showBanner();
  }

  showBanner() {
    const { away, state } = this.server;
    const empty = !this.view?.turns.length; // the middle of the page says it then
    if (away) {
      this.composer.setBanner("The server cannot be reached. Trying again; your draft is kept.", "bad");
    } else if (state?.engine === "dead" && !this.job && !empty && !this.transcript.deck?.problem) {
      const stopped = "The model stopped. Your next message starts it again; nothing is lost.";
      this.composer.setBanner(state.error ?? stopped, "bad");
    } else if (state?.engine === "starting" && !empty) {
      this.composer.setBanner("The model is loading. You can send already; the answer starts as soon as it is there.");
    } else this.composer.setBanner("");
  }

  modelChanged() {
    if (!this.view?.turns.length) this.showMiddle();
    this.countSoon();
    this.server.refreshKv();
  }

  async serverIsBack() {
    this.showBanner();
    this.list.refresh();
    this.detach();
    await this.reload();
  }

  showKv() {
    let cards = this.transcript.deck?.cards ?? [];
    const last = this.view?.turns.at(-1)?.message;
    if (!cards.length && last?.timings) cards = [{ figures: last.timings }];
    this.kvPanel?.show(this.server, cards);
    this.transcript.deck?.show();
    this.window.showPrice(this.server.kv);
  }

  countSoon(wait = 250) {
    const parent = this.leaf() ?? this.view?.turns.at(-1)?.message.id ?? null;
    const conversation = this.view?.conversation.id ?? null;
    const draft = { conversation, parent, text: this.composer.area.value };
    this.window.countSoon(conversation ? draft : { ...draft, system_prompt: this.settings.systemPrompt }, wait);
  }

  showKvIn(element) {
    this.kvPanel = new KvPanel(element);
    this.showKv();
  }

  // Settings, which Gradio's controls also change

  setSampling(values) {
    this.settings.set(values);
    this.composer.showSampling(this.settings.sampling);
    this.countSoon();
  }

  setSystemPrompt(text) {
    this.settings.setSystemPrompt(text);
    this.countSoon();
  }

  openSettings() {
    document.body.classList.add("lp-side-open");
    document.querySelector("#lp-temperature input")?.focus();
  }

  closeDrawers() {
    this.frame.classList.remove("list-open");
    document.body.classList.remove("lp-side-open");
  }

  key(event) {
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
      event.preventDefault();
      this.frame.classList.add("list-open");
      return this.list.search.focus();
    }
    if (event.key === "Escape") this.closeDrawers();
    if (event.ctrlKey || event.metaKey || event.altKey || !/^[1-8]$/.test(event.key)) return;
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
    const inEmptyComposer = event.target === this.composer.area && !this.composer.area.value;
    const card = this.view?.open_candidates.length ? this.transcript.deck?.cardOf(event.key) : null;
    if (!card || card.chooseButton.hidden || (typing && !inEmptyComposer)) return;
    event.preventDefault();
    this.choose(card);
  }
}

/** The conversation in the address, or null. */
function addressed() {
  const match = /^#\/c\/(\d+)$/.exec(location.hash);
  return match ? Number(match[1]) : null;
}
