// What can be done with a conversation from the list, and the menu that offers it.

import * as api from "./api.js";
import { toast } from "./dom.js";
import { t } from "./i18n.js";
import { openMenu } from "./menu.js";
import { titleOf } from "./conversation_row.js";
import { exportOne } from "./transfer.js";

export class ConversationCommands {
  /** on: {changed(), rename(one), open(id), removed(id)}. */
  constructor(on) {
    this.on = on;
  }

  /** Open the menu of a conversation. back(): where the focus goes afterwards. */
  menu(one, at, back) {
    const change = (fields) => () => this.change(one, fields);
    const items = [
      { label: t("row.rename"), picture: "pencil", run: () => this.on.rename(one) },
      !one.archived && { label: t(one.pinned ? "row.unpin" : "row.pin"), picture: "pin", run: change({ pinned: !one.pinned }) },
      { label: t(one.archived ? "row.unarchive" : "row.archive"), picture: "archive", run: () => this.archive(one) },
      { label: t("row.duplicate"), picture: "copy", run: () => this.duplicate(one) },
      null,
      { label: t("row.json"), picture: "save", run: () => exportOne(one.id, "json") },
      { label: t("row.markdown"), picture: "save", run: () => exportOne(one.id, "markdown") },
      null,
      { label: t("row.delete"), picture: "trash", danger: true, run: () => this.remove(one) },
    ];
    openMenu({ items: items.filter((item) => item !== false), label: titleOf(one), at, back });
  }

  /** Do something and draw the list anew; the reader is told of a failure. Returns whether it worked. */
  async attempt(act) {
    try {
      await act();
      return true;
    } catch (error) {
      toast(error.message);
      return false;
    } finally {
      this.on.changed();
    }
  }

  change(one, fields) {
    return this.attempt(() => api.changeConversation(one.id, fields));
  }

  async archive(one) {
    if (!(await this.change(one, { archived: !one.archived })) || one.archived) return;
    const back = { archived: false, pinned: one.pinned };
    toast(t("row.archived", { title: short(one) }), { label: t("app.undo"), run: () => this.change(one, back) });
  }

  duplicate(one) {
    return this.attempt(async () => {
      this.on.open((await api.duplicateConversation(one.id)).id);
      toast(t("row.duplicated"));
    });
  }

  async remove(one) {
    if (!(await this.attempt(() => api.deleteConversation(one.id)))) return;
    this.on.removed(one.id);
    const restore = async () => {
      await api.restoreConversation(one.id);
      this.on.open(one.id);
    };
    toast(t("row.deleted", { title: short(one) }), { label: t("app.undo"), run: () => this.attempt(restore) });
  }
}

function short(one) {
  const title = titleOf(one);
  return title.length > 41 ? `${title.slice(0, 40).trimEnd()}…` : title;
}
