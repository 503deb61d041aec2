// Conversations into files and out of them: downloads, and what came of an import, in a dialog.

import * as api from "./api.js";
import { openDialog } from "./dialog.js";
import { h } from "./dom.js";
import { count, t } from "./i18n.js";

/** Save what the server sends as a file under the name that it gives. */
export function download(path) {
  const link = h("a", { href: path, download: "" });
  document.body.append(link);
  link.click();
  link.remove();
}

export const exportOne = (id, format) => download(`/api/conversations/${id}/export?format=${format}`);
export const exportAll = (format) => download(`/api/export?format=${format}`);

/** Let the reader choose a file and import it. after: {changed(), open(id)}. */
export function chooseFile(after) {
  const field = h("input", { type: "file", accept: ".json,.zip,application/json,application/zip", class: "lp-hidden", id: "lp-file", tabindex: "-1", "aria-hidden": "true" });
  field.addEventListener("change", () => {
    const [file] = field.files;
    field.remove();
    if (file) importFile(file, after);
  });
  field.addEventListener("cancel", () => field.remove());
  document.querySelector("#lp-file")?.remove();
  document.querySelector(".lp-frame").append(field);
  field.click();
}

/** Send a file to the server and tell in a dialog what came of it. */
export async function importFile(file, after) {
  const dialog = openDialog(t("transfer.title"), h("p", { role: "status" }, t("transfer.reading", { name: file.name })));
  try {
    const told = await api.importFile(file);
    after.changed();
    dialog.replace(...result(file, told, () => (dialog.close(), after.open(told.imported.at(-1)))));
  } catch (error) {
    dialog.replace(
      h("p", { class: "lp-problem", role: "alert" }, h("b", {}, t("transfer.nothing")), h("br"), t("transfer.failed", { name: file.name, message: error.message })),
    );
  }
}

function result(file, told, open) {
  const { imported, skipped, source } = told;
  const cell = (tag, text, name) => h(tag, { class: name }, text);
  const rows = skipped.map((loss) => h("tr", {}, cell("td", loss.what), cell("td", loss.why), cell("td", count(loss.count), "number")));
  const head = h("tr", {}, cell("th", t("transfer.what")), cell("th", t("transfer.why")), cell("th", t("transfer.count"), "number"));
  return [
    h("p", { class: "lp-result", role: "status" }, h("b", {}, t("transfer.done", { n: imported.length }))),
    h("p", {}, t("transfer.from", { name: file.name, source })),
    rows.length ? h("h3", {}, t("transfer.skipped")) : h("p", {}, t("transfer.whole")),
    rows.length ? h("div", { class: "lp-table", tabindex: "0", role: "group", "aria-label": t("transfer.skipped") }, h("table", {}, h("thead", {}, head), h("tbody", {}, ...rows))) : null,
    imported.length ? h("div", { class: "lp-dialog-end" }, h("button", { class: "lp-btn primary", type: "button", onclick: open }, t("transfer.open"))) : null,
  ].filter(Boolean);
}

/** Take a file that is dropped on an element. */
export function dropFiles(element, after) {
  const carriesFile = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  let depth = 0;
  const show = (on) => element.classList.toggle("dropping", on);
  element.addEventListener("dragenter", (event) => carriesFile(event) && show((depth += 1) > 0));
  element.addEventListener("dragleave", (event) => carriesFile(event) && show((depth -= 1) > 0));
  element.addEventListener("dragover", (event) => carriesFile(event) && event.preventDefault());
  element.addEventListener("drop", (event) => {
    if (!carriesFile(event)) return;
    event.preventDefault();
    show((depth = 0) > 0);
    const { files } = event.dataTransfer;
    if (files.length === 1) importFile(files[0], after);
    else openDialog(t("transfer.title"), h("p", { role: "alert" }, t("transfer.one")));
  });
}
