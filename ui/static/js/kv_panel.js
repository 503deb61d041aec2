// The pool's numbers on the right: how full it is, what is shared, what this turn reused.

import { bytes, h, rate, seconds } from "./dom.js";
import { count, decimal, t } from "./i18n.js";

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
      this.big.textContent = t(remote ? "pool.remote" : "pool.none");
      this.sub.textContent = remote
        ? t("pool.remote.text", { address: state.model?.address ?? t("pool.it") })
        : t("pool.none.text");
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
    const rounded = percent > 0 && percent < 10 ? decimal(percent, 1) : count(Math.round(percent));
    this.big.textContent = t("pool.used", { percent: rounded, total });
    const tokens = running * stats.block_size;
    const waste = tokens ? t("pool.waste", { n: decimal((100 * (stats.waste_tokens ?? 0)) / tokens, 1) }) : t("pool.waste.none");
    this.sub.textContent = t("pool.each", { n: stats.block_size, size: bytes(stats.bytes_per_block ?? 0), waste });
    const kinds = [
      ["shared", t("pool.shared"), shared],
      ["private", t("pool.private"), running - shared],
      ["kept", t("pool.kept"), kept],
      ["cached", t("pool.cached"), cached],
      ["free", t("pool.free"), Math.max(0, total - referenced - cached)],
    ];
    // Each cell stands for total/CELLS blocks; what exists at all gets a cell.
    let place = 0;
    for (const [kind, , blocks] of kinds) {
      const cells = kind === "free" ? CELLS - place : Math.min(CELLS - place, Math.ceil((blocks * CELLS) / total));
      for (let end = place + cells; place < end; place += 1) this.cells[place].className = kind;
    }
    this.map.setAttribute("aria-label", kinds.map(([, name, blocks]) => `${name}: ${t("pool.blocks", { n: blocks })}`).join(", "));
    this.legend.replaceChildren(
      ...kinds.map(([kind, name, blocks]) => h("span", {}, h("i", { class: kind }), `${name} `, h("b", {}, count(blocks)))),
    );
    const pool = [
      [t("pool.memory"), bytes(total * (stats.bytes_per_block ?? 0))],
      [t("pool.in.use"), bytes(running * (stats.bytes_per_block ?? 0))],
      [t("pool.kept"), bytes(kept * (stats.bytes_per_block ?? 0))],
      ...(stats.host_bytes ? [[t("pool.moved"), bytes(stats.host_bytes)]] : []),
      [t("pool.disk"), bytes(stats.disk_bytes ?? 0)],
      [t("pool.room"), t("tokens", { n: (total - running) * stats.block_size })],
    ];
    if (stats.running !== undefined) pool.push([t("pool.queue"), `${count(stats.running)} · ${count(stats.waiting ?? 0)}`]);
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
      rows.push([t(figures.length > 1 ? "turn.answers" : "turn.answer"), t("pool.blocks", { n: shared + own })]);
      if (figures.length > 1) rows.push([t("turn.alone"), t("pool.blocks", { n: alone })]);
    }
    const speed = sum(figures.map((figure) => figure.tokens_per_s));
    if (speed) rows.push([t(figures.length > 1 ? "turn.decode.all" : "turn.decode"), rate(speed)]);
    if (Number.isFinite(first)) rows.push([t("turn.first"), seconds(first)]);
    const prefill = figures[0];
    if (prefill.num_cached_tokens !== undefined && prefill.num_cached_tokens !== null && prefill.num_computed_tokens !== null) {
      rows.push([t("turn.skipped"), t("turn.skipped.part", { part: prefill.num_cached_tokens, whole: prefill.num_cached_tokens + prefill.num_computed_tokens })]);
    }
    list(this.turn, rows);
  }
}

function list(element, rows) {
  element.hidden = !rows.length;
  element.replaceChildren(...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}
