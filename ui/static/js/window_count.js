// How full the model's window is, and what the next answers may take of the pool before they are asked for.

import * as api from "./api.js";
import { seconds } from "./dom.js";
import { t } from "./i18n.js";

export class WindowCount {
  constructor(header, composer, settings) {
    this.header = header;
    this.composer = composer;
    this.settings = settings;
    this.counted = null;
    this.kv = null;
    this.price = null;
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
    await this.estimate(draft);
  }

  /** What asking for the answers would take, by what is in memory and by the rates that this machine has shown. */
  async estimate(draft) {
    const { n, max_tokens: longest } = this.settings.sampling;
    const turn = { tokens: this.counted.draft ?? 0, n };
    for (const [name, value] of Object.entries({ conversation: draft.conversation, parent: draft.parent, max_tokens: longest })) {
      if (value) turn[name] = value;
    }
    try {
      this.price = this.counted.window && this.counted.history !== null ? await api.estimate(turn) : null;
    } catch {
      this.price = null;
    }
    if (this.latest === draft) this.showPrice();
  }

  showPrice(kv = this.kv) {
    this.kv = kv;
    if (!kv || !this.price) {
      this.composer.setPrice("");
      return;
    }
    const { num_blocks: blocks, num_moved_blocks: moved, first_token_s: first, total_s: total } = this.price;
    const moving = moved ? t("write.moving", { n: moved }) : "";
    const title = t("write.price.title", { time: seconds(first), moving, n: kv.num_blocks });
    this.composer.setPrice(t("write.price", { n: blocks, moving, time: seconds(total) }), title);
  }
}
