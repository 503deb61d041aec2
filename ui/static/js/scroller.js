// The scrolling middle: it stays at its end while text arrives, unless the reader has scrolled up.

import { h, icon } from "./dom.js";

export class Scroller {
  constructor(content) {
    this.atEnd = true;
    this.top = 0;
    this.element = h("main", { class: "lp-main" }, content);
    this.down = h("button", { class: "lp-down", type: "button", "aria-label": "To the end", onclick: () => this.toEnd(true) }, icon("left"));
    this.down.hidden = true;
    this.element.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.element;
      // Only the reader moves upwards; text that arrives makes the end go away, not the place.
      if (scrollHeight - scrollTop - clientHeight < 60) this.atEnd = true;
      else if (scrollTop < this.top) this.atEnd = false;
      this.top = scrollTop;
      this.down.hidden = this.atEnd;
    });
    const watcher = new ResizeObserver(() => this.stick());
    watcher.observe(content);
    watcher.observe(this.element);
  }

  stick() {
    if (this.atEnd) this.toEnd();
  }

  toEnd(smooth = false) {
    this.atEnd = true;
    this.down.hidden = true;
    this.element.scrollTo({ top: this.element.scrollHeight, behavior: smooth ? "smooth" : "instant" });
  }

  /** Do something that adds content above, without moving what is read. */
  keeping(act) {
    const before = this.element.scrollHeight;
    act();
    this.element.scrollTop += this.element.scrollHeight - before;
  }
}
