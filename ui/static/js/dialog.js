// Dialogs on the browser's own: it keeps the focus inside, closes at Escape, and makes the rest of the page inert.

import { h, icon } from "./dom.js";
import { t } from "./i18n.js";

/** Show elements under a title. Returns {close, replace(...elements)}. */
export function openDialog(title, ...content) {
  const opener = document.activeElement;
  const heading = h("h2", { id: "lp-dialog-title" }, title);
  const body = h("div", { class: "lp-dialog-body" }, ...content);
  const close = () => dialog.close();
  const dialog = h(
    "dialog",
    { class: "lp-dialog", "aria-labelledby": "lp-dialog-title" },
    h("header", {}, heading, h("button", { class: "lp-tool", type: "button", title: t("app.close"), "aria-label": t("app.close"), onclick: close }, icon("close"))),
    body,
  );
  let onBackdrop = false;
  dialog.addEventListener("pointerdown", (event) => (onBackdrop = event.target === dialog));
  dialog.addEventListener("click", (event) => onBackdrop && event.target === dialog && close());
  // What is typed in a dialog is no key of the page below.
  dialog.addEventListener("keydown", (event) => event.stopPropagation());
  dialog.addEventListener("close", () => {
    dialog.remove();
    if (opener?.isConnected) opener.focus({ preventScroll: true });
  });
  document.querySelector(".lp-frame").append(dialog);
  dialog.showModal();
  return { close, replace: (...elements) => body.replaceChildren(...elements) };
}
