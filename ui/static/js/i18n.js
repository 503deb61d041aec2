// The page's words in the reader's language. Numbers are written by Intl.

import en from "./words_en.js";
import ja from "./words_ja.js";

const DICTIONARIES = { en, ja };

/** The languages by their codes, each by its own name. */
export const LANGUAGES = { en: "English", ja: "日本語" };

const chosen = globalThis.localpagedPreferences?.language;
export const language = chosen in DICTIONARIES ? chosen : "en";
const locale = { en: "en-US", ja: "ja-JP" }[language];
const words = DICTIONARIES[language];
const plurals = new Intl.PluralRules(locale);
const numbers = new Intl.NumberFormat(locale);

export const count = (value) => numbers.format(value);

/** A number with so many digits after the point. */
export const decimal = (value, digits) =>
  new Intl.NumberFormat(locale, { minimumFractionDigits: digits, maximumFractionDigits: digits }).format(value);

/** What stands under a key, with its values put in: t("answers", {n: 4}). Numbers are formatted. */
export function t(key, values = {}) {
  const entry = words[key] ?? en[key];
  if (entry === undefined) throw new Error(`no words for ${key}`);
  const text = typeof entry === "string" ? entry : entry[plurals.select(Number(values.n)) === "one" ? "one" : "other"];
  return text.replace(/\{(\w+)\}/g, (_, name) => (typeof values[name] === "number" ? count(values[name]) : (values[name] ?? "")));
}
