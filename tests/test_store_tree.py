"""The conversation tree against a plain model, under random sequences of what people do."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from localpaged.store.store import Store


@dataclass
class Node:
    """One message of the model."""

    id: int
    parent: int | None
    role: str
    children: list[int] = field(default_factory=list)
    chosen: int | None = None


class ConversationTree(RuleBasedStateMachine):
    """Asks, answers, edits, chooses, prunes and reopens; what is shown must be what the model shows."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = Store(Path(self.folder.name) / "chats.db")
        self.nodes: dict[int, Node] = {}
        self.root = Node(0, None, "root")

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @initialize()
    def begin(self) -> None:
        self.conversation = self.store.conversations.create().id

    def place(self, node_id: int | None) -> Node:
        return self.root if node_id is None else self.nodes[node_id]

    def pick(self, data: st.DataObject, role: str) -> Node | None:
        ids = [node.id for node in self.nodes.values() if node.role == role]
        return self.nodes[data.draw(st.sampled_from(ids))] if ids else None

    def add(self, node_id: int, parent: int | None, role: str) -> None:
        self.nodes[node_id] = Node(node_id, parent, role)
        self.place(parent).children.append(node_id)

    def show(self, node_id: int | None) -> None:
        while node_id is not None:
            parent = self.nodes[node_id].parent
            self.place(parent).chosen = node_id
            node_id = parent

    @rule(data=st.data(), as_root=st.booleans())
    def ask(self, data: st.DataObject, as_root: bool) -> None:
        answer = None if as_root else self.pick(data, "assistant")
        parent = answer.id if answer else None
        message = self.store.conversations.add_user_message(self.conversation, parent, "question")
        self.add(message.id, parent, "user")
        self.show(message.id)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), count=st.integers(1, 4))
    def answer(self, data: st.DataObject, count: int) -> None:
        user = self.pick(data, "user")
        if user is None:
            return
        messages = self.store.conversations.add_candidates(user.id, count, None, {})
        for message in messages:
            message.text, message.state = "answer", "complete"
            self.add(message.id, user.id, "assistant")
        self.store.conversations.save_messages(messages)
        self.show(user.id)
        user.chosen = messages[0].id if count == 1 else None

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def choose(self, data: st.DataObject) -> None:
        node = self.nodes[data.draw(st.sampled_from(sorted(self.nodes)))]
        self.store.conversations.choose(node.id)
        self.show(node.id)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def prune(self, data: st.DataObject) -> None:
        node = self.nodes[data.draw(st.sampled_from(sorted(self.nodes)))]
        self.store.conversations.delete_messages([node.id])
        parent = self.place(node.parent)
        parent.children.remove(node.id)
        if parent.chosen == node.id:
            parent.chosen = None
        pending = [node]
        while pending:
            gone = self.nodes.pop(pending.pop().id)
            pending += [self.nodes[child] for child in gone.children]

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = Store(Path(self.folder.name) / "chats.db")

    @invariant()
    def shows_what_the_model_shows(self) -> None:
        if not hasattr(self, "conversation"):
            return
        path, open_ids, place = [], [], self.root
        while place.children:
            choice = place.chosen
            if choice is None:
                if place.role == "user" and len(place.children) > 1:
                    open_ids = place.children
                    break
                choice = place.children[-1]
            path.append((choice, list(place.children)))
            place = self.nodes[choice]
        branch = self.store.conversations.branch(self.conversation)
        assert [(turn.message.id, turn.sibling_ids) for turn in branch.turns] == path
        assert [message.id for message in branch.open_candidates] == open_ids
        leaf = path[-1][0] if path else None
        assert [message.id for message in self.store.conversations.path_to(leaf)] == [
            message_id for message_id, _ in path
        ]


ConversationTree.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestConversationTree = ConversationTree.TestCase
