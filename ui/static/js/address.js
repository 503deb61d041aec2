// The conversation in the page's address.

/** Its id, or null. */
export function addressed() {
  const match = /^#\/c\/(\d+)$/.exec(location.hash);
  return match ? Number(match[1]) : null;
}

/** Where a conversation is; null: where a new one is. */
export const addressOf = (id) => (id ? `#/c/${id}` : "#/");
