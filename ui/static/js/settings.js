// The sampling values and the system prompt of a conversation. A new one begins with the defaults that the reader has
// set, and otherwise with the last ones used.

export const FIRST = {
  n: 4,
  temperature: 0.8,
  top_p: 0.95,
  top_k: 0,
  min_p: 0,
  repetition_penalty: 1,
  max_tokens: 512,
  seed: null,
};

export class Settings {
  /** save(changes) stores them with the conversation. */
  constructor(save) {
    this.save = save;
    this.use(null);
  }

  /** Take up a conversation of the API, or null for a new one. */
  use(conversation) {
    this.flush();
    this.sampling = { ...FIRST, ...(conversation ? conversation.settings : { ...stored("sampling"), ...defaults() }) };
    this.systemPrompt = conversation?.system_prompt ?? "";
  }

  /** Change sampling values; they are stored a moment later. */
  set(values) {
    this.sampling = { ...this.sampling, ...values };
    this.saveSoon();
  }

  setSystemPrompt(text) {
    this.systemPrompt = text;
    this.saveSoon();
  }

  /** What differs from the first values, which is what is stored. */
  changes() {
    return Object.fromEntries(Object.entries(this.sampling).filter(([name, value]) => value !== FIRST[name]));
  }

  saveSoon() {
    clearTimeout(this.timer);
    this.pending = () => {
      this.pending = null;
      const settings = this.changes();
      remember(settings);
      this.save({ settings, system_prompt: this.systemPrompt });
    };
    this.timer = setTimeout(() => this.flush(), 300);
  }

  flush() {
    clearTimeout(this.timer);
    this.pending?.();
  }
}

/** What new conversations begin with, by the reader's wish: n, temperature, max_tokens, as far as they are set. */
export const defaults = () => stored("defaults");

/** Set one of them; null: as it was used last. */
export function setDefault(name, value) {
  const { [name]: _, ...rest } = defaults();
  try {
    localStorage.setItem("defaults", JSON.stringify(value === null ? rest : { ...rest, [name]: value }));
  } catch {
    // As below.
  }
}

function stored(name) {
  try {
    return JSON.parse(localStorage.getItem(name) ?? "{}") ?? {};
  } catch {
    return {};
  }
}

function remember(settings) {
  try {
    localStorage.setItem("sampling", JSON.stringify({ ...settings, seed: undefined }));
  } catch {
    // Then a new conversation starts with the first values.
  }
}
