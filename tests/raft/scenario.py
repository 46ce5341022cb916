"""The verbs of the golden Raft scenarios (``testdata/*.txt``): one method a verb, its docstring is its manual.

All messages pass through ``network``, a list in order of sending; a scenario decides what is delivered, dropped or
doubled. After every command the invariants of each member and of the cluster are checked.
"""

from __future__ import annotations

import re
from dataclasses import fields

from raftkv.raft.describe import STEP_LETTERS
from raftkv.raft.errors import RaftError
from raftkv.raft.log import MemoryLog
from raftkv.raft.types import (
    ConfChange,
    ConfChangeSingle,
    ConfChangeTransition,
    ConfState,
    Entry,
    HardState,
    Message,
    MessageType,
    RaftConfig,
    Ready,
    SnapshotMeta,
)

from . import describe
from .cluster_checks import ClusterChecks
from .member import FixedRandom, Member

_STEPS = {letter: step for step, letter in STEP_LETTERS.items()}

_CONFIG_FIELDS = {each.name for each in fields(RaftConfig)}


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word)


def _options(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


def _value(text: str) -> int | bool:
    return {"yes": True, "no": False}[text] if text in ("yes", "no") else int(text)


class Scenario:
    """Members by id, the network between them, and one method for each verb."""

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        self.network: list[Message] = []
        self.isolated: set[int] = set()
        self.checks = ClusterChecks()
        self.quiet = False

    def execute(self, line: str) -> str:
        """Run one command line and return what it prints."""
        verb, *words = line.split()
        output: str = getattr(self, "verb_" + verb.replace("-", "_"))(*words)
        self._check()
        return output

    def _check(self) -> None:
        for member in self.members.values():
            member.checker.check()
        self.checks.check(member.node.raft for member in self.members.values())

    # -- members -----------------------------------------------------------------------------------------------------

    def verb_cluster(self, count: str, *words: str) -> str:
        """``cluster 3 pre_vote=no``: members 1 to 3, all voting; options as in ``add``."""
        ids = [str(member) for member in range(1, int(count) + 1)]
        for member in ids:
            self.verb_add(member, f"voters={','.join(ids)}", *words)
        return ""

    def verb_add(self, id: str, *words: str) -> str:
        """``add 4 voters=1,2,3 learners=4 terms=1,1,2 snapshot=1/3 commit=4 term=2 vote=1 timeout=3``.

        ``terms``: entries with these terms (behind the snapshot); ``timeout``: ticks added to ``election_ticks``;
        and any field of ``RaftConfig``.
        """
        options = _options(list(words))
        config = {name: _value(text) for name, text in options.items() if name in _CONFIG_FIELDS}
        conf_state = ConfState(
            voters=_ids(options.get("voters", "")),
            learners=_ids(options.get("learners", "")),
            voters_outgoing=_ids(options.get("outgoing", "")),
            learners_next=_ids(options.get("learners_next", "")),
        )
        log = MemoryLog(conf_state=conf_state)
        if "snapshot" in options:
            term, index = options["snapshot"].split("/")
            log.apply_snapshot(SnapshotMeta(int(index), int(term), conf_state))
        terms = _ids(options.get("terms", ""))
        first = log.first_index()
        log.append([Entry(term, at, b"%d" % at) for at, term in enumerate(terms, first)])
        term = int(options.get("term", str(max(terms, default=log.term(log.last_index())))))
        commit = int(options.get("commit", str(first - 1)))
        log.hard_state = HardState(term, int(options.get("vote", "0")), commit)
        rng = FixedRandom(int(options.get("timeout", "0")))
        self.members[int(id)] = Member(RaftConfig(id=int(id), **config), log, rng)
        return ""

    def verb_crash(self, id: str, *words: str) -> str:
        """``crash 1 applied=3``: lose what is not durable and restart, the state machine as of ``applied``."""
        options = _options(list(words))
        member = self.members[int(id)]
        member.crash(int(options["applied"]) if "applied" in options else None)
        self.checks.forget(member.id)
        return ""

    def verb_compact(self, id: str, index: str) -> str:
        """``compact 1 7``: snapshot at 7 and drop the log up to there."""
        self.members[int(id)].compact(int(index))
        return ""

    # -- inputs ------------------------------------------------------------------------------------------------------

    def _try(self, id: str, method: str, *arguments: object) -> str:
        try:
            getattr(self.members[int(id)].node, method)(*arguments)
        except RaftError as error:
            return f"{type(error).__name__}: {error}\n"
        return ""

    def verb_tick(self, id: str, count: str = "1") -> str:
        """``tick 1 10``."""
        return "".join(self._try(id, "tick") for _ in range(int(count)))

    def verb_campaign(self, id: str) -> str:
        """``campaign 1``."""
        return self._try(id, "campaign")

    def verb_propose(self, id: str, *words: str) -> str:
        """``propose 1 a b c``: one batch of three entries; ``100*x`` is a hundred times x."""
        return self._try(id, "propose_batch", [_data(word) for word in words])

    def verb_propose_conf(self, id: str, *words: str) -> str:
        """``propose-conf 1 v4 r2 joint_explicit``; without steps: leave the joint configuration."""
        return self._try(id, "propose_conf_change", _conf_change(words))

    def verb_read(self, id: str, context: str) -> str:
        """``read 1 ctx``: ask for a linearizable read."""
        return self._try(id, "read_index", context.encode())

    def verb_transfer(self, id: str, to: str) -> str:
        """``transfer 1 2``: tell member 1 that 2 shall lead."""
        return self._try(id, "transfer_leader", int(to))

    def verb_unreachable(self, id: str, peer: str) -> str:
        """``unreachable 1 2``: report to 1 that 2 could not be reached."""
        return self._try(id, "report_unreachable", int(peer))

    def verb_snapshot_status(self, id: str, peer: str, result: str) -> str:
        """``snapshot-status 1 2 ok`` or ``failed``."""
        return self._try(id, "report_snapshot", int(peer), result == "ok")

    def verb_forget_leader(self, id: str) -> str:
        """``forget-leader 2``."""
        return self._try(id, "forget_leader")

    def verb_step(self, route: str, kind: str, *words: str) -> str:
        """``step 2->1 APPEND term=2 log=1/3 commit=2 entries=2/4:a,2/5:b``: hand a made-up message to a member."""
        sender, to = route.split("->")
        options = _options(list(words))
        log_term, _, index = options.get("log", f"0/{options.get('index', '0')}").partition("/")
        hint_term, _, hint = options.get("hint", "0/0").partition("/")
        entries = []
        for word in [each for each in options.get("entries", "").split(",") if each]:
            term, at, data = re.split("[/:]", word)
            entries.append(Entry(int(term), int(at), data.encode()))
        message = Message(
            MessageType[kind],
            to=int(to),
            from_=int(sender),
            term=int(options.get("term", "0")),
            log_term=int(log_term) or int(hint_term),
            index=int(index),
            entries=entries,
            commit=int(options.get("commit", "0")),
            reject="hint" in options or options.get("reject") == "yes",
            reject_hint=int(hint),
            context=options.get("context", "").encode(),
            quiet=options.get("quiet") == "yes",
        )
        return self._try(to, "step", message)

    # -- outputs -----------------------------------------------------------------------------------------------------

    def _send(self, messages: list[Message]) -> None:
        for message in messages:
            if message.from_ not in self.isolated and message.to not in self.isolated:
                self.network.append(message)

    def verb_ready(self, id: str) -> str:
        """``ready 1``: take a Ready and carry it out whole."""
        member = self.members[int(id)]
        if not member.node.has_ready():
            return f"{id} has nothing\n"
        ready, messages = member.work()
        self._send(messages)
        return self._show_ready(id, ready)

    def verb_take(self, id: str) -> str:
        """``take 1``: take a Ready and send its messages; the disk and the state machine wait."""
        ready = self.members[int(id)].take()
        self._send(ready.messages)
        return self._show_ready(id, ready)

    def _show_ready(self, id: str, ready: Ready) -> str:
        return f"{id} {describe.describe_ready(ready)}"

    def verb_write(self, id: str) -> str:
        """``write 1``: the oldest Ready taken is durable now; what waited for that is sent."""
        messages = self.members[int(id)].write()
        self._send(messages)
        return "".join(f"sends {describe.describe_message(message)}\n" for message in messages)

    def verb_apply(self, id: str) -> str:
        """``apply 1``: apply the oldest committed entries taken."""
        entries = self.members[int(id)].apply()
        return "".join(f"applies {describe.describe_entry(entry)}\n" for entry in entries)

    # -- network -----------------------------------------------------------------------------------------------------

    def _select(self, words: tuple[str, ...]) -> list[Message]:
        """``2`` (to 2), ``1->2``, ``1->`` (from 1), ``APPEND``: messages that fit all of the words."""
        selected = self.network
        for word in words:
            sender, arrow, to = word.partition("->")
            if arrow:
                selected = [m for m in selected if sender in ("", str(m.from_)) and to in ("", str(m.to))]
            elif word.isdigit():
                selected = [m for m in selected if m.to == int(word)]
            else:
                selected = [m for m in selected if MessageType(m.type).name == word]
        return selected

    def verb_deliver(self, *words: str) -> str:
        """``deliver 2 1->2 APPEND``: hand the messages that fit to their receivers, in order of sending."""
        selected = self._select(words)
        self.network = [message for message in self.network if message not in selected]
        return self._deliver(selected)

    def verb_duplicate(self, *words: str) -> str:
        """As ``deliver``, but the messages stay on the network and can arrive again."""
        return self._deliver(list(self._select(words)))

    def _deliver(self, messages: list[Message]) -> str:
        output = []
        for message in messages:
            output.append(describe.describe_message(message) + "\n")
            if message.to in self.members:
                output.append(self._try(str(message.to), "step", message))
        return "".join(output)

    def verb_drop(self, *words: str) -> str:
        """``drop 1->2``: lose the messages that fit."""
        selected = self._select(words)
        self.network = [message for message in self.network if message not in selected]
        return "".join(f"lost {describe.describe_message(message)}\n" for message in selected)

    def verb_isolate(self, *ids: str) -> str:
        """``isolate 3``: from now on nothing that is sent from or to 3 arrives."""
        self.isolated |= {int(word) for word in ids}
        return ""

    def verb_heal(self) -> str:
        """Ends every isolation."""
        self.isolated.clear()
        return ""

    def verb_stabilize(self, *words: str) -> str:
        """``stabilize 1 2 quiet``: these (or all) members work and exchange messages until nothing is left to do."""
        chosen = [int(word) for word in words if word != "quiet"] or sorted(self.members)
        output = []
        busy = True
        while busy:
            busy = False
            for member in chosen:
                if self.members[member].node.has_ready():
                    busy = True
                    output.append(self.verb_ready(str(member)))
            for member in chosen:
                if self._select((str(member),)):
                    busy = True
                    output.append(self.verb_deliver(str(member)))
            self._check()
        return "" if "quiet" in words else "".join(output)

    # -- views -------------------------------------------------------------------------------------------------------

    def verb_raft(self, *ids: str) -> str:
        """``raft 1 2``: role, term, vote, leader and log of these (or all) members, a line each."""
        chosen = [int(word) for word in ids] or sorted(self.members)
        return "".join(describe.describe_raft(self.members[member].node.raft) + "\n" for member in chosen)

    def verb_status(self, id: str) -> str:
        """``status 1``: also configuration and progress."""
        return describe.describe_status(self.members[int(id)].node.raft)

    def verb_log(self, *ids: str) -> str:
        """``log 1 2``: every entry."""
        return "".join(describe.describe_log(self.members[int(word)].node.raft) for word in ids)

    def verb_applied(self, *ids: str) -> str:
        """``applied 1``: what was applied in this life, empty entries left out."""
        lines = []
        for word in ids:
            history = self.members[int(word)].history
            data = [entry.data.decode("ascii", "replace") for entry in history if entry.data]
            lines.append(f"{word}: {' '.join(data)}\n")
        return "".join(lines)

    def verb_network(self) -> str:
        """What is on its way."""
        return "".join(describe.describe_message(message) + "\n" for message in self.network)


def _data(word: str) -> bytes:
    count, star, text = word.partition("*")
    return text.encode() * int(count) if star and count.isdigit() else word.encode()


def _conf_change(words: tuple[str, ...]) -> ConfChange:
    transition = ConfChangeTransition.AUTO
    changes = []
    for word in words:
        if word.startswith("joint"):
            transition = ConfChangeTransition[word.upper()]
        else:
            changes.append(ConfChangeSingle(_STEPS[word[0]], int(word[1:])))
    return ConfChange(tuple(changes), transition)
