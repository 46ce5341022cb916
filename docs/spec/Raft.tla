-------------------------------- MODULE Raft --------------------------------
(* Raft as raftkv has it: Ongaro and Ousterhout 2014, with PreVote, CheckQuorum, membership changes through joint      *)
(* consensus, learners, snapshots and read rounds of Ongaro's thesis. Disks acknowledge late: promises leave a member  *)
(* only after the write that they depend on. raftkv/raft/core.py is the code; `python -m tests.spec` compares.         *)
(*                                                                                                                     *)
(* Time is left out: a timeout may come at any moment, so CheckQuorum is that a leader may step down (StepDown) and a  *)
(* voter may ignore a request. So is flow control: a leader may send any part of its log.                              *)
EXTENDS Naturals, Sequences, FiniteSets

CONSTANTS Server,         \* ids of all members that ever are
          Nil,            \* no member
          NoConf,         \* an entry that changes no configuration
          AnyConf         \* an entry that changes the configuration in a way that a trace does not tell

VARIABLES currentTerm, votedFor, log,   \* [Server -> ...], as in the paper; kept on disk
          role,           \* "Follower", "PreCandidate", "Candidate" or "Leader"
          commitIndex, lastApplied,
          config,         \* the configuration in force: changed when its entry is applied
          votes,          \* who granted this campaign its vote (or pre-vote)
          matchIndex,     \* of a leader: how far each log is known to match, on disk
          reads,          \* of a leader: read rounds, oldest first
          held,           \* messages that wait for the next write
          writes,         \* writes handed to the disk and not acknowledged, oldest first
          disk,           \* what a crash leaves
          messages        \* all that was ever sent: they are lost, doubled and late as the network likes

elections == <<role, votes>>
leading == <<matchIndex, reads>>
storage == <<writes, disk>>
vars == <<currentTerm, votedFor, log, elections, commitIndex, lastApplied, config, leading, held, storage, messages>>

Max(a, b) == IF a > b THEN a ELSE b
Min(a, b) == IF a < b THEN a ELSE b

-----------------------------------------------------------------------------
(* Logs. What a snapshot covers is gone: [base |-> its index, baseTerm |-> its term, entries |-> those behind it].     *)

LastIndex(L) == L.base + Len(L.entries)
Has(L, k) == L.base <= k /\ k <= LastIndex(L)
TermAt(L, k) == IF k = L.base THEN L.baseTerm ELSE IF Has(L, k) THEN L.entries[k - L.base].term ELSE 0
LastTerm(L) == TermAt(L, LastIndex(L))
Matches(L, k, t) == Has(L, k) /\ TermAt(L, k) = t
IsConf(L, k) == k > L.base /\ k <= LastIndex(L) /\ L.entries[k - L.base].conf # NoConf
UpToDate(L, index, term) == term > LastTerm(L) \/ (term = LastTerm(L) /\ index >= LastIndex(L))

(* Entries that are there already stay: a late message removes nothing (section 5.3). *)
Extend(L, prev, entries) ==
    LET new == {k \in 1..Len(entries) : ~Matches(L, prev + k, entries[k].term)}
        first == CHOOSE k \in new : \A other \in new : k <= other
    IN  IF new = {} THEN L
        ELSE [L EXCEPT !.entries = SubSeq(@, 1, prev + first - 1 - L.base) \o SubSeq(entries, first, Len(entries))]

(* Configurations: two sets of voters while they change (thesis 4.3), and learners. *)
Voters(c) == c.incoming \cup c.outgoing
Members(c) == Voters(c) \cup c.learners
Majority(voters, S) == voters = {} \/ 2 * Cardinality(voters \cap S) > Cardinality(voters)
Quorum(c, S) == Majority(c.incoming, S) /\ Majority(c.outgoing, S)
Changed(a, b) == Cardinality((a \ b) \cup (b \ a))
Legal(old, new) ==      \* one voter at a time, or into and out of a joint configuration
    /\ new.incoming # {}
    /\ \/ old.outgoing = {} /\ new.outgoing = {} /\ Changed(old.incoming, new.incoming) <= 1
       \/ old.outgoing = {} /\ new.outgoing = old.incoming
       \/ old.outgoing # {} /\ new.outgoing = {} /\ new.incoming = old.incoming
Unapplied(i, upTo) == \E k \in lastApplied[i] + 1..upTo : IsConf(log[i], k)
CommittedInTerm(i) == TermAt(log[i], commitIndex[i]) = currentTerm[i]

-----------------------------------------------------------------------------
(* Promises wait for the disk; everything else may leave at once. *)

Promises == {"RequestVote", "VoteResponse", "PreVoteResponse", "AppendResponse"}
Answer(i, m) == held' = [held EXCEPT ![i] = @ \cup {m}] /\ UNCHANGED messages
Silent == UNCHANGED <<held, messages>>
Response(kind, i, m, term, granted, commit) ==
    [type |-> kind, from |-> i, to |-> m.from, term |-> term, granted |-> granted,
     commit |-> commit, commitTerm |-> IF granted THEN 0 ELSE TermAt(log[i], commit)]
Ack(i, to, index, success) ==
    [type |-> "AppendResponse", from |-> i, to |-> to, term |-> currentTerm[i], index |-> index, success |-> success]

-----------------------------------------------------------------------------
(* Elections *)

Promotable(i) == i \in Voters(config[i])     \* also one that joint consensus demotes
MayCampaign(i) == role[i] # "Leader" /\ Promotable(i) /\ ~Unapplied(i, commitIndex[i])

BecomePreCandidate(i) ==
    /\ MayCampaign(i)
    /\ role' = [role EXCEPT ![i] = "PreCandidate"]
    /\ votes' = [votes EXCEPT ![i] = {}]
    /\ UNCHANGED <<currentTerm, votedFor, log, commitIndex, lastApplied, config, leading, held, storage, messages>>

BecomeCandidate(i) ==
    /\ MayCampaign(i)
    /\ role' = [role EXCEPT ![i] = "Candidate"]
    /\ currentTerm' = [currentTerm EXCEPT ![i] = @ + 1]
    /\ votedFor' = [votedFor EXCEPT ![i] = i]
    /\ votes' = [votes EXCEPT ![i] = {}]
    /\ reads' = [reads EXCEPT ![i] = <<>>]
    /\ UNCHANGED <<log, commitIndex, lastApplied, config, matchIndex, held, storage, messages>>

WonPreVote(i) == role[i] = "PreCandidate" /\ Quorum(config[i], votes[i])

(* Its first entry is empty. *)
BecomeLeader(i) ==
    /\ role[i] = "Candidate"
    /\ Quorum(config[i], votes[i])
    /\ role' = [role EXCEPT ![i] = "Leader"]
    /\ log' = [log EXCEPT ![i].entries = Append(@, [term |-> currentTerm[i], conf |-> NoConf])]
    /\ matchIndex' = [matchIndex EXCEPT ![i] = [j \in Server |-> IF j = i THEN LastIndex(log[i]) ELSE 0]]
    /\ reads' = [reads EXCEPT ![i] = <<>>]
    /\ Answer(i, Ack(i, i, LastIndex(log[i]) + 1, TRUE))
    /\ UNCHANGED <<currentTerm, votedFor, votes, commitIndex, lastApplied, config, storage>>

(* A later term is followed at once, except where it is only asked about. *)
UpdateTerm(i, m) ==
    /\ m.term > currentTerm[i]
    /\ m.type # "PreVote" /\ ~(m.type = "PreVoteResponse" /\ m.granted)
    /\ currentTerm' = [currentTerm EXCEPT ![i] = m.term]
    /\ votedFor' = [votedFor EXCEPT ![i] = Nil]
    /\ role' = [role EXCEPT ![i] = "Follower"]
    /\ reads' = [reads EXCEPT ![i] = <<>>]
    /\ UNCHANGED <<log, votes, commitIndex, lastApplied, config, matchIndex, held, storage, messages>>

(* An election is lost, a leader hears no quorum (CheckQuorum) or is removed, a candidate hears of a leader. *)
StepDown(i) ==
    /\ role' = [role EXCEPT ![i] = "Follower"]
    /\ reads' = [reads EXCEPT ![i] = <<>>]
    /\ UNCHANGED <<currentTerm, votedFor, log, votes, commitIndex, lastApplied, config, matchIndex, held, storage, messages>>

(* A voter may refuse although it could grant: it knows a leader (CheckQuorum). *)
HandleRequestVote(i, m) ==
    /\ m.type = "RequestVote"
    /\ \/ /\ m.term = currentTerm[i] /\ votedFor[i] \in {Nil, m.from}
          /\ UpToDate(log[i], m.lastIndex, m.lastTerm)
          /\ votedFor' = [votedFor EXCEPT ![i] = m.from]
          /\ Answer(i, Response("VoteResponse", i, m, m.term, TRUE, 0))
       \/ /\ m.term = currentTerm[i]
          /\ Answer(i, Response("VoteResponse", i, m, currentTerm[i], FALSE, commitIndex[i]))
          /\ UNCHANGED votedFor
    /\ UNCHANGED <<currentTerm, log, elections, commitIndex, lastApplied, config, leading, storage>>

HandlePreVote(i, m) ==
    /\ m.type = "PreVote"
    /\ \/ /\ m.term > currentTerm[i] \/ votedFor[i] \in {Nil, m.from}
          /\ m.term >= currentTerm[i]
          /\ UpToDate(log[i], m.lastIndex, m.lastTerm)
          /\ Answer(i, Response("PreVoteResponse", i, m, m.term, TRUE, 0))
       \/ Answer(i, Response("PreVoteResponse", i, m, currentTerm[i], FALSE, commitIndex[i]))
       \/ m.term < currentTerm[i] /\ Answer(i, Response("PreVoteResponse", i, m, currentTerm[i], FALSE, 0))
    /\ UNCHANGED <<currentTerm, votedFor, log, elections, commitIndex, lastApplied, config, leading, storage>>

(* The first answer of a member counts, and only one to the campaign that is running. *)
HandleVoteResponse(i, m) ==
    /\ \/ role[i] = "Candidate" /\ m.type = "VoteResponse" /\ m.term = currentTerm[i]
       \/ role[i] = "PreCandidate" /\ m.type = "PreVoteResponse" /\ m.term = currentTerm[i] + IF m.granted THEN 1 ELSE 0
    /\ votes' = IF m.granted THEN [votes EXCEPT ![i] = @ \cup {m.from}] ELSE votes
    /\ Silent
    /\ UNCHANGED <<currentTerm, votedFor, log, role, commitIndex, lastApplied, config, leading, storage>>

(* That an entry is committed is a fact in every term: a refused vote tells it. *)
LearnCommit(i, m) ==
    /\ m.type \in {"VoteResponse", "PreVoteResponse"} /\ ~m.granted
    /\ role[i] # "Leader"
    /\ m.commit > commitIndex[i] /\ Matches(log[i], m.commit, m.commitTerm)
    /\ commitIndex' = [commitIndex EXCEPT ![i] = m.commit]
    /\ Silent
    /\ UNCHANGED <<currentTerm, votedFor, log, elections, lastApplied, config, leading, storage>>

-----------------------------------------------------------------------------
(* Replication *)

(* A leader appends entries; a change of the configuration only when all before it are applied (thesis 4.1). *)
Propose(i, entries) ==
    /\ role[i] = "Leader"
    /\ i \in Members(config[i])
    /\ \A k \in 1..Len(entries) : entries[k].term = currentTerm[i]
    /\ LET changes == {k \in 1..Len(entries) : entries[k].conf # NoConf}
       IN  /\ Cardinality(changes) <= 1
           /\ changes # {} => ~Unapplied(i, LastIndex(log[i]))
    /\ log' = [log EXCEPT ![i].entries = @ \o entries]
    /\ Answer(i, Ack(i, i, LastIndex(log[i]) + Len(entries), TRUE))
    /\ UNCHANGED <<currentTerm, votedFor, elections, commitIndex, lastApplied, config, leading, storage>>

HandleAppend(i, m) ==
    /\ m.type = "AppendEntries" /\ m.term = currentTerm[i] /\ role[i] = "Follower"
    /\ LET last == m.prevIndex + Len(m.entries)
           known == m.prevIndex < commitIndex[i]
           fits == ~known /\ Matches(log[i], m.prevIndex, m.prevTerm)
       IN  /\ log' = IF fits THEN [log EXCEPT ![i] = Extend(@, m.prevIndex, m.entries)] ELSE log
           /\ commitIndex' = IF fits THEN [commitIndex EXCEPT ![i] = Max(@, Min(m.commit, last))] ELSE commitIndex
           /\ \/ Answer(i, Ack(i, m.from, IF known THEN commitIndex[i] ELSE IF fits THEN last ELSE m.prevIndex,
                               known \/ fits))
              \/ fits /\ m.entries = <<>> /\ Silent     \* a quiet one only tells the commit index
    /\ UNCHANGED <<currentTerm, votedFor, elections, lastApplied, config, leading, storage>>

(* A deposed leader is told the term. *)
AnswerOldTerm(i, m) ==
    /\ m.type \in {"AppendEntries", "Heartbeat"} /\ m.term < currentTerm[i]
    /\ Answer(i, Ack(i, m.from, 0, TRUE))
    /\ UNCHANGED <<currentTerm, votedFor, log, elections, commitIndex, lastApplied, config, leading, storage>>

HandleAppendResponse(i, m) ==
    /\ m.type = "AppendResponse" /\ m.term = currentTerm[i] /\ role[i] = "Leader"
    /\ m.success /\ m.from \in Members(config[i])
    /\ m.index <= LastIndex(log[i])
    /\ matchIndex' = [matchIndex EXCEPT ![i][m.from] = Max(@, m.index)]
    /\ Silent
    /\ UNCHANGED <<currentTerm, votedFor, log, elections, commitIndex, lastApplied, config, reads, storage>>

(* By counting only entries of the own term (Figure 8); the leader counts its own disk like another's. *)
AdvanceCommit(i, k) ==
    /\ role[i] = "Leader"
    /\ k > commitIndex[i] /\ TermAt(log[i], k) = currentTerm[i]
    /\ Quorum(config[i], {j \in Server : matchIndex[i][j] >= k})
    /\ commitIndex' = [commitIndex EXCEPT ![i] = k]
    /\ Silent
    /\ UNCHANGED <<currentTerm, votedFor, log, elections, lastApplied, config, leading, storage>>

HandleHeartbeat(i, m) ==
    /\ m.type = "Heartbeat" /\ m.term = currentTerm[i] /\ role[i] = "Follower"
    /\ m.commit <= LastIndex(log[i])
    /\ commitIndex' = [commitIndex EXCEPT ![i] = Max(@, m.commit)]
    /\ messages' = messages \cup {[type |-> "HeartbeatResponse", from |-> i, to |-> m.from, term |-> m.term, ctx |-> m.ctx]}
    /\ UNCHANGED <<currentTerm, votedFor, log, elections, lastApplied, config, leading, held, storage>>

HandleSnapshot(i, m) ==
    /\ m.type = "InstallSnapshot" /\ m.term = currentTerm[i] /\ role[i] = "Follower"
    /\ \/ /\ Answer(i, Ack(i, m.from, commitIndex[i], TRUE))              \* of no use here, or not yet
          /\ UNCHANGED <<log, commitIndex, config>>
       \/ /\ m.index > commitIndex[i] /\ Matches(log[i], m.index, m.lastTerm)
          /\ commitIndex' = [commitIndex EXCEPT ![i] = m.index]
          /\ Answer(i, Ack(i, m.from, m.index, TRUE))
          /\ UNCHANGED <<log, config>>
       \/ /\ m.index > commitIndex[i] /\ ~Matches(log[i], m.index, m.lastTerm) /\ i \in Members(m.conf)
          /\ log' = [log EXCEPT ![i] = [base |-> m.index, baseTerm |-> m.lastTerm, entries |-> <<>>]]
          /\ commitIndex' = [commitIndex EXCEPT ![i] = m.index]
          /\ config' = [config EXCEPT ![i] = m.conf]
          /\ Answer(i, Ack(i, m.from, m.index, TRUE))
    /\ UNCHANGED <<currentTerm, votedFor, elections, lastApplied, leading, storage>>

-----------------------------------------------------------------------------
(* What a member may send of its own accord. *)

MaySend(i, m) ==
    /\ m.from = i
    /\ CASE m.type = "RequestVote" -> /\ role[i] = "Candidate" /\ m.term = currentTerm[i]
                                      /\ m.lastIndex = LastIndex(log[i]) /\ m.lastTerm = LastTerm(log[i])
         [] m.type = "PreVote" -> /\ role[i] = "PreCandidate" /\ m.term = currentTerm[i] + 1
                                  /\ m.lastIndex = LastIndex(log[i]) /\ m.lastTerm = LastTerm(log[i])
         [] m.type = "VoteResponse" -> m.granted /\ m.to = i /\ votedFor[i] = i /\ m.term = currentTerm[i]
         [] m.type = "PreVoteResponse" -> m.granted /\ m.to = i /\ m.term = currentTerm[i] + 1
         [] m.type = "AppendEntries" ->
              /\ role[i] = "Leader" /\ Promotable(i) /\ m.term = currentTerm[i] /\ m.commit <= commitIndex[i]
              /\ m.prevIndex + Len(m.entries) <= LastIndex(log[i])
              /\ Has(log[i], m.prevIndex) => /\ TermAt(log[i], m.prevIndex) = m.prevTerm
                                             /\ \A k \in 1..Len(m.entries) : m.entries[k] = log[i].entries[m.prevIndex + k - log[i].base]
         [] m.type = "Heartbeat" ->     \* commits no more than what is known to match
              /\ role[i] = "Leader" /\ Promotable(i) /\ m.term = currentTerm[i] /\ m.commit <= Min(commitIndex[i], matchIndex[i][m.to])
              /\ m.ctx = 0 \/ \E n \in 1..Len(reads[i]) : reads[i][n].ctx = m.ctx
         [] m.type = "InstallSnapshot" ->
              /\ role[i] = "Leader" /\ m.term = currentTerm[i] /\ m.index <= commitIndex[i]
              /\ Has(log[i], m.index) => TermAt(log[i], m.index) = m.lastTerm
         [] m.type = "TimeoutNow" -> role[i] = "Leader" /\ m.term = currentTerm[i]

SendMessage(i, m) ==
    /\ MaySend(i, m)
    /\ IF m.type \in Promises THEN Answer(i, m) ELSE messages' = messages \cup {m} /\ UNCHANGED held
    /\ UNCHANGED <<currentTerm, votedFor, log, elections, commitIndex, lastApplied, config, leading, storage>>

-----------------------------------------------------------------------------
(* Reads (thesis 6.4): a quorum that answers a round says that no later leader had committed when it began. *)

BeginRead(i, ctx) ==
    /\ role[i] = "Leader" /\ CommittedInTerm(i)
    /\ \A n \in 1..Len(reads[i]) : reads[i][n].ctx # ctx
    /\ reads' = [reads EXCEPT ![i] = Append(@, [ctx |-> ctx, index |-> commitIndex[i], acks |-> {i}])]
    /\ Silent
    /\ UNCHANGED <<currentTerm, votedFor, log, elections, commitIndex, lastApplied, config, matchIndex, storage>>

HandleHeartbeatResponse(i, m) ==
    /\ m.type = "HeartbeatResponse" /\ m.term = currentTerm[i] /\ role[i] = "Leader"
    /\ \E n \in 1..Len(reads[i]) :     \* whoever answers a round has answered all before it
         /\ reads[i][n].ctx = m.ctx
         /\ reads' = [reads EXCEPT ![i] = [k \in 1..Len(@) |-> IF k <= n THEN [@[k] EXCEPT !.acks = @ \cup {m.from}] ELSE @[k]]]
    /\ Silent
    /\ UNCHANGED <<currentTerm, votedFor, log, elections, commitIndex, lastApplied, config, matchIndex, storage>>

Confirmed(i, ctx, index) ==
    \/ \E n \in 1..Len(reads[i]) : reads[i][n].ctx = ctx /\ reads[i][n].index = index /\ Quorum(config[i], reads[i][n].acks)
    \/ Voters(config[i]) = {i} /\ role[i] = "Leader" /\ CommittedInTerm(i) /\ index = commitIndex[i]

-----------------------------------------------------------------------------
(* Applying, disks, crashes *)

Apply(i, k) ==
    /\ lastApplied[i] <= k /\ k <= commitIndex[i]
    /\ lastApplied' = [lastApplied EXCEPT ![i] = k]
    /\ Silent
    /\ UNCHANGED <<currentTerm, votedFor, log, elections, commitIndex, config, leading, storage>>

(* A committed change comes into force. Who was no member is not known to match anywhere. *)
ApplyConf(i, new) ==
    /\ \E k \in lastApplied[i] + 1..commitIndex[i] :
         IsConf(log[i], k) /\ log[i].entries[k - log[i].base].conf \in {new, AnyConf}
    /\ Legal(config[i], new)
    /\ config' = [config EXCEPT ![i] = new]
    /\ matchIndex' = [matchIndex EXCEPT ![i] = [j \in Server |-> IF j \in Members(config[i]) \cap Members(new) THEN @[j] ELSE 0]]
    /\ Silent
    /\ UNCHANGED <<currentTerm, votedFor, log, elections, commitIndex, lastApplied, reads, storage>>

(* Everything that is new goes to the disk in one write, which may overlap with others. *)
Write(i) ==
    /\ writes' = [writes EXCEPT ![i] = Append(@, [term |-> currentTerm[i], vote |-> votedFor[i], log |-> log[i],
                                                  conf |-> config[i], held |-> held[i]])]
    /\ held' = [held EXCEPT ![i] = {}]
    /\ UNCHANGED <<currentTerm, votedFor, log, elections, commitIndex, lastApplied, config, leading, disk, messages>>

Durable(i) ==
    /\ writes[i] # <<>>
    /\ disk' = [disk EXCEPT ![i] = Head(writes[i])]
    /\ messages' = messages \cup Head(writes[i]).held
    /\ writes' = [writes EXCEPT ![i] = Tail(@)]
    /\ UNCHANGED <<currentTerm, votedFor, log, elections, commitIndex, lastApplied, config, leading, held>>

(* A crash keeps what was acknowledged, and perhaps some of the writes after that. Commit and applied index may go back *)
(* to what the snapshot covers.                                                                                        *)
Restart(i, commit, applied, conf) ==
    /\ \E n \in 0..Len(writes[i]) :
         LET kept == IF n = 0 THEN disk[i] ELSE writes[i][n]
         IN  /\ currentTerm' = [currentTerm EXCEPT ![i] = kept.term]
             /\ votedFor' = [votedFor EXCEPT ![i] = kept.vote]
             /\ log' = [log EXCEPT ![i] = kept.log]
             /\ disk' = [disk EXCEPT ![i] = kept]
             /\ kept.log.base <= commit /\ commit <= LastIndex(kept.log)
    /\ applied <= commit
    /\ role' = [role EXCEPT ![i] = "Follower"]
    /\ votes' = [votes EXCEPT ![i] = {}]
    /\ reads' = [reads EXCEPT ![i] = <<>>]
    /\ commitIndex' = [commitIndex EXCEPT ![i] = commit]
    /\ lastApplied' = [lastApplied EXCEPT ![i] = applied]
    /\ config' = [config EXCEPT ![i] = conf]
    /\ writes' = [writes EXCEPT ![i] = <<>>]
    /\ held' = [held EXCEPT ![i] = {}]
    /\ UNCHANGED <<matchIndex, messages>>

Receive(i, m) ==
    \/ UpdateTerm(i, m) \/ HandleRequestVote(i, m) \/ HandlePreVote(i, m) \/ HandleVoteResponse(i, m) \/ LearnCommit(i, m)
    \/ HandleAppend(i, m) \/ AnswerOldTerm(i, m) \/ HandleAppendResponse(i, m) \/ HandleHeartbeat(i, m)
    \/ HandleHeartbeatResponse(i, m) \/ HandleSnapshot(i, m)
=============================================================================
