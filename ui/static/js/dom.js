// Making elements and writing numbers. Text always goes in as text, never as markup.

import { decimal, t } from "./i18n.js";

/** An element: h("button", {class: "x", onclick: f, "aria-label": "y"}, "text", child, null). */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") element.style.cssText = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const PATHS = {
  menu: "M3 5h14M3 10h14M3 15h14",
  plus: "M10 4v12M4 10h12",
  search: "M9 15A6 6 0 1 0 9 3a6 6 0 0 0 0 12Zm4.5-1.5L17 17",
  pencil: "M4 16l.8-3.4L13.4 4a1.4 1.4 0 0 1 2 0l.6.6a1.4 1.4 0 0 1 0 2L7.4 15.2 4 16Z",
  trash: "M4 6h12M8 6V4h4v2M6 6l.7 10h6.6L14 6",
  pin: "M7 3h6l-1 5 3 3H5l3-3-1-5Zm3 8v6",
  copy: "M7 7V4h9v9h-3M4 7h9v9H4V7Z",
  check: "M4 10.5 8 14.5 16 6",
  sun: "M10 6.5a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7ZM10 2v1.5M10 16.5V18M2 10h1.5M16.5 10H18M4.3 4.3l1.1 1.1M14.6 14.6l1.1 1.1M4.3 15.7l1.1-1.1M14.6 5.4l1.1-1.1",
  sliders: "M3 6h8M15 6h2M3 14h2M9 14h8M13 4v4M7 12v4",
  more: "M4.5 10h.01M10 10h.01M15.5 10h.01",
  archive: "M3 4h14v4H3V4Zm1 4v8h12V8M8 11h4",
  save: "M10 3v9M6.5 8.5 10 12l3.5-3.5M4 16h12",
  load: "M10 12V3M6.5 6.5 10 3l3.5 3.5M4 16h12",
  transfer: "M7 16V4M4 7l3-3 3 3M13 4v12M10 13l3 3 3-3",
  gear: "M10 7.2a2.8 2.8 0 1 0 0 5.6 2.8 2.8 0 0 0 0-5.6ZM8.7 2.5h2.6l.4 2 1.6.9 2-.7 1.3 2.3-1.6 1.4v1.2l1.6 1.4-1.3 2.3-2-.7-1.6.9-.4 2H8.7l-.4-2-1.6-.9-2 .7L3.4 11l1.6-1.4V8.4L3.4 7l1.3-2.3 2 .7 1.6-.9.4-2Z",
  close: "M5 5l10 10M15 5 5 15",
  left: "M12 5l-5 5 5 5",
  right: "M8 5l5 5-5 5",
  stop: "M6 6h8v8H6z",
};

/** A small line drawing that takes the colour of the text. */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 20 20");
  svg.setAttribute("class", "lp-icon");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${decimal(value, value < 10 && unit > 0 ? 1 : 0)} ${units[unit]}`;
}

export function seconds(value) {
  if (value < 0.0995) return t("unit.ms", { value: Math.max(1, Math.round(value * 1000)) });
  return t("unit.s", { value: decimal(value, value < 10 ? 2 : 1) });
}
export const rate = (value) => t("unit.rate", { value: decimal(value, value < 10 ? 1 : 0) });

/** Say something to screen readers, once. */
export function announce(text) {
  const region = document.getElementById("lp-announcer");
  if (region) region.textContent = text;
}

let toastTimer = 0;

/** A note at the bottom for some seconds, with an action when one is given. */
export function toast(text, action = null, timeout_ms = 7000) {
  const place = document.getElementById("lp-toast");
  if (!place) return;
  clearTimeout(toastTimer);
  const close = () => place.replaceChildren();
  const button = action && h("button", { class: "lp-btn ghost", type: "button", onclick: () => (close(), action.run()) }, action.label);
  const note = h("div", { class: "lp-toast" }, h("span", {}, text), button);
  // It waits for whoever is at it.
  const later = () => {
    clearTimeout(toastTimer);
    toastTimer = setTimeout(() => (note.matches(":hover, :focus-within") ? later() : close()), timeout_ms);
  };
  place.replaceChildren(note);
  later();
}

/** Copy a text and show on the button that it was done. */
export async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { style: "position:fixed;opacity:0" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = [...button.childNodes];
  button.replaceChildren(before.some((node) => node.tagName === "svg") ? icon("check") : t("app.copied"));
  setTimeout(() => button.replaceChildren(...before), 1200);
}
