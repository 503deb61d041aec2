// Light or dark, before the first paint. A plain script: it must run before the body is drawn.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => {
    try {
      return localStorage.getItem("theme");
    } catch {
      return null;
    }
  };
  const apply = () => {
    const theme = stored() ?? (system.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    // Gradio's own controls go by a class on the body.
    document.body?.classList.toggle("dark", theme === "dark");
  };
  apply();
  system.addEventListener("change", apply);
  addEventListener("DOMContentLoaded", () => {
    apply();
    new MutationObserver(() => {
      const dark = document.documentElement.dataset.theme === "dark";
      if (document.body.classList.contains("dark") !== dark) document.body.classList.toggle("dark", dark);
    }).observe(document.body, { attributeFilter: ["class"] });
  });
  globalThis.localpagedTheme = {
    toggle() {
      const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
      try {
        localStorage.setItem("theme", next);
      } catch {
        // Then it lasts until the reload.
      }
      document.documentElement.dataset.theme = next;
      document.body.classList.toggle("dark", next === "dark");
    },
  };
})();
