// The server's HTTP API. Every failure is an ApiError whose message can be shown as it is.

import { t } from "./i18n.js";

export class ApiError extends Error {
  constructor(message, { status = 0, code = "offline" } = {}) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function call(method, path, body) {
  const isFile = body instanceof Blob;
  let response;
  try {
    response = await fetch(path, {
      method,
      headers: body === undefined ? {} : { "Content-Type": isFile ? "application/octet-stream" : "application/json" },
      body: body === undefined || isFile ? body : JSON.stringify(body),
      credentials: "same-origin",
    });
  } catch {
    throw new ApiError(t("app.away"));
  }
  if (response.status === 401) {
    location.assign("/login");
    throw new ApiError(t("app.login"), { status: 401, code: "invalid_api_key" });
  }
  const value = await response.json().catch(() => null);
  if (!response.ok) {
    const error = value?.error ?? {};
    throw new ApiError(error.message ?? t("app.answered", { status: String(response.status) }), {
      status: response.status,
      code: error.code ?? "error",
    });
  }
  return value;
}

export const getState = () => call("GET", "/api/state");
export const getKv = () => call("GET", "/api/kv?conversations=false");
export const listConversations = (query) => call("GET", `/api/conversations?query=${encodeURIComponent(query)}`);
export const createConversation = (fields) => call("POST", "/api/conversations", fields);
export const changeConversation = (id, fields) => call("PATCH", `/api/conversations/${id}`, fields);
export const deleteConversation = (id) => call("DELETE", `/api/conversations/${id}`);
export const duplicateConversation = (id) => call("POST", `/api/conversations/${id}/duplicate`, {});
export const importFile = (file) => call("POST", "/api/import", file);
export const restoreConversation = (id) => call("POST", `/api/conversations/${id}/restore`, {});
export const getConversation = (id, before) =>
  call("GET", `/api/conversations/${id}${before ? `?before=${before}` : ""}`);
export const sendMessage = (id, parent, text, sampling) =>
  call("POST", `/api/conversations/${id}/messages`, { parent, text, sampling });
export const regenerate = (message, sampling) => call("POST", `/api/messages/${message}/regenerate`, { sampling });
export const continueAnswer = (message, sampling) => call("POST", `/api/messages/${message}/continue`, { sampling });
export const choose = (message) => call("POST", `/api/messages/${message}/choose`, {});
export const reopen = (message) => call("POST", `/api/messages/${message}/reopen`, {});
export const deleteMessages = (ids) => call("POST", "/api/messages/delete", { ids });
export const stop = (job, candidates = null) => call("POST", `/api/jobs/${job}/stop`, { candidates });
export const estimate = (turn) => call("GET", `/api/kv/estimate?${new URLSearchParams(turn)}`);
export const countTokens = (draft) => call("POST", "/api/count", draft);

/** Follow a job to its end; the browser reconnects by itself where it left off. Returns a function that leaves. */
export function followJob(job, { onEvent, onLost, onBack, onGone }) {
  const source = new EventSource(`/api/jobs/${job}/events`);
  let lost = false;
  source.onopen = () => {
    if (lost) onBack();
    lost = false;
  };
  source.onmessage = (message) => {
    const event = JSON.parse(message.data);
    onEvent(event);
    if (event.type === "done" || (event.type === "snapshot" && event.phase === "done")) source.close();
  };
  source.onerror = () => {
    if (source.readyState === EventSource.CLOSED) {
      onGone();
    } else if (!lost) {
      lost = true;
      onLost();
    }
  };
  return () => source.close();
}
