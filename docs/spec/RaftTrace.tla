------------------------------ MODULE RaftTrace ------------------------------
(* Whether what a member did is a behaviour of Raft. `python -m tests.spec` writes the module Windows: its Traces are  *)
(* windows of what the simulator saw of one member each, a line for each step that a function of the code takes. Each  *)
(* line must be the step of Raft that it names and end in the state that the code had then. Lines that are reached are *)
(* printed: a window whose last line is not is rejected. Equal Lines, States and Messages are written once: to read    *)
(* them takes TLC longer than to compare them.                                                                         *)
EXTENDS Raft, Windows, TLC

VARIABLES t, l          \* the window, and its next line

Self == Traces[t].self
At(i, mine, other) == [j \in Server |-> IF j = i THEN mine ELSE other]
Entries(terms, confs, base) == [k \in 1..Len(terms) |-> [term |-> terms[k], conf |-> IF base + k \in confs THEN AnyConf ELSE NoConf]]
Log(L) == [base |-> L.base, baseTerm |-> L.baseTerm, entries |-> Entries(L.terms, L.confs, L.base)]
Message(n) ==
    LET m == Messages[n] IN
    IF m.type # "AppendEntries" THEN m
    ELSE [type |-> m.type, from |-> m.from, to |-> m.to, term |-> m.term, prevIndex |-> m.prevIndex, prevTerm |-> m.prevTerm,
          commit |-> m.commit, entries |-> Entries(m.terms, m.confs, m.prevIndex)]
All(numbers) == {Message(n) : n \in numbers}

NoLog == [base |-> 0, baseTerm |-> 0, entries |-> <<>>]
NoMembers == [incoming |-> {}, outgoing |-> {}, learners |-> {}]

TraceInit ==
    /\ t \in 1..Len(Traces)
    /\ l = 1
    /\ LET s == Traces[t].init
           i == Self
       IN  /\ currentTerm = At(i, s.term, 0) /\ votedFor = At(i, s.vote, 0) /\ log = At(i, Log(s.log), NoLog)
           /\ role = At(i, s.role, "Follower") /\ votes = At(i, s.votes, {})
           /\ commitIndex = At(i, s.commit, 0) /\ lastApplied = At(i, s.applied, 0)
           /\ config = At(i, s.config, NoMembers)
           /\ matchIndex = At(i, [j \in Server |-> IF j \in DOMAIN s.match THEN s.match[j] ELSE 0], [j \in Server |-> 0])
           /\ reads = At(i, s.reads, <<>>)
           /\ disk = At(i, [term |-> s.term, vote |-> s.vote, log |-> Log(s.log), conf |-> s.config, held |-> {}],
                        [term |-> 0, vote |-> 0, log |-> NoLog, conf |-> NoMembers, held |-> {}])
    /\ held = [j \in Server |-> {}] /\ writes = [j \in Server |-> <<>>] /\ messages = {}

(* What others send is not looked into: each member's own window says whether it may. A member's own promises count     *)
(* once they are on its disk. An answer that counts may not be ignored: more votes, matches and acknowledgements forbid *)
(* nothing, and to try both would double the states at each answer.                                                     *)
Arrived(i, m) == m.from = i => m \in messages
Counts(i, m) == m.success /\ m.term = currentTerm[i] /\ role[i] = "Leader" /\ m.from \in Members(config[i]) /\ m.index <= LastIndex(log[i])
CountMatch(i, m) == IF Arrived(i, m) /\ Counts(i, m) THEN HandleAppendResponse(i, m) ELSE UNCHANGED vars
CountRead(i, m) ==
    IF m.term = currentTerm[i] /\ role[i] = "Leader" /\ \E n \in 1..Len(reads[i]) : reads[i][n].ctx = m.ctx
    THEN HandleHeartbeatResponse(i, m) ELSE UNCHANGED vars
Handle(i, m) ==
    CASE m.type = "AppendResponse" -> CountMatch(i, m)
      [] m.type = "HeartbeatResponse" -> CountRead(i, m)
      [] OTHER ->
           \/ /\ Arrived(i, m)
              /\ \/ HandleRequestVote(i, m) \/ HandlePreVote(i, m) \/ LearnCommit(i, m) \/ HandleAppend(i, m)
                 \/ AnswerOldTerm(i, m) \/ HandleHeartbeat(i, m) \/ HandleSnapshot(i, m)
           \/ UNCHANGED vars
CountVote(i, m) == IF Arrived(i, m) /\ ENABLED HandleVoteResponse(i, m) THEN HandleVoteResponse(i, m) ELSE UNCHANGED vars

Step(i, e) ==
    CASE e.a = "receive" -> Handle(i, Message(e.m)) /\ held'[i] = held[i] \cup All(e.answers) /\ messages' = messages \cup All(e.sent)
      [] e.a = "updateTerm" -> UpdateTerm(i, Message(e.m))
      [] e.a = "stepDown" -> StepDown(i)
      [] e.a = "preCandidate" -> BecomePreCandidate(i)
      [] e.a = "candidate" -> (e.free \/ WonPreVote(i)) /\ BecomeCandidate(i)
      [] e.a = "leader" -> BecomeLeader(i)
      [] e.a = "vote" -> CountVote(i, Message(e.m))
      [] e.a = "propose" -> Propose(i, Entries(e.terms, e.confs, e.base)) /\ LastIndex(log[i]) = e.base
      [] e.a = "commit" -> AdvanceCommit(i, e.k)
      [] e.a = "send" -> SendMessage(i, Message(e.m)) /\ (e.waits <=> Messages[e.m].type \in Promises)
      [] e.a = "read" -> BeginRead(i, e.ctx)
      [] e.a = "answer" -> Confirmed(i, e.ctx, e.index) /\ UNCHANGED vars
      [] e.a = "apply" -> Apply(i, e.k)
      [] e.a = "conf" -> (e.conf = config[i] /\ UNCHANGED vars) \/ ApplyConf(i, e.conf)
      [] e.a = "write" -> Write(i)
      [] e.a = "noWrite" -> held[i] = {} /\ UNCHANGED vars
      [] e.a = "durable" -> Durable(i)
      [] e.a = "restart" -> Restart(i, States[e.s].commit, e.applied, e.conf)

(* Steps within the handling of a message do not tell the commit index: it may be ahead. *)
Within == {"updateTerm", "stepDown", "preCandidate", "candidate", "leader", "vote"}
EndsAs(i, a, s) ==
    /\ currentTerm'[i] = s.term /\ votedFor'[i] = s.vote /\ role'[i] = s.role
    /\ a \notin Within => commitIndex'[i] = s.commit
    /\ a # "receive" \/ (LastIndex(log'[i]) = s.last /\ LastTerm(log'[i]) = s.lastTerm)
    /\ a # "restart" \/ (LastIndex(log'[i]) = s.last /\ LastTerm(log'[i]) = s.lastTerm)

TraceNext ==
    /\ l <= Len(Traces[t].lines)
    /\ LET e == Lines[Traces[t].lines[l]] IN Step(Self, e) /\ EndsAs(Self, e.a, States[e.s])
    /\ l' = l + 1 /\ t' = t
    /\ PrintT(<<"at", t, l>>)

TraceSpec == TraceInit /\ [][TraceNext]_<<vars, t, l>>
=============================================================================
