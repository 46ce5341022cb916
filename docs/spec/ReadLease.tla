------------------------------ MODULE ReadLease ------------------------------
(* The lease by which a leader reads without a quorum (raftkv/raft/read_lease.py; LeaseGuard, arXiv 2512.15659, with    *)
(* receipts in place of synchronized clocks). The log is the lease: while the newest committed entry of a leader is     *)
(* younger than Lease, every later leader still holds its commits back.                                                *)
(*                                                                                                                     *)
(* Raft is taken as correct (Raft.tla): an entry commits when a majority has it, and who is elected has every committed *)
(* entry. Entries are numbers in the order of their appending. Each member has a clock of its own; any two of them are  *)
(* at most Drift apart, which stands for what clocks of slightly different rates lose over one lease.                   *)
EXTENDS Naturals, FiniteSets

CONSTANTS Server, Lease, Wait, Drift, TimeMax, EntriesMax, TermMax

VARIABLES clock,        \* of each member
          term,         \* of the newest election, and of each member
          leader,       \* [Server -> term that it believes to lead, 0: none]
          has,          \* entries in the log of each member
          appended,     \* [entry -> [by, at]]: who appended it, and when by the clock of that leader
          received,     \* when the newest entry came, by each member's clock; 0: none came
          waitUntil,    \* of a leader: it commits nothing before
          released,     \* [Server -> the term whose leader handed over to it]
          givenUp,      \* terms whose leader has given its lease up
          known,        \* entries that each member knows to be committed
          committed     \* entries that are

vars == <<clock, term, leader, has, appended, received, waitUntil, released, givenUp, known, committed>>

Majority(S) == 2 * Cardinality(S) > Cardinality(Server)
Newest(S) == IF S = {} THEN 0 ELSE CHOOSE n \in S : \A k \in S : k <= n
(* Logs are prefixes of leaders' logs, so a log is known by its last entry; a later term is newer (section 5.4.1). *)
AsNew(S, other) ==
    LET mine == Newest(S)  theirs == Newest(other) IN
    IF theirs = 0 THEN TRUE
    ELSE IF mine = 0 THEN FALSE
    ELSE IF appended[mine].by = appended[theirs].by THEN mine >= theirs ELSE appended[mine].by > appended[theirs].by
Count == Cardinality(DOMAIN appended)

Init ==
    /\ clock = [i \in Server |-> 1] /\ term = [i \in Server |-> 0] /\ leader = [i \in Server |-> 0]
    /\ has = [i \in Server |-> {}] /\ appended = [n \in {} |-> 0] /\ received = [i \in Server |-> 0]
    /\ waitUntil = [i \in Server |-> 0] /\ released = [i \in Server |-> 0] /\ givenUp = {}
    /\ known = [i \in Server |-> {}] /\ committed = {}

Tick(i) ==
    /\ clock[i] < TimeMax
    /\ \A j \in Server : clock[i] + 1 <= clock[j] + Drift
    /\ clock' = [clock EXCEPT ![i] = @ + 1]
    /\ UNCHANGED <<term, leader, has, appended, received, waitUntil, released, givenUp, known, committed>>

(* Voters have no newer log. Who voted takes nothing of earlier terms any more. *)
Elect(i) ==
    \E V \in SUBSET Server :
      /\ Majority(V) /\ i \in V
      /\ \A j \in V : AsNew(has[i], has[j])
      /\ LET new == Newest({term[j] : j \in Server}) + 1 IN
         /\ new <= TermMax
         /\ term' = [j \in Server |-> IF j \in V THEN new ELSE term[j]]
         /\ leader' = [j \in Server |-> IF j = i THEN new ELSE IF j \in V THEN 0 ELSE leader[j]]
         /\ waitUntil' = [waitUntil EXCEPT ![i] = IF received[i] = 0 \/ (released[i] = new - 1 /\ new > 1) THEN 0 ELSE received[i] + Wait]
      /\ UNCHANGED <<clock, has, appended, received, released, givenUp, known, committed>>

(* The age of an entry begins before it leaves. *)
Append(i) ==
    /\ leader[i] > 0 /\ leader[i] = term[i] /\ Count < EntriesMax
    /\ appended' = [n \in 1..Count + 1 |-> IF n <= Count THEN appended[n] ELSE [by |-> leader[i], at |-> clock[i]]]
    /\ has' = [has EXCEPT ![i] = @ \cup {Count + 1}]
    /\ UNCHANGED <<clock, term, leader, received, waitUntil, released, givenUp, known, committed>>

(* The follower's log becomes the leader's. The receipt is read from the clock after the entries came. *)
Replicate(i, j) ==
    /\ i # j /\ leader[i] > 0 /\ leader[i] = term[i] /\ term[j] <= term[i] /\ has[j] # has[i]
    /\ term' = [term EXCEPT ![j] = term[i]] /\ leader' = [leader EXCEPT ![j] = 0]
    /\ has' = [has EXCEPT ![j] = has[i]]
    /\ received' = [received EXCEPT ![j] = clock[j]]
    /\ UNCHANGED <<clock, appended, waitUntil, released, givenUp, known, committed>>

(* A majority that is in the leader's term has an entry of that term, and all before it. *)
Commit(i) ==
    /\ leader[i] > 0 /\ clock[i] >= waitUntil[i]
    /\ \E n \in has[i] : /\ appended[n].by = leader[i] /\ n \notin known[i]
                         /\ Majority({j \in Server : term[j] = leader[i] /\ n \in has[j]})
                         /\ LET all == {k \in has[i] : k <= n} IN
                            known' = [known EXCEPT ![i] = all] /\ committed' = committed \cup all
    /\ UNCHANGED <<clock, term, leader, has, appended, received, waitUntil, released, givenUp>>

(* A leader that has committed in its term hands over, and serves no more reads by its lease. *)
HandOver(i, j) ==
    /\ i # j /\ leader[i] > 0 /\ \E n \in known[i] : appended[n].by = leader[i]
    /\ term[j] = leader[i] /\ has[j] = has[i]
    /\ givenUp' = givenUp \cup {leader[i]} /\ released' = [released EXCEPT ![j] = leader[i]]
    /\ UNCHANGED <<clock, term, leader, has, appended, received, waitUntil, known, committed>>

(* A member that starts cannot know how old its entries are: it takes them to have come now. *)
Restart(i) ==
    /\ has[i] # {} /\ received[i] # clock[i]
    /\ leader' = [leader EXCEPT ![i] = 0] /\ received' = [received EXCEPT ![i] = clock[i]]
    /\ released' = [released EXCEPT ![i] = 0] /\ waitUntil' = [waitUntil EXCEPT ![i] = 0] /\ known' = [known EXCEPT ![i] = {}]
    /\ UNCHANGED <<clock, term, has, appended, givenUp, committed>>

Next == \E i \in Server : \/ Tick(i) \/ Elect(i) \/ Append(i) \/ Commit(i) \/ Restart(i)
                          \/ \E j \in Server : Replicate(i, j) \/ HandOver(i, j)
Spec == Init /\ [][Next]_vars

MayRead(i) ==
    /\ leader[i] > 0 /\ leader[i] \notin givenUp
    /\ \E n \in known[i] : appended[n].by = leader[i] /\ clock[i] < appended[n].at + Lease

(* Whenever a leader may read alone, it knows of everything that is committed. *)
ReadsAreLinearizable == \A i \in Server : MayRead(i) => committed \subseteq known[i]
OneLeader == \A i, j \in Server : leader[i] > 0 /\ leader[i] = leader[j] => i = j
=============================================================================
