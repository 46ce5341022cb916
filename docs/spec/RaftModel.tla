------------------------------ MODULE RaftModel ------------------------------
(* What TLC checks of Raft: three members, small numbers of everything (RaftModel.cfg).                                *)
EXTENDS Raft, TLC

CONSTANTS InitialVoters,        \* the others are no members at first
          TermMax, LogMax, MessagesMax, WritesMax, ReadsMax, CrashesMax,
          DepthMax,             \* steps from the beginning
          Leading,              \* begin with a leader of term 1 that has written its first entry
          Eager                 \* what a member may send it sends at once, and its disk is quick: Elections and commits alone

VARIABLES newest,       \* the largest commit index that any member has reached, when each read round began
          crashes

Founders == [incoming |-> InitialVoters, outgoing |-> {}, learners |-> {}]
Founder == CHOOSE i \in InitialVoters : TRUE
Empty == [base |-> 0, baseTerm |-> 0, entries |-> <<>>]
One == [Empty EXCEPT !.entries = <<[term |-> 1, conf |-> NoConf]>>]
First(i) == IF Leading /\ i = Founder THEN One ELSE Empty
Term == IF Leading THEN 1 ELSE 0
Vote(i) == IF Leading /\ i \in InitialVoters THEN Founder ELSE Nil

ModelInit ==
    /\ currentTerm = [i \in Server |-> Term] /\ votedFor = [i \in Server |-> Vote(i)]
    /\ log = [i \in Server |-> First(i)]
    /\ role = [i \in Server |-> IF Leading /\ i = Founder THEN "Leader" ELSE "Follower"]
    /\ commitIndex = [i \in Server |-> 0] /\ lastApplied = [i \in Server |-> 0]
    /\ config = [i \in Server |-> Founders] /\ votes = [i \in Server |-> {}]
    /\ matchIndex = [i \in Server |-> [j \in Server |-> IF j = i THEN LastIndex(First(i)) ELSE 0]]
    /\ reads = [i \in Server |-> <<>>] /\ held = [i \in Server |-> {}] /\ writes = [i \in Server |-> <<>>]
    /\ disk = [i \in Server |-> [term |-> Term, vote |-> Vote(i), log |-> First(i), conf |-> Founders, held |-> {}]]
    /\ messages = {} /\ newest = {} /\ crashes = 0

Normal(i) == <<[term |-> currentTerm[i], conf |-> NoConf]>>
(* A voter comes or goes, a learner comes, or two change at once through a joint configuration, which is left again. *)
Changes(c) ==
    IF c.outgoing # {} THEN {[c EXCEPT !.outgoing = {}]}
    ELSE {n \in [incoming : SUBSET Server \ {{}}, outgoing : {{}, c.incoming}, learners : SUBSET Server] :
            /\ n.learners \cap Voters(n) = {} /\ Legal(c, n) /\ n # c
            /\ n.outgoing # {} => Changed(n.incoming, c.incoming) > 1}

Appends(i, j) == { [type |-> "AppendEntries", from |-> i, to |-> j, term |-> currentTerm[i], prevIndex |-> k,
                    prevTerm |-> TermAt(log[i], k), entries |-> SubSeq(log[i].entries, k + 1 - log[i].base, Len(log[i].entries)),
                    commit |-> commitIndex[i]] : k \in log[i].base..LastIndex(log[i]) }
Asks(i, j) == { [type |-> kind, from |-> i, to |-> j, term |-> currentTerm[i] + IF kind = "PreVote" THEN 1 ELSE 0,
                 lastIndex |-> LastIndex(log[i]), lastTerm |-> LastTerm(log[i])] : kind \in {"PreVote", "RequestVote"} }
Beats(i, j) == { [type |-> "Heartbeat", from |-> i, to |-> j, term |-> currentTerm[i], commit |-> Min(commitIndex[i], matchIndex[i][j]),
                  ctx |-> IF reads[i] = <<>> THEN 0 ELSE reads[i][Len(reads[i])].ctx] }
Snapshots(i, j) == IF lastApplied[i] = 0 THEN {}
                   ELSE { [type |-> "InstallSnapshot", from |-> i, to |-> j, term |-> currentTerm[i], index |-> lastApplied[i],
                           lastTerm |-> TermAt(log[i], lastApplied[i]), conf |-> config[i]] }
Own(i) == { [type |-> kind, from |-> i, to |-> i, granted |-> TRUE, commit |-> 0, commitTerm |-> 0,
             term |-> currentTerm[i] + IF kind = "PreVoteResponse" THEN 1 ELSE 0] : kind \in {"VoteResponse", "PreVoteResponse"} }
Sendable(i) ==
    {m \in Own(i) : role[i] = IF m.type = "VoteResponse" THEN "Candidate" ELSE "PreCandidate"}
    \cup {m \in UNION {Appends(i, j) \cup Asks(i, j) \cup Beats(i, j) \cup Snapshots(i, j) : j \in Members(config[i]) \ {i}} : MaySend(i, m)}

Reached == {commitIndex[j] : j \in Server}
Step(i) ==
    \/ BecomePreCandidate(i)
    \/ WonPreVote(i) /\ BecomeCandidate(i)
    \/ BecomeLeader(i)
    \/ role[i] # "Follower" /\ StepDown(i)
    \/ Propose(i, Normal(i))
    \/ \E c \in Changes(config[i]) : Propose(i, <<[term |-> currentTerm[i], conf |-> c]>>)
    \/ \E k \in commitIndex[i] + 1..LastIndex(log[i]) : AdvanceCommit(i, k)
    \/ \E m \in Sendable(i) : m \notin messages \cup held[i] /\ SendMessage(i, m)
    \/ \E m \in messages : m.to = i /\ Receive(i, m)
    \/ /\ lastApplied[i] < commitIndex[i]
       /\ LET k == lastApplied[i] + 1 IN
          IF IsConf(log[i], k) /\ log[i].entries[k - log[i].base].conf # config[i]
          THEN ApplyConf(i, log[i].entries[k - log[i].base].conf)
          ELSE Apply(i, k)
    \/ (held[i] # {} \/ disk[i].term # currentTerm[i] \/ disk[i].log # log[i]) /\ Write(i)
    \/ Durable(i)

ModelNext ==
    \E i \in Server :
      \/ Step(i) /\ UNCHANGED <<newest, crashes>>
      \/ /\ BeginRead(i, Len(reads[i]) + 1)
         /\ newest' = newest \cup {<<i, currentTerm[i], Len(reads[i]) + 1, CHOOSE k \in Reached : \A j \in Server : commitIndex[j] <= k>>}
         /\ UNCHANGED crashes
      \/ Restart(i, disk[i].log.base, disk[i].log.base, disk[i].conf) /\ crashes' = crashes + 1 /\ UNCHANGED newest

(* Messages stay in the network for ever, so to send one later forbids or permits nothing: it arrives when it likes. *)
(* Without PreVote, which only asks; without reads, changes of members, snapshots and crashes. Refusals get lost.    *)
Unsent(i) ==
    {m \in Own(i) \cup UNION {Appends(i, j) \cup Asks(i, j) : j \in Server \ {i}} :
        m.type \notin {"PreVote", "PreVoteResponse"} /\ MaySend(i, m) /\ m \notin messages \cup held[i]}
SendAll(i) ==
    /\ held' = [held EXCEPT ![i] = @ \cup {m \in Unsent(i) : m.type \in Promises}]
    /\ messages' = messages \cup {m \in Unsent(i) : m.type \notin Promises}
    /\ UNCHANGED <<currentTerm, votedFor, log, elections, commitIndex, lastApplied, config, leading, storage>>
Sync(i) ==      \* Write and Durable
    /\ disk' = [disk EXCEPT ![i] = [term |-> currentTerm[i], vote |-> votedFor[i], log |-> log[i], conf |-> config[i], held |-> {}]]
    /\ messages' = messages \cup held[i] /\ held' = [held EXCEPT ![i] = {}]
    /\ UNCHANGED <<currentTerm, votedFor, log, elections, commitIndex, lastApplied, config, leading, writes>>
Unsynced(i) == held[i] # {} \/ disk[i].term # currentTerm[i] \/ disk[i].vote # votedFor[i] \/ disk[i].log # log[i]
EagerStep(i) ==
    IF Unsent(i) # {} THEN SendAll(i)
    ELSE IF Unsynced(i) THEN Sync(i)
    ELSE /\ \A j \in Server : Unsent(j) = {} /\ ~Unsynced(j)
         /\ \/ BecomeCandidate(i)
            \/ BecomeLeader(i)
            \/ role[i] = "Candidate" /\ StepDown(i)
            \/ role[i] = "Leader" /\ Propose(i, Normal(i))
            \/ \E k \in commitIndex[i] + 1..LastIndex(log[i]) : AdvanceCommit(i, k)
            \/ \E m \in messages : m.to = i /\ Receive(i, m)
         /\ \A m \in held'[i] : IF m.type = "VoteResponse" THEN m.granted ELSE m.type = "AppendResponse" => m.success
EagerNext == (\E i \in Server : EagerStep(i)) /\ UNCHANGED <<newest, crashes>>
Symmetry == Permutations(Server)

ModelSpec == ModelInit /\ [][IF Eager THEN EagerNext ELSE ModelNext]_<<vars, newest, crashes>>

Small ==
    /\ \A i \in Server : /\ currentTerm[i] <= TermMax /\ LastIndex(log[i]) <= LogMax
                         /\ Len(writes[i]) <= WritesMax /\ Len(reads[i]) <= ReadsMax
    /\ Cardinality(messages) <= MessagesMax /\ crashes <= CrashesMax
    /\ TLCGet("level") < DepthMax

-----------------------------------------------------------------------------
ElectionSafety == \A i, j \in Server : role[i] = "Leader" /\ role[j] = "Leader" /\ currentTerm[i] = currentTerm[j] => i = j
LogMatching ==
    \A i, j \in Server : \A k \in 1..Min(LastIndex(log[i]), LastIndex(log[j])) :
        k > Max(log[i].base, log[j].base) /\ TermAt(log[i], k) = TermAt(log[j], k)
        => \A n \in Max(log[i].base, log[j].base) + 1..k : log[i].entries[n - log[i].base] = log[j].entries[n - log[j].base]
StateMachineSafety ==
    \A i, j \in Server : \A k \in Max(log[i].base, log[j].base) + 1..Min(commitIndex[i], commitIndex[j]) :
        log[i].entries[k - log[i].base] = log[j].entries[k - log[j].base]
CommittedIsThere == \A i \in Server : commitIndex[i] <= LastIndex(log[i])
(* A leader counts of its own log no more than what its disk has, although it begins with all of it. *)
OwnMatchIsDurable == \A i \in Server : role[i] = "Leader" => matchIndex[i][i] <= LastIndex(disk[i].log)
(* A confirmed read is at least as new as everything that was committed when it began. *)
ReadsAreLinearizable ==
    \A i \in Server : role[i] = "Leader" => \A n \in 1..Len(reads[i]) :
        Quorum(config[i], reads[i][n].acks) => \A r \in newest : r[1] = i /\ r[2] = currentTerm[i] /\ r[3] = reads[i][n].ctx => r[4] <= reads[i][n].index
=============================================================================
