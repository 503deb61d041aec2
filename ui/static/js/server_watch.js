// Whether the server is there, what its model does, and how full its pool is.

import * as api from "./api.js";

const READY_EVERY_MS = 10_000;
const WAITING_EVERY_MS = 700;
const AWAY_EVERY_MS = 1500;

export class ServerWatch {
  /** on: {state(state), model(), kv(stats), away(), back()}; model: the model's state changed. */
  constructor(on) {
    this.on = on;
    this.state = null;
    this.kv = null;
    this.away = false;
  }

  /** Whether another server answers, which tells nothing of its KV. */
  get remote() {
    return this.state?.features?.kv === false;
  }

  async refresh() {
    try {
      const before = this.state?.engine;
      this.state = await api.getState();
      this.on.state(this.state);
      if (before !== undefined && before !== this.state.engine) this.on.model();
    } catch {
      this.lost();
    }
  }

  /** Look again and again: often while something is awaited. */
  async poll() {
    for (;;) {
      const wait = this.state?.engine === "ready" ? READY_EVERY_MS : WAITING_EVERY_MS;
      await new Promise((done) => setTimeout(done, wait));
      if (!this.away && !document.hidden) await this.refresh();
    }
  }

  async refreshKv() {
    try {
      this.kv = this.state?.engine === "ready" && !this.remote ? await api.getKv() : null;
    } catch {
      this.kv = null;
    }
    this.on.kv(this.kv);
  }

  async refreshKvWhile(running) {
    while (running()) {
      await this.refreshKv();
      await new Promise((done) => setTimeout(done, 1000));
    }
  }

  /** The server did not answer: say so, and ask until it does. */
  lost() {
    if (this.away) return;
    this.away = true;
    this.on.away();
    const retry = async () => {
      try {
        await api.getState();
        this.found();
      } catch {
        setTimeout(retry, AWAY_EVERY_MS);
      }
    };
    setTimeout(retry, AWAY_EVERY_MS);
  }

  async found() {
    if (!this.away) return;
    this.away = false;
    await this.refresh();
    this.on.back();
  }
}
