// The scrolling middle. It follows what is written until the reader scrolls away: at the end of the text, or,
// with answers side by side, where the question is on top (their columns scroll by themselves).

import { h, icon } from "./dom.js";
import { t } from "./i18n.js";

const NEAR_PX = 60;

export class Scroller {
  constructor(content) {
    this.following = true;
    this.anchor = null; // what to keep on top; null follows the end
    this.place = 0; // where this scrolled to last
    this.element = h("main", { class: "lp-main" }, content);
    this.down = h("button", { class: "lp-down", type: "button", "aria-label": t("talk.end"), onclick: () => this.toEnd() }, icon("left"));
    this.down.hidden = true;
    this.element.addEventListener("scroll", () => this.scrolled());
    const watcher = new ResizeObserver(() => this.follow());
    watcher.observe(content);
    watcher.observe(this.element);
  }

  get end() {
    return this.element.scrollHeight - this.element.clientHeight;
  }

  get target() {
    if (!this.anchor?.isConnected) return this.end;
    const top = this.anchor.getBoundingClientRect().top - this.element.getBoundingClientRect().top;
    return Math.max(0, Math.min(this.end, this.element.scrollTop + top - 14));
  }

  scrolled() {
    const top = this.element.scrollTop;
    if (Math.abs(top - this.place) > 2) this.following = Math.abs(top - this.target) < NEAR_PX;
    this.place = top;
    this.showButton();
  }

  showButton() {
    this.down.hidden = (this.following && !this.anchor) || this.end - this.element.scrollTop < NEAR_PX;
  }

  /** Go to where the writing is, unless the reader went elsewhere. */
  follow() {
    if (this.following) this.jump(this.target);
    this.showButton();
  }

  /** Follow the end, or an element that is to be on top. */
  begin(anchor = null) {
    this.anchor = anchor;
    this.following = true;
    this.follow();
  }

  /** Stay where the reader is led to. */
  leave() {
    this.following = false;
  }

  toEnd() {
    this.following = !this.anchor;
    this.element.scrollTo({ top: this.end, behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "instant" : "smooth" });
  }

  /** Do something that adds content above, without moving what is read. */
  keeping(act) {
    const before = this.element.scrollHeight;
    act();
    this.jump(this.element.scrollTop + this.element.scrollHeight - before);
  }

  jump(top) {
    this.element.scrollTo({ top, behavior: "instant" });
    this.place = this.element.scrollTop;
  }
}
