// What the line above the composer says of the server and its model.

import { t } from "./i18n.js";

/** [text, kind] for the composer's banner. isEmpty: the middle of the page tells of the model; isBusy: an answer does. */
export function bannerOf({ away, state }, { isEmpty, isBusy }) {
  if (away) return [t("banner.away"), "bad"];
  if (state?.engine === "dead" && !isBusy && !isEmpty) return [state.error ?? t("banner.dead"), "bad"];
  if (state?.engine === "starting" && !isEmpty) return [t("banner.loading")];
  return [""];
}
