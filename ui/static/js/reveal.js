// Show a message that a search found: the branch that it is on, and the place on the page.

import * as api from "./api.js";

/** chat: the page, with the message's conversation open. */
export async function reveal(chat, message) {
  const isOpen = () => chat.view?.open_candidates.some((one) => one.id === message);
  const isShown = () => chat.view?.turns.some((turn) => turn.message.id === message);
  if (!isShown() && !isOpen()) {
    await chat.change(() => api.choose(message));
    while (!isShown() && chat.view?.num_earlier) if (!(await chat.loadEarlier())) return;
  }
  if (isOpen() && !chat.transcript.deck?.cards.some((card) => card.message.id === message)) chat.transcript.showAll();
  const card = chat.transcript.deck?.cards.find((one) => one.message.id === message);
  const element = card?.element ?? chat.transcript.rows.get(message)?.element;
  if (!element) return;
  chat.scroller.leave();
  element.scrollIntoView({ block: card ? "nearest" : "center", behavior: "instant" });
  element.classList.add("lp-found");
  setTimeout(() => element.classList.remove("lp-found"), 2500);
}
