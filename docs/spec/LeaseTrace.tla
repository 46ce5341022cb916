----------------------------- MODULE LeaseTrace -----------------------------
(* Whether what members did about one lease is a behaviour of Lease: as RaftTrace. Times are microseconds. An entry is  *)
(* in the log from when a member first applies it. The code is later than the specification where it is patient with    *)
(* owners, or its clock stands still: a lease whose time is over may still be kept until its end is decided.            *)
EXTENDS Lease, Windows

VARIABLES t, l          \* the window, and its next line

TraceInit ==
    /\ t \in 1..Len(Traces) /\ l = 1
    /\ now = 1000000 /\ log = <<>> /\ term = Traces[t].term /\ leader = Traces[t].leader /\ leads = Traces[t].leads
    /\ applied = [i \in Members |-> 0] /\ renewedAt = [i \in Members |-> 1]
    /\ endsAt = 0 /\ loggedAt = 0 /\ isExpiring = FALSE /\ asked = 0 /\ waiting = 0 /\ promised = 0 /\ early = FALSE /\ stray = {}

(* An entry about an end or a renewal was decided before. *)
AppendAs(entry) ==
    /\ entry.kind \in {"renew", "expire"} => [kind |-> entry.kind, term |-> entry.decided] \in stray
    /\ entry.term >= entry.decided /\ Appends(entry)
    /\ UNCHANGED <<now, term, leader, leads, applied, renewedAt, leading, owner, waiting, stray>>
ApplyAs(i, e) == e.k = applied[i] + 1 /\ Applies(i) /\ e.exists = Exists(e.k)

(* A leader of an earlier term, which does not know yet that there is another, is not looked at. *)
ElectAs(i, e) == /\ e.term > term /\ term' = e.term /\ leader' = i /\ leads' = FALSE
                 /\ UNCHANGED <<now, log, applied, renewedAt, leading, owner, waiting, early, stray>>
LeadAs(i, e) ==
    IF i # leader \/ e.term # term THEN UNCHANGED vars
    ELSE /\ \A k \in applied[i] + 1..Len(log) : log[k].term = term
         /\ leads' = TRUE /\ loggedAt' = 0 /\ isExpiring' = FALSE /\ endsAt' = renewedAt[i] + Ttl + Logged
         /\ UNCHANGED <<now, log, term, leader, applied, renewedAt, owner, waiting, early, stray>>

(* A member that starts goes back to what its database holds; one that received a database goes on with that. *)
StartsAs(i, e) ==
    /\ e.k <= Len(log) /\ applied' = [applied EXCEPT ![i] = e.k] /\ renewedAt' = [renewedAt EXCEPT ![i] = e.since]
    /\ IF e.isNew /\ i = leader THEN leader' = 0 /\ leads' = FALSE ELSE UNCHANGED <<leader, leads>>
    /\ UNCHANGED <<now, log, term, leading, owner, waiting, early, stray>>

(* A deposed leader may answer what a quorum let it answer after it came. *)
KeepAs(i, e) ==
    IF i # leader THEN e.isConfirmed /\ UNCHANGED vars
    ELSE /\ MayKeep /\ (e.isFresh => IsLogged) /\ endsAt' = now + Ttl
         /\ UNCHANGED <<now, log, term, leader, leads, applied, renewedAt, loggedAt, isExpiring, owner, waiting, early, stray>>

(* An end whose fate is unknown is decided again. *)
DecideAs(i, e) ==
    /\ (e.op = "expire" /\ i = leader /\ e.term = term) => MayExpire
    /\ stray' = stray \cup {[kind |-> e.op, term |-> e.term]}
    /\ isExpiring' = (isExpiring \/ (e.op = "expire" /\ i = leader))
    /\ UNCHANGED <<now, log, term, leader, leads, applied, renewedAt, endsAt, loggedAt, owner, waiting, early>>

Line(e) ==
    CASE e.op = "append" -> AppendAs(e.entry)
      [] e.op = "apply" -> ApplyAs(e.i, e)
      [] e.op = "elect" -> ElectAs(e.i, e)
      [] e.op = "lead" -> LeadAs(e.i, e)
      [] e.op = "starts" -> StartsAs(e.i, e)
      [] e.op = "keep" -> KeepAs(e.i, e)
      [] e.op \in {"renew", "expire"} -> DecideAs(e.i, e)

TraceNext ==
    /\ l <= Len(Traces[t].lines) /\ t' = t
    /\ LET e == Traces[t].lines[l] IN
       IF now < e.now THEN now' = e.now /\ l' = l /\ UNCHANGED <<log, term, leader, leads, applied, renewedAt, leading, owner, waiting, early, stray>>
       ELSE Line(e) /\ l' = l + 1 /\ PrintT(<<"at", t, l>>)

TraceSpec == TraceInit /\ [][TraceNext]_<<vars, t, l>>
=============================================================================
