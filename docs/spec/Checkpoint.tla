----------------------------- MODULE Checkpoint -----------------------------
(* How a checkpoint comes to exist, whole or not at all, and how it goes (raftkv/checkpoint: commit, retention).       *)
(*                                                                                                                     *)
(* The store executes one txn after the other. A client reads, decides, and sends a txn that compares what it has      *)
(* read. Some stay in `sent`: they may arrive at any later moment, and more than once, also after their sender has     *)
(* died. So a process needs no state of its own, and a dead one is one that sends nothing more.                        *)
(* Left out: the world of a claim (Rendezvous.tla), parents, and what people do to files by hand.                      *)
(* `Without` takes one rule out; Checkpoint.cfg says which property that must break.                                   *)
EXTENDS Naturals, FiniteSets, TLC

CONSTANTS Kinds, Memory,        \* Memory: the kind whose bytes are no files, and whose newest replaces all before it
          Steps, Ranks,
          ClaimsMax, BegunMax,  \* bounds of the model
          LateMax,      \* txns that arrive late
          Without

Rule(name) == Without # name

VARIABLES claim,        \* the newest generation that has claimed the run: the fence
          begun,        \* how many attempts have begun
          heads,        \* undecided attempts
          parts,        \* <<attempt, rank>>: prepared
          records,      \* [attempt, value]: committed, with the value of a metric, of which 1 is best
          latest,       \* [kind -> [step, change]]: step 0: none; change counts how often the key was written
          deleting,     \* attempts whose bytes are to go
          holds,        \* attempts whose checkpoint a reader has pinned
          going,        \* attempts whose bytes a collector is about to delete, or has deleted
          bytes,        \* <<attempt, rank>>: files
          committed, givenUp,   \* all that ever were
          late,         \* whether a generation has written after its end
          sent
store == <<claim, begun, heads, parts, records, latest, deleting, holds>>
besides == <<going, bytes, committed, givenUp, late, sent>>
vars == <<store, besides>>

Durable == Kinds \ {Memory}
Of(kind) == {r \in records : r.attempt.kind = kind}
Whole(a) == \A rank \in a.ranks : <<a, rank>> \in parts
Moved(kind, step) == [latest EXCEPT ![kind] = [step |-> step, change |-> @.change + 1]]
Newest(S) == LET steps == {latest[kind].step : kind \in S} \cup {0} IN CHOOSE n \in steps : \A k \in steps : k <= n
(* What a program restores that names no kind. *)
Restored == Newest(IF Rule("memory apart") THEN Durable ELSE Kinds)

-----------------------------------------------------------------------------
(* The txns: conditions, then effects. *)

Under(t, rule) == (Rule(rule) => t.claim = claim) /\ late' = (late \/ t.claim < claim)

Begin(t) ==     \* `begun` is written with every head, on condition that none was since the number was chosen
    /\ Under(t, "fence in begin") /\ (Rule("number") => t.a.number = begun)
    /\ begun' = begun + 1 /\ heads' = heads \cup {t.a}
    /\ UNCHANGED <<claim, parts, records, latest, deleting, holds, committed, givenUp>>

Prepare(t) ==
    /\ Under(t, "fence in prepare") /\ (Rule("head in prepare") => t.a \in heads) /\ <<t.a, t.rank>> \notin parts
    /\ parts' = parts \cup {<<t.a, t.rank>>}
    /\ UNCHANGED <<claim, begun, heads, records, latest, deleting, holds, committed, givenUp>>

Commit(t) ==
    LET kind == t.a.kind  replaced == IF kind = Memory THEN Of(Memory) ELSE {} IN
    /\ Under(t, "fence in commit") /\ (Rule("head in commit") => t.a \in heads)
    /\ (Rule("latest in commit") => latest[kind].change = t.seen)
    /\ records' = (records \ replaced) \cup {[attempt |-> t.a, value |-> 1]}
    /\ deleting' = IF kind = Memory THEN {a \in deleting : a.kind # Memory} ELSE deleting
    /\ latest' = Moved(kind, t.a.step) /\ heads' = heads \ {t.a} /\ committed' = committed \cup {t.a}
    /\ UNCHANGED <<claim, begun, parts, holds, givenUp>>

Abort(t) ==
    /\ Under(t, "fence in abort") /\ (Rule("head in abort") => t.a \in heads)
    /\ heads' = heads \ {t.a} /\ parts' = {p \in parts : p[1] # t.a}
    /\ deleting' = deleting \cup {t.a} /\ givenUp' = givenUp \cup {t.a}
    /\ UNCHANGED <<claim, begun, records, latest, holds, committed>>

Delete(t) ==    \* by a collector, without a claim: every change of a record changes `latest` too
    LET kind == t.a.kind IN
    /\ \E r \in records : r.attempt = t.a /\ records' = records \ {r}
    /\ (Rule("latest in delete") => latest[kind].change = t.seen) /\ (Rule("holds") => t.a \notin holds)
    /\ deleting' = deleting \cup {t.a} /\ latest' = Moved(kind, latest[kind].step)
    /\ UNCHANGED <<claim, begun, heads, parts, holds, committed, givenUp, late>>

Pin(t) ==
    /\ (Rule("record in pin") => \E r \in records : r.attempt = t.a)
    /\ t.a \notin holds /\ holds' = holds \cup {t.a}
    /\ UNCHANGED <<claim, begun, heads, parts, records, latest, deleting, committed, givenUp, late>>

Executed(t) ==
    CASE t.op = "begin" -> Begin(t)  [] t.op = "prepare" -> Prepare(t)  [] t.op = "commit" -> Commit(t)
      [] t.op = "abort" -> Abort(t)  [] t.op = "delete" -> Delete(t)    [] t.op = "pin" -> Pin(t)

-----------------------------------------------------------------------------
(* When each is sent: what its sender has read. *)

MayBegin(kind, step) == latest[kind].step < step
MayCommit(a) == a \in heads /\ (Rule("all ranks") => Whole(a)) /\ latest[a.kind].step < a.step
MayDelete(r) == r.attempt.kind # Memory /\ (Rule("latest stays") => r.attempt.step # latest[r.attempt.kind].step)
(* The policy of the model keeps the best. *)
HasEqual(r, all) == \E other \in all : other.attempt.kind = r.attempt.kind /\ other # r /\ other.value >= r.value

(* It arrives at once; or it stays on its way, and arrives at any later moment, and again. *)
Sends(t) ==
    \/ Executed(t) /\ UNCHANGED <<going, sent>>
    \/ t \notin sent /\ Cardinality(sent) < LateMax /\ sent' = sent \cup {t}
       /\ UNCHANGED <<store, going, committed, givenUp, late>>

Send ==
    \/ \E kind \in Kinds, step \in Steps : begun < BegunMax /\ claim > 0 /\ MayBegin(kind, step) /\ UNCHANGED bytes
         /\ LET a == [kind |-> kind, step |-> step, claim |-> claim, number |-> begun, ranks |-> Ranks]
            IN  Sends([op |-> "begin", claim |-> claim, a |-> a])
    \* a rank writes its file, then says so: it may have slept since it saw the head
    \/ \E a \in heads \cup committed \cup givenUp : \E rank \in a.ranks :
         /\ bytes' = IF a.kind = Memory THEN bytes ELSE bytes \cup {<<a, rank>>}
         /\ Sends([op |-> "prepare", claim |-> a.claim, a |-> a, rank |-> rank])
    \* the coordinator, or a later claim that takes the attempt over
    \/ \E a \in heads : MayCommit(a) /\ UNCHANGED bytes
         /\ Sends([op |-> "commit", claim |-> claim, a |-> a, seen |-> latest[a.kind].change])
    \/ \E a \in heads : UNCHANGED bytes /\ Sends([op |-> "abort", claim |-> claim, a |-> a])
    \/ \E r \in records : MayDelete(r) /\ HasEqual(r, records) /\ r.attempt \notin holds /\ UNCHANGED bytes
         /\ Sends([op |-> "delete", a |-> r.attempt, seen |-> latest[r.attempt.kind].change])
    \/ \E r \in records : r.attempt.kind # Memory /\ UNCHANGED bytes /\ Sends([op |-> "pin", a |-> r.attempt])

Execute == \E t \in sent : Executed(t) /\ UNCHANGED <<going, bytes, sent>>

-----------------------------------------------------------------------------
(* Steps that need no second look: their conditions are all that they read. *)

Claim == (\E later \in claim + 1..ClaimsMax : claim' = later)
         /\ UNCHANGED <<begun, heads, parts, records, latest, deleting, holds, besides>>
Unpin == \E a \in holds : holds' = holds \ {a}
         /\ UNCHANGED <<claim, begun, heads, parts, records, latest, deleting, besides>>
(* A metric is set on record and summary as they were seen. *)
Measure == \E r \in records : r.value = 1 /\ r.attempt.kind # Memory
           /\ records' = (records \ {r}) \cup {[r EXCEPT !.value = 0]}
           /\ latest' = Moved(r.attempt.kind, latest[r.attempt.kind].step)
           /\ UNCHANGED <<claim, begun, heads, parts, deleting, holds, besides>>
(* What ranks had prepared goes when the attempt is over. *)
Clean == \E p \in parts : p[1] \notin heads /\ parts' = {q \in parts : q[1] # p[1]}
         /\ UNCHANGED <<claim, begun, heads, records, latest, deleting, holds, besides>>
(* A restore has found that the copies are gone: the present claim lets an earlier step be saved in memory again. *)
Forget == latest[Memory].step > 0 /\ latest' = Moved(Memory, 0) /\ records' = records \ Of(Memory)
          /\ deleting' = {a \in deleting : a.kind # Memory} /\ UNCHANGED <<claim, begun, heads, parts, holds, besides>>
(* A collector sees what may go, then deletes the bytes, however much later, then the key. *)
See == \E a \in IF Rule("deleting first") THEN deleting ELSE deleting \cup {t.a : t \in {s \in sent : s.op = "delete"}} :
         a \notin going /\ going' = going \cup {a} /\ UNCHANGED <<store, bytes, committed, givenUp, late, sent>>
Sweep == \E a \in going : bytes' = {b \in bytes : b[1] # a} /\ deleting' = deleting \ {a}
         /\ UNCHANGED <<claim, begun, heads, parts, records, latest, holds, going, committed, givenUp, late, sent>>

Init == /\ claim = 0 /\ begun = 0 /\ heads = {} /\ parts = {} /\ records = {} /\ deleting = {} /\ holds = {}
        /\ latest = [kind \in Kinds |-> [step |-> 0, change |-> 0]] /\ going = {} /\ bytes = {}
        /\ committed = {} /\ givenUp = {} /\ late = FALSE /\ sent = {}
Next == Send \/ Execute \/ Claim \/ Unpin \/ Measure \/ Clean \/ Forget \/ See \/ Sweep
Spec == Init /\ [][Next]_vars

Symmetry == Permutations(Ranks)

-----------------------------------------------------------------------------
Loadable == \A r \in records : r.attempt.kind # Memory => \A rank \in r.attempt.ranks : <<r.attempt, rank>> \in bytes
OneFate == committed \cap givenUp = {} /\ heads \cap (committed \cup givenUp) = {}
NothingLate == ~late
NothingOfGivenUp == \A p \in parts : p[1] \notin givenUp
LatestIsThere == \A kind \in Durable : latest[kind].step > 0 => \E r \in Of(kind) : r.attempt.step = latest[kind].step
HeldStays == \A a \in holds : \E r \in records : r.attempt = a
NeverBack == [][Restored' >= Restored]_vars
BestStays == [][\A r \in records \ records' : r.attempt.kind # Memory =>
                  \E other \in records' : other.attempt.kind = r.attempt.kind
                                          /\ (other.attempt = r.attempt \/ other.value >= r.value)]_vars
=============================================================================
