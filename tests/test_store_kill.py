"""A process that writes is killed again and again; what it said was saved is there."""

import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from localpaged.store.store import Store

WRITER = """
import sys
from pathlib import Path
from localpaged.store.conversation_search import search_conversations
from localpaged.store.store import Store

store = Store(Path(sys.argv[1]))
chats = store.conversations
found = search_conversations(chats)
conversation = found[0].conversation if found else chats.create("kill me")
branch = chats.branch(conversation.id)
parent = branch.turns[-1].message.id if branch.turns else None
if branch.turns and branch.turns[-1].message.role == "user":
    answer = chats.add_candidates(parent, 1, None, {})[0]
    parent = answer.id
count = 0
while True:
    user = chats.add_user_message(conversation.id, parent, f"question {count}")
    print("user", user.id, flush=True)
    answer = chats.add_candidates(user.id, 1, "tiny", {})[0]
    for piece in range(5):
        answer.text += f"word{piece} " * 50
        answer.token_ids += list(range(50))
        chats.save_messages([answer])
        print("answer", answer.id, len(answer.text), flush=True)
    answer.state = "complete"
    chats.save_messages([answer])
    parent = answer.id
    count += 1
"""


@pytest.mark.slow
def test_kill_9_at_any_moment_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    for attempt in range(8):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        said = [process.stdout.readline()]
        time.sleep(0.05 + 0.037 * attempt)
        process.send_signal(signal.SIGKILL)
        said += [line for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
        process.stdout.close()
        process.wait()
        users = [int(line.split()[1]) for line in said if line.startswith("user")]
        saved = {int(line.split()[1]): int(line.split()[2]) for line in said if line.startswith("answer")}
        assert users and saved
        with closing(Store(path)) as store:
            for user in users:
                assert store.conversations.message(user).text.startswith("question")
            for answer, length in saved.items():
                message = store.conversations.message(answer)
                assert len(message.text) >= length
                assert len(message.token_ids) * 6 == len(message.text)
                assert message.state in ("complete", "interrupted")
            assert store._database.rows("PRAGMA integrity_check") == [{"integrity_check": "ok"}]
            assert store._database.rows("PRAGMA foreign_key_check") == []
