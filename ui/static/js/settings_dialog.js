// The settings of the page: how it looks, what new conversations begin with, the data, who is logged in, the keys.

import { openDialog } from "./dialog.js";
import { copyText, h } from "./dom.js";
import { LANGUAGES, language, t } from "./i18n.js";
import { defaults, setDefault } from "./settings.js";
import { SHORTCUTS } from "./shortcuts.js";
import { chooseFile, exportAll } from "./transfer.js";

const REOPEN = "open-settings";

/** state: /api/state or null. transfer: what an import does afterwards. changed(): a default is another one. */
export function openSettingsDialog({ state, transfer, changed }) {
  const dialog = openDialog(
    t("settings.title"),
    look(),
    newConversations(changed),
    data(state, () => (dialog.close(), chooseFile(transfer))),
    account(state),
    keys(),
    h("p", { class: "lp-version" }, t("settings.version", { version: state?.version ?? "" })),
  );
}

/** Whether the page was loaded anew out of the settings, for another language. */
export function shouldReopen() {
  const wanted = sessionStorage.getItem(REOPEN) !== null;
  sessionStorage.removeItem(REOPEN);
  return wanted;
}

function section(title, ...content) {
  return h("section", {}, h("h3", {}, t(title)), ...content);
}

function line(label, control, id) {
  control.id = id;
  return h("div", { class: "lp-line" }, h("label", { for: id }, t(label)), control);
}

function choice(options, value, onChange) {
  const select = h("select", { class: "lp-btn" }, ...options.map(([code, name]) => h("option", { value: code }, name)));
  select.value = value;
  select.addEventListener("change", () => onChange(select.value));
  return select;
}

function look() {
  const preferences = globalThis.localpagedPreferences;
  const sizes = preferences.SIZES.map((size) => [size, t(`settings.size.${size}`)]);
  const themes = ["system", "light", "dark"].map((theme) => [theme, t(`settings.theme.${theme}`)]);
  const setLanguage = (code) => {
    sessionStorage.setItem(REOPEN, "");
    preferences.setLanguage(code);
  };
  return section(
    "settings.look",
    line("settings.language", choice(Object.entries(LANGUAGES), language, setLanguage), "lp-set-language"),
    line("settings.size", choice(sizes, preferences.size, (size) => preferences.setSize(size)), "lp-set-size"),
    line("settings.theme", choice(themes, preferences.theme, (theme) => preferences.setTheme(theme)), "lp-set-theme"),
  );
}

function newConversations(changed) {
  const kept = defaults();
  const set = (name, value) => (setDefault(name, value), changed());
  const number = (name, range) => {
    const field = h("input", { class: "lp-field", type: "number", placeholder: t("settings.last"), ...range });
    field.value = kept[name] ?? "";
    // What is not a number within the range is told by the browser and not kept.
    field.addEventListener("change", () => field.reportValidity() && set(name, field.value === "" ? null : Number(field.value)));
    return field;
  };
  const answers = [["", t("settings.last")], ...[1, 2, 3, 4, 5, 6, 7, 8].map((n) => [String(n), t("answers", { n })])];
  return section(
    "settings.new",
    line("settings.answers", choice(answers, String(kept.n ?? ""), (n) => set("n", n === "" ? null : Number(n))), "lp-set-n"),
    line("settings.temperature", number("temperature", { min: "0", max: "2", step: "0.05" }), "lp-set-temperature"),
    line("settings.longest", number("max_tokens", { min: "1", step: "1" }), "lp-set-longest"),
    h("p", { class: "lp-note" }, t("settings.new.note")),
  );
}

function data(state, load) {
  const button = (label, run) => h("button", { class: "lp-btn", type: "button", onclick: run }, t(label));
  const folder = state?.data_folder;
  const copy = h("button", { class: "lp-btn", type: "button", "aria-label": t("app.copy.text", { text: t("settings.folder") }) }, t("app.copy"));
  copy.addEventListener("click", () => copyText(folder, copy));
  return section(
    "settings.data",
    folder && h("div", { class: "lp-line" }, h("span", {}, t("settings.folder")), h("span", { class: "lp-folder" }, h("code", {}, folder), copy)),
    h(
      "div",
      { class: "lp-buttons" },
      button("transfer.import", load),
      button("transfer.json", () => exportAll("json")),
      button("transfer.markdown", () => exportAll("markdown")),
    ),
  );
}

function account(state) {
  const { user, needs_login: needed } = state ?? {};
  const who = user ? t("settings.user", { name: user }) : t(needed ? "settings.user.own" : "settings.user.none");
  const logout = h("form", { method: "post", action: "/logout" }, h("button", { class: "lp-btn" }, t("settings.logout")));
  return section("settings.account", h("div", { class: "lp-line" }, h("span", {}, who), needed && logout));
}

function keys() {
  const rows = SHORTCUTS.flatMap(([names, what]) => [h("dt", {}, ...names.map((name) => h("kbd", {}, name))), h("dd", {}, what)]);
  return section("settings.keys", h("dl", { class: "lp-keys" }, ...rows));
}
