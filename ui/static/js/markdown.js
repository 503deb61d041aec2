// Markdown that cannot run anything and loads nothing: raw HTML is shown as text, images become links,
// and what marked makes passes DOMPurify. A text that is still being written renders its finished
// blocks once and only its last block again.

import { marked, Renderer } from "../vendor/marked.esm.js";
import DOMPurify from "../vendor/purify.es.js";
import { copyText, h } from "./dom.js";
import { t } from "./i18n.js";

const escapeText = (text) => text.replace(/[&<>"']/g, (mark) => `&#${mark.charCodeAt(0)};`);

const renderer = new Renderer();
renderer.html = ({ text }) => escapeText(text);
renderer.image = ({ href, text }) => `<a href="${escapeText(href)}">${escapeText(text || "image")} (image)</a>`;
renderer.checkbox = ({ checked }) => (checked ? "☑ " : "☐ ");
renderer.code = ({ text, lang }) => {
  const language = /^[\w+#.-]+/.exec(lang ?? "")?.[0] ?? "";
  return `<pre><code class="language-${escapeText(language)}">${escapeText(text)}</code></pre>`;
};
const options = { gfm: true, breaks: true, renderer };

const TAGS = (
  "a b blockquote br code del em h1 h2 h3 h4 h5 h6 hr i li ol p pre s span strong sub sup table tbody td th thead tr ul"
).split(" ");
const purify = { ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "class", "align", "start"], RETURN_DOM_FRAGMENT: true };

let highlighter = null;
async function highlight(code, language) {
  if (!language) return;
  highlighter ??= import("../vendor/highlight.min.js").then((module) => module.default);
  const hljs = await highlighter;
  if (!hljs.getLanguage(language) || code.textContent.length > 50_000) return;
  // highlight.js escapes the code; its result holds only spans with classes.
  code.innerHTML = hljs.highlight(code.textContent, { language }).value;
}

function decorate(fragment, final) {
  for (const block of fragment.children) block.setAttribute("dir", "auto");
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = h("div", { class: "lp-table", tabindex: "0" });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const pre of fragment.querySelectorAll("pre")) {
    const code = pre.querySelector("code");
    const language = code?.className.replace("language-", "") ?? "";
    const copy = h("button", { class: "lp-code-copy", type: "button" }, t("app.copy"));
    copy.addEventListener("click", () => copyText(code.textContent, copy));
    const frame = h("div", { class: "lp-code", dir: "ltr" }, h("div", { class: "lp-code-head" }, h("span", {}, language), copy));
    pre.tabIndex = 0; // A wide one scrolls, by the keyboard too.
    pre.replaceWith(frame);
    frame.append(pre);
    if (final && code) highlight(code, language);
  }
  return fragment;
}

function render(tokens, final) {
  return decorate(DOMPurify.sanitize(marked.parser(tokens, options), purify), final);
}

/** A text in an element, which may grow. */
export class MarkdownText {
  constructor(element) {
    this.element = element;
    this.tail = ""; // the source of what may still change
    this.text = "";
    this.place = h("div", { class: "lp-tail" });
    element.replaceChildren(this.place);
    this.frame = 0;
    this.onGrow = null;
  }

  /** Add to the text; what is drawn is gathered once a frame. */
  append(text) {
    this.text += text;
    this.tail += text.replace(/\r\n?/g, "\n");
    if (!this.frame && text) this.frame = requestAnimationFrame(() => this.draw(false));
  }

  /** Replace the whole text. */
  set(text) {
    if (text === this.text) return;
    this.text = "";
    this.tail = "";
    this.place = h("div", { class: "lp-tail" });
    this.element.replaceChildren(this.place);
    this.append(text);
    if (this.finished) this.finish();
  }

  /** The text is complete: draw all of it. */
  finish() {
    this.finished = true;
    this.draw(true);
  }

  draw(final) {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    if (!final && this.drawOpenCode()) {
      this.onGrow?.();
      return;
    }
    this.openCode = null;
    const tokens = marked.lexer(this.tail, options);
    let last = tokens.length - 1;
    while (last > 0 && tokens[last].type === "space") last -= 1;
    const settled = final ? tokens : tokens.slice(0, last);
    const rest = final ? [] : tokens.slice(last);
    if (settled.length) {
      this.place.before(render(settled, true));
      this.tail = rest.map((token) => token.raw).join("");
    }
    this.place.replaceChildren(rest.length ? render(rest, false) : "");
    this.onGrow?.();
  }

  /** A long code block that has no end yet only gets text added. Returns whether that was all. */
  drawOpenCode() {
    const fence = /^ {0,3}(`{3,}|~{3,})[^\n`]*\n/.exec(this.tail);
    if (!fence || new RegExp(`\\n {0,3}${fence[1]}+[ \\t]*(\\n|$)`).test(this.tail.slice(fence[0].length - 1))) {
      return false;
    }
    const body = this.tail.slice(fence[0].length);
    const code = this.openCode && this.place.contains(this.openCode) ? this.openCode : null;
    if (!code) {
      this.place.replaceChildren(render(marked.lexer(this.tail, options), false));
      this.openCode = this.place.querySelector("code");
      return Boolean(this.openCode);
    }
    const shown = code.textContent.length;
    if (code.lastChild instanceof Text && body.length >= shown) code.lastChild.appendData(body.slice(shown));
    else code.textContent = body;
    return true;
  }
}
