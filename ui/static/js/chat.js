// The chat page: keeps what is shown, what is stored and what runs in step.

import * as api from "./api.js";
import { addressed, addressOf } from "./address.js";
import { bannerOf } from "./banner.js";
import { Composer } from "./composer.js";
import { ConversationList } from "./conversation_list.js";
import { LETTERS } from "./candidate.js";
import { announce, h, toast } from "./dom.js";
import { Drawers } from "./drawers.js";
import { emptyPage, missingPage } from "./empty.js";
import { Header } from "./header.js";
import { t } from "./i18n.js";
import { KvPanel } from "./kv_panel.js";
import { reveal } from "./reveal.js";
import { Scroller } from "./scroller.js";
import { ServerWatch } from "./server_watch.js";
import { Settings } from "./settings.js";
import { openSettingsDialog, shouldReopen } from "./settings_dialog.js";
import { listenForKeys } from "./shortcuts.js";
import { leafOf, Transcript } from "./transcript.js";
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
      toggleList: () => this.drawers.toggleList(),
      toggleSide: () => this.drawers.toggleSide(),
      rename: (title) => this.rename(title),
    });
    this.list = new ConversationList({
      open: (id, message) => this.open(id, true, message),
      fresh: () => this.open(null),
      renamed: (one) => this.renamed(one),
      removed: (id) => conversation() === id && this.open(null),
      settings: () => this.openPageSettings(),
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
      showEarlier: () => this.transcript.showAll(),
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
      h("div", { class: "lp-scrim", onclick: () => this.drawers.close() }),
      this.list.element,
      this.header.element,
      this.scroller.element,
      this.scroller.down,
      this.composer.element,
      h("div", { id: "lp-announcer", class: "lp-hidden", "aria-live": "polite" }),
      h("div", { id: "lp-toast", role: "status" }),
    );
    this.drawers = new Drawers(this.frame, this.list);
    root.replaceChildren(this.frame);
    listenForKeys({
      search: () => (this.drawers.openList(), this.list.search.focus(), this.list.search.select()),
      fresh: () => this.open(null),
      close: () => this.drawers.close(),
      choose: (key, field) => this.chooseByKey(key, field),
    });
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
    if (shouldReopen()) this.openPageSettings();
  }

  // The conversation that is shown

  async open(id, navigate = true, message = null) {
    this.drawers.close();
    this.settings.flush();
    if (navigate) history.pushState(null, "", addressOf(id));
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
        this.header.setTitle("", false);
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
    if (message) await reveal(this, message);
    else if (matchMedia("(min-width: 760px)").matches) this.composer.area.focus({ preventScroll: true });
  }

  show(view) {
    this.view = view;
    this.header.setTitle(view?.conversation.title ?? "", Boolean(view));
    this.showMiddle();
    if (view?.job && this.job?.id !== view.job.id) this.attach(view.job);
    this.showMode();
    this.countSoon(0);
    this.showKv();
  }

  showMiddle() {
    if (this.view?.turns.length) this.transcript.show(this.view);
    else this.transcript.clear(emptyPage(this.server.state, (text) => this.composer.set(text)));
    this.scroller.anchor = this.transcript.anchor();
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
    if (!earlier || this.view !== view) return false;
    const turns = [...earlier.turns, ...view.turns];
    this.scroller.keeping(() => this.show({ ...view, turns, num_earlier: earlier.num_earlier }));
    return true;
  }

  async rename(title) {
    const one = await this.attempt(() => api.changeConversation(this.view.conversation.id, { title }));
    if (one) this.renamed(one);
    this.list.refresh();
  }

  renamed(one) {
    if (this.view?.conversation.id !== one.id) return;
    this.view.conversation.title = one.title;
    this.header.setTitle(one.title, true);
  }

  /** The message that a new one would answer; undefined while a choice is open. */
  leaf() {
    return leafOf(this.view);
  }

  // Asking and choosing

  /** Send a message under another (or as the first). Returns whether it was taken. */
  async send(text, parent = this.leaf()) {
    if (!text.trim() || this.sending) return false;
    if (this.job) {
      toast(t("write.busy"));
      return false;
    }
    if (parent === undefined) {
      this.composer.nudge();
      this.transcript.deck?.focusFirst();
      announce(t("write.choose.first"));
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
        history.replaceState(null, "", addressOf(this.opening));
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
    this.server.refreshKvWhile(() => this.job === job);
  }

  detach() {
    this.leaveJob?.();
    this.leaveJob = this.job = null;
  }

  take(event) {
    if (event.type === "unsaved") toast(t("write.unsaved", { message: event.message }), null, 15_000);
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
    const isBusy = Boolean(this.job || this.transcript.deck?.problem);
    this.composer.setBanner(...bannerOf(this.server, { isEmpty: !this.view?.turns.length, isBusy }));
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
    this.drawers.openSide();
    document.querySelector("#lp-temperature input")?.focus();
  }

  openPageSettings() {
    const { state } = this.server;
    // A new conversation takes up the defaults at once.
    const changed = () => this.view ?? (this.settings.use(null), this.composer.showSampling(this.settings.sampling), this.bridge.sync());
    openSettingsDialog({ state, transfer: this.list.transfer, changed });
  }

  /** Choose the answer with this number, unless a text is being written. */
  chooseByKey(key, field) {
    const inEmptyComposer = field === this.composer.area && !this.composer.area.value;
    const card = this.view?.open_candidates.length ? this.transcript.deck?.cardOf(key) : null;
    if (!card || card.chooseButton.hidden || (field && !inEmptyComposer)) return false;
    this.choose(card);
    return true;
  }
}
