// How full the model's window is, and what the next answers may take of the pool before they are asked for.

import * as api from "./api.js";
import { count } from "./dom.js";

export class WindowCount {
  constructor(header, composer, settings) {
    this.header = header;
    this.composer = composer;
    this.settings = settings;
    this.counted = null;
    this.kv = null;
  }

  /** Count a draft of the API, once the writing pauses for so many ms. */
  countSoon(draft, wait) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.count(draft), wait);
  }

  async count(draft) {
    this.latest = draft;
    let counted;
    try {
      counted = await api.countTokens(draft);
    } catch {
      return; // The meter keeps what it had.
    }
    if (this.latest !== draft) return;
    this.counted = counted;
    this.header.setWindow({ ...counted, reply: this.settings.sampling.max_tokens });
    this.showPrice();
  }

  showPrice(kv = this.kv) {
    this.kv = kv;
    const { window, history: used, draft } = this.counted ?? {};
    if (!kv || !window) {
      this.composer.setPrice("");
      return;
    }
    const { n, max_tokens: longest } = this.settings.sampling;
    const taken = used + (draft ?? 0);
    const reply = Math.max(0, Math.min(longest ?? window, window - taken));
    const blocks = Math.ceil(taken / kv.block_size) + n * Math.ceil(reply / kv.block_size);
    this.composer.setPrice(`at most ${count(blocks)} of ${count(kv.num_blocks)} blocks`);
  }
}
