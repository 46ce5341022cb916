-------------------------------- MODULE Lease --------------------------------
(* When a lease ends, over changes of leaders and restarts (raftkv/replica/lease, raftkv/apply/leases).                *)
(*                                                                                                                     *)
(* Raft is taken as correct (Raft.tla): what a leader appends is agreed, and each member applies the log at its own    *)
(* pace. Decisions of a leader carry its term; one that has been deposed meanwhile may have another leader append them.*)
(* One lease, which its owner may revoke and be granted anew under the same id. Time is real time: clocks that stand   *)
(* still make leases end later only. Left out: leases shortened by a broken connection, and patience of new leaders.   *)
(* `Without` takes one rule out; Lease.cfg says which property that must break.                                        *)
EXTENDS Naturals, Sequences, TLC

CONSTANTS Members, Ttl, Logged,         \* Logged: how long a renewal in the log lets a leader answer from memory
          TimeMax, TermMax, LogMax,     \* bounds of the model
          Without

Rule(name) == Without # name

VARIABLES now,
          log,          \* [kind, decided, term]: the term of the decision, and of the entry
          term, leader, leads,  \* leads: it has applied all that was there when its term began
          applied,      \* entries, by member
          renewedAt,    \* when each member applied the last grant or renewal
          endsAt, loggedAt, isExpiring, \* of the leader; loggedAt: when the last renewal that it has applied was proposed
          asked,        \* when the keep-alive that is on its way was sent; 0: none
          waiting,      \* when that was sent which waits for a renewal to be applied; 0: none
          promised,     \* until when the owner may count on the lease
          early,        \* whether it has ended before
          stray         \* decisions that left a leader and are in no log
vars == <<now, log, term, leader, leads, applied, renewedAt, endsAt, loggedAt, isExpiring, asked, waiting, promised, early, stray>>
leading == <<endsAt, loggedAt, isExpiring>>
owner == <<asked, promised>>

Max(a, b) == IF a > b THEN a ELSE b
Counts(entry) == entry.decided = entry.term \/ ~Rule("term")
Ends(entry) == entry.kind = "revoke" \/ (entry.kind = "expire" /\ Counts(entry))
RECURSIVE Exists(_)
Exists(k) == IF k = 0 THEN FALSE ELSE IF log[k].kind = "grant" THEN TRUE ELSE IF Ends(log[k]) THEN FALSE ELSE Exists(k - 1)
Entry(kind, decided) == [kind |-> kind, decided |-> decided, term |-> term]
Appends(entry) ==       \* the lease ends with the entry: members apply it now or later
    /\ Len(log) < LogMax /\ log' = Append(log, entry)
    /\ early' = (early \/ (entry.kind = "expire" /\ Counts(entry) /\ Exists(Len(log)) /\ now < promised))

Tick == now < TimeMax /\ now' = now + 1
        /\ UNCHANGED <<log, term, leader, leads, applied, renewedAt, leading, owner, waiting, early, stray>>

-----------------------------------------------------------------------------
(* The owner *)

Ask == Exists(Len(log)) /\ asked = 0 /\ asked' = now
       /\ UNCHANGED <<now, log, term, leader, leads, applied, renewedAt, leading, waiting, promised, early, stray>>

Grant == leader # 0 /\ ~Exists(Len(log)) /\ Appends(Entry("grant", term)) /\ promised' = now + Ttl /\ asked' = 0
         /\ UNCHANGED <<now, term, leader, leads, applied, renewedAt, leading, waiting, stray>>

Revoke == leader # 0 /\ Exists(Len(log)) /\ Appends(Entry("revoke", term)) /\ promised' = 0 /\ asked' = 0
          /\ waiting' = 0 /\ UNCHANGED <<now, term, leader, leads, applied, renewedAt, leading, stray>>

-----------------------------------------------------------------------------
(* The leader *)

MayKeep == leads /\ Exists(applied[leader]) /\ ~isExpiring
IsLogged == now < loggedAt + Logged \/ ~Rule("logged")
(* What it answers from memory the log knows: its renewal was proposed less than Logged ago, and is applied. *)
KeepAlive ==
    /\ MayKeep /\ asked > 0 /\ endsAt > now
    /\ endsAt' = now + Ttl
    /\ IF IsLogged
       THEN /\ promised' = Max(promised, asked + Ttl) /\ asked' = 0 /\ UNCHANGED <<log, early, waiting, stray>>
       ELSE /\ waiting = 0 /\ waiting' = asked /\ asked' = 0 /\ UNCHANGED promised
            /\ \/ Appends(Entry("renew", term) @@ [at |-> now]) /\ UNCHANGED stray
               \/ stray' = stray \cup {[kind |-> "renew", term |-> term]} /\ UNCHANGED <<log, early>>
    /\ UNCHANGED <<now, term, leader, leads, applied, renewedAt, loggedAt, isExpiring>>

(* Behind a revocation that it has not applied the id may be granted anew. *)
MayExpire == leads /\ Exists(applied[leader]) /\ endsAt <= now
             /\ (Rule("revoked") => \A k \in applied[leader] + 1..Len(log) : log[k].kind # "revoke")
Expire ==
    /\ MayExpire /\ ~isExpiring
    /\ isExpiring' = TRUE
    /\ \/ Appends(Entry("expire", term)) /\ UNCHANGED stray
       \/ stray' = stray \cup {[kind |-> "expire", term |-> term]} /\ UNCHANGED <<log, early>>
    /\ UNCHANGED <<now, term, leader, leads, applied, renewedAt, endsAt, loggedAt, owner, waiting>>

(* A decision that was on its way when its leader was deposed. *)
Forward ==
    /\ leader # 0
    /\ \E d \in stray : d.term < term /\ stray' = stray \ {d} /\ Appends(Entry(d.kind, d.term) @@ [at |-> 0])
    /\ UNCHANGED <<now, term, leader, leads, applied, renewedAt, leading, owner, waiting>>

Applies(i) ==
    LET e == log[applied[i] + 1]
        renews == e.kind = "grant" \/ (e.kind = "renew" /\ Counts(e))
        own == i = leader /\ leads
        answers == own /\ e.kind = "renew" /\ e.decided = term /\ ~isExpiring /\ Exists(applied[i])
    IN
    /\ applied[i] < Len(log) /\ applied' = [applied EXCEPT ![i] = @ + 1]
    /\ renewedAt' = IF renews THEN [renewedAt EXCEPT ![i] = now] ELSE renewedAt
    /\ endsAt' = IF own /\ (e.kind = "grant" \/ answers) THEN now + Ttl ELSE endsAt
    /\ loggedAt' = IF answers THEN e.at ELSE IF own /\ e.kind = "grant" THEN 0 ELSE loggedAt
    /\ isExpiring' = (isExpiring /\ ~(own /\ e.kind = "grant"))
    /\ promised' = IF answers /\ waiting > 0 THEN Max(promised, waiting + Ttl) ELSE promised
    /\ waiting' = IF answers THEN 0 ELSE waiting
    /\ UNCHANGED <<now, log, term, leader, leads, asked, early, stray>>

-----------------------------------------------------------------------------
(* Members *)

Elect(i) == term < TermMax /\ term' = term + 1 /\ leader' = i /\ leads' = FALSE /\ waiting' = 0
            /\ UNCHANGED <<now, log, applied, renewedAt, leading, owner, early, stray>>

Lead == /\ leader # 0 /\ ~leads /\ (Rule("caught up") => applied[leader] = Len(log))
        /\ leads' = TRUE /\ loggedAt' = 0 /\ isExpiring' = FALSE
        /\ endsAt' = renewedAt[leader] + Ttl + (IF Rule("margin") THEN Logged ELSE 0)
        /\ UNCHANGED <<now, log, term, leader, applied, renewedAt, owner, waiting, early, stray>>

(* To a member that starts all leases were renewed at its start. *)
Restart(i) ==
    /\ renewedAt' = [renewedAt EXCEPT ![i] = IF Rule("restart") THEN now ELSE 1]
    /\ leader' = (IF i = leader THEN 0 ELSE leader) /\ leads' = (leads /\ i # leader)
    /\ waiting' = (IF i = leader THEN 0 ELSE waiting)
    /\ UNCHANGED <<now, log, term, applied, leading, owner, early, stray>>

Init == /\ now = 1 /\ log = <<>> /\ term = 0 /\ leader = 0 /\ leads = FALSE /\ stray = {}
        /\ applied = [i \in Members |-> 0] /\ renewedAt = [i \in Members |-> 1]
        /\ endsAt = 0 /\ loggedAt = 0 /\ isExpiring = FALSE /\ asked = 0 /\ waiting = 0 /\ promised = 0 /\ early = FALSE
Next == \/ Tick \/ Ask \/ Grant \/ Revoke \/ KeepAlive \/ Expire \/ Forward \/ Lead
        \/ \E i \in Members : Applies(i) \/ Elect(i) \/ Restart(i)
Spec == Init /\ [][Next]_vars

NeverEarly == ~early
(* The owner is told that its lease lives only while it does. *)
PromisesAreKept == now < promised => Exists(Len(log))
=============================================================================
