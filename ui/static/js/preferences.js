// Theme, language and text size, before the first paint. A plain script: it must run before the body is drawn.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const SIZES = { small: "90%", normal: "100%", large: "115%", largest: "130%" };
  const read = (name) => {
    try {
      return localStorage.getItem(name);
    } catch {
      return null;
    }
  };
  const write = (name, value) => {
    try {
      if (value === null) localStorage.removeItem(name);
      else localStorage.setItem(name, value);
    } catch {
      // Then it lasts until the reload.
    }
  };
  const chosen = { theme: read("theme"), size: read("text-size"), language: read("language") };

  const apply = () => {
    root.dataset.theme = chosen.theme ?? (system.matches ? "dark" : "light");
    root.style.fontSize = SIZES[chosen.size] ?? "100%";
    // Gradio's own controls go by a class on the body.
    document.body?.classList.toggle("dark", root.dataset.theme === "dark");
  };
  const language = chosen.language ?? (/^ja\b/.test(navigator.language) ? "ja" : "en");
  const applyLanguage = () => root.lang === language || (root.lang = language);
  apply();
  applyLanguage();
  // Gradio sets its own.
  new MutationObserver(applyLanguage).observe(root, { attributeFilter: ["lang"] });
  system.addEventListener("change", apply);
  addEventListener("DOMContentLoaded", () => {
    apply();
    new MutationObserver(() => {
      const dark = root.dataset.theme === "dark";
      if (document.body.classList.contains("dark") !== dark) document.body.classList.toggle("dark", dark);
    }).observe(document.body, { attributeFilter: ["class"] });
  });

  globalThis.localpagedPreferences = {
    SIZES: Object.keys(SIZES),
    language,
    get theme() {
      return chosen.theme ?? "system";
    },
    get size() {
      return chosen.size in SIZES ? chosen.size : "normal";
    },
    /** theme: light, dark or system. */
    setTheme(theme) {
      chosen.theme = theme === "system" ? null : theme;
      write("theme", chosen.theme);
      apply();
    },
    toggleTheme() {
      this.setTheme(root.dataset.theme === "dark" ? "light" : "dark");
    },
    setSize(size) {
      chosen.size = size;
      write("text-size", size);
      apply();
    },
    /** The page is drawn anew in another language; what runs and what is written stay. */
    setLanguage(language) {
      write("language", language);
      location.reload();
    },
  };
})();
