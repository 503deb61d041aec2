// A menu of commands: arrows, Home, End and first letters move, Escape and Tab leave.
// Source: https://www.w3.org/WAI/ARIA/apg/patterns/menu-button/.

import { h, icon } from "./dom.js";

let closeOpen = null;

/** items: [{label, picture, run, danger}] or null for a line. at: the place to open at, {left, top, bottom, right}.
 * back(): focuses what the menu was opened from. */
export function openMenu({ items, label, at, back }) {
  closeOpen?.(false);
  const button = (item) =>
    h(
      "button",
      { class: item.danger ? "lp-menu-item danger" : "lp-menu-item", type: "button", role: "menuitem", tabindex: "-1", onclick: () => (close(true), item.run()) },
      icon(item.picture),
      h("span", {}, item.label),
    );
  const menu = h("div", { class: "lp-menu", role: "menu", "aria-label": label }, ...items.map((item) => (item ? button(item) : h("hr", { role: "separator" }))));
  const buttons = [...menu.querySelectorAll("button")];

  const close = (refocus) => {
    if (closeOpen !== close) return;
    closeOpen = null;
    removeEventListener("pointerdown", outside, true);
    removeEventListener("resize", dismiss);
    removeEventListener("wheel", outside, true);
    menu.remove();
    if (refocus) back();
  };
  const dismiss = () => close(false);
  const outside = (event) => menu.contains(event.target) || close(false);
  const move = (place) => buttons[(place + buttons.length) % buttons.length].focus();
  menu.addEventListener("keydown", (event) => {
    const place = buttons.indexOf(document.activeElement);
    const to = { ArrowDown: place + 1, ArrowUp: place - 1, Home: 0, End: -1 }[event.key];
    event.stopPropagation();
    if (to !== undefined) {
      event.preventDefault();
      move(to);
    } else if (event.key === "Escape" || event.key === "Tab") {
      event.preventDefault();
      close(true);
    } else if (event.key.length === 1 && event.key !== " ") {
      const starts = (one) => one.textContent.toLowerCase().startsWith(event.key.toLowerCase());
      const next = [...buttons.slice(place + 1), ...buttons].find(starts);
      next?.focus();
    }
  });
  menu.addEventListener("contextmenu", (event) => event.preventDefault());
  document.querySelector(".lp-frame").append(menu);
  const { width, height } = menu.getBoundingClientRect();
  const below = at.bottom + height + 6 <= innerHeight;
  menu.style.left = `${Math.max(6, Math.min(at.left, innerWidth - width - 6))}px`;
  menu.style.top = `${Math.max(6, below ? at.bottom + 2 : at.top - height - 2)}px`;
  addEventListener("pointerdown", outside, true);
  addEventListener("wheel", outside, true);
  addEventListener("resize", dismiss);
  closeOpen = close;
  buttons[0].focus();
}
