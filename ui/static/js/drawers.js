// In a narrow window the list and the panel on the right slide over the page. The open list keeps the focus.

export class Drawers {
  /** frame: the page. list: its list. */
  constructor(frame, list) {
    this.frame = frame;
    this.list = list;
    this.opener = null;
  }

  get listIsOpen() {
    return this.frame.classList.contains("list-open");
  }

  /** Whether the list is a drawer at this width. */
  get narrow() {
    return matchMedia("(max-width: 760px)").matches;
  }

  toggleList() {
    if (this.listIsOpen) return this.close();
    this.opener = document.activeElement;
    this.openList();
    if (this.narrow) this.list.element.querySelector(".lp-new").focus();
  }

  openList() {
    this.frame.classList.add("list-open");
    if (this.narrow) this.#setInert(true);
  }

  toggleSide() {
    if (document.body.classList.contains("lp-side-open")) return this.close();
    this.opener = document.activeElement;
    this.openSide();
  }

  openSide() {
    document.body.classList.add("lp-side-open");
  }

  /** Close what is open; the focus goes back to where it was opened from. */
  close() {
    const { listIsOpen, opener } = this;
    const wasInside = listIsOpen || document.getElementById("lp-side")?.contains(document.activeElement);
    this.frame.classList.remove("list-open");
    document.body.classList.remove("lp-side-open");
    this.#setInert(false);
    this.opener = null;
    if (wasInside && opener?.isConnected) opener.focus();
  }

  #setInert(inert) {
    for (const part of this.frame.querySelectorAll(":scope > .lp-head, :scope > .lp-main, :scope > .lp-composer")) part.inert = inert;
  }
}
