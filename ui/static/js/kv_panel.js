// The pool's numbers on the right: how full it is, what is shared, what this turn reused.

import { bytes, count, h, rate, seconds } from "./dom.js";

const CELLS = 264;

export class KvPanel {
  constructor(element) {
    this.big = h("div", { class: "lp-big" }, "–");
    this.sub = h("div", { class: "lp-sub" });
    this.map = h("div", { class: "lp-map", role: "img" });
    this.cells = Array.from({ length: CELLS }, () => h("i"));
    this.map.append(...this.cells);
    this.legend = h("div", { class: "lp-legend" });
    this.pool = h("dl", { class: "lp-kv" });
    this.turn = h("dl", { class: "lp-kv" });
    this.element = h("div", { class: "lp-kv-panel" }, this.big, this.sub, this.map, this.legend, this.pool, this.turn);
    element.replaceChildren(this.element);
  }

  /** server: what is known of it. cards: the candidates on screen. */
  show({ kv: stats, remote, state }, cards) {
    if (!stats) {
      this.big.textContent = remote ? "On another server" : "No model loaded";
      this.sub.textContent = remote
        ? `${state.model?.address ?? "It"} keeps its KV memory itself: its blocks, what is shared and what a message would cost are not known here.`
        : "The numbers come with the model.";
      this.map.hidden = true;
      this.legend.replaceChildren();
      list(this.pool, []);
      this.showTurn(cards);
      return;
    }
    this.map.hidden = false;
    const total = stats.num_blocks || 1;
    const referenced = stats.referenced ?? 0;
    const kept = stats.leased ?? 0; // held for conversations alone, until someone needs the room
    const running = referenced - kept;
    const shared = Math.min(stats.shared ?? 0, running);
    const cached = stats.cached ?? 0;
    const percent = (100 * running) / total;
    const rounded = percent > 0 && percent < 10 ? percent.toFixed(1) : Math.round(percent);
    this.big.textContent = `${rounded} % of ${count(total)} in use`;
    const tokens = running * stats.block_size;
    const waste = tokens ? `waste ${((100 * (stats.waste_tokens ?? 0)) / tokens).toFixed(1)} %` : "no waste";
    this.sub.textContent = `${count(stats.block_size)} tokens each · ${bytes(stats.bytes_per_block ?? 0)} · ${waste}`;
    const kinds = [
      ["shared", "shared", shared],
      ["private", "private", running - shared],
      ["kept", "kept for chats", kept],
      ["cached", "cached", cached],
      ["free", "free", Math.max(0, total - referenced - cached)],
    ];
    // Each cell stands for total/CELLS blocks; what exists at all gets a cell.
    let place = 0;
    for (const [kind, , blocks] of kinds) {
      const cells = kind === "free" ? CELLS - place : Math.min(CELLS - place, Math.ceil((blocks * CELLS) / total));
      for (let end = place + cells; place < end; place += 1) this.cells[place].className = kind;
    }
    this.map.setAttribute("aria-label", kinds.map(([, name, blocks]) => `${count(blocks)} blocks ${name}`).join(", "));
    this.legend.replaceChildren(
      ...kinds.map(([kind, name, blocks]) => h("span", {}, h("i", { class: kind }), `${name} `, h("b", {}, count(blocks)))),
    );
    const pool = [
      ["KV memory", bytes(total * (stats.bytes_per_block ?? 0))],
      ["in use", bytes(running * (stats.bytes_per_block ?? 0))],
      ["kept for chats", bytes(kept * (stats.bytes_per_block ?? 0))],
      ...(stats.host_bytes ? [["moved out", bytes(stats.host_bytes)]] : []),
      ["on disk", bytes(stats.disk_bytes ?? 0)],
      ["room for", `${count((total - running) * stats.block_size)} tokens`],
    ];
    if (stats.running !== undefined) pool.push(["running · waiting", `${count(stats.running)} · ${count(stats.waiting ?? 0)}`]);
    list(this.pool, pool);
    this.showTurn(cards);
  }

  showTurn(cards) {
    const figures = cards.map((card) => card.figures).filter((figure) => figure.num_tokens || figure.ttft_s);
    if (!figures.length) {
      list(this.turn, []);
      return;
    }
    const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);
    const shared = Math.max(...figures.map((figure) => figure.num_shared_blocks ?? 0));
    const own = sum(figures.map((figure) => figure.num_own_blocks));
    const alone = sum(figures.map((figure) => (figure.num_shared_blocks ?? 0) + (figure.num_own_blocks ?? 0)));
    const first = Math.min(...figures.map((figure) => figure.ttft_s ?? Infinity));
    const rows = [];
    if (shared + own) {
      rows.push([figures.length > 1 ? "These answers" : "This answer", `${count(shared + own)} blocks`]);
      if (figures.length > 1) rows.push(["Without sharing", `${count(alone)} blocks`]);
    }
    const speed = sum(figures.map((figure) => figure.tokens_per_s));
    if (speed) rows.push([figures.length > 1 ? "Decode, all answers" : "Decode", rate(speed)]);
    if (Number.isFinite(first)) rows.push(["First token", seconds(first)]);
    const prefill = figures[0];
    if (prefill.num_cached_tokens !== undefined && prefill.num_cached_tokens !== null && prefill.num_computed_tokens !== null) {
      rows.push(["Prefill skipped", `${count(prefill.num_cached_tokens)} of ${count(prefill.num_cached_tokens + prefill.num_computed_tokens)}`]);
    }
    list(this.turn, rows);
  }
}

function list(element, rows) {
  element.hidden = !rows.length;
  element.replaceChildren(...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}
