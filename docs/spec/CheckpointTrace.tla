--------------------------- MODULE CheckpointTrace ---------------------------
(* Whether what the store saw of a run's checkpoints is a behaviour of Checkpoint: as RaftTrace, with a line for each  *)
(* step that a txn of the simulator is. What its sender had read is not told: it must be so when the txn is executed.  *)
EXTENDS Checkpoint, Sequences, Windows

VARIABLES t, l          \* the window, and its next line

All(numbers) == {Attempts[n] : n \in numbers}
Seen(a) == latest[a.kind].change

TraceInit ==
    /\ t \in 1..Len(Traces) /\ l = 1
    /\ LET s == Traces[t].init IN
       /\ claim = s.claim /\ begun = s.begun /\ heads = All(s.heads) /\ deleting = All(s.deleting) /\ holds = All(s.holds)
       /\ parts = {<<Attempts[p[1]], p[2]>> : p \in s.parts}
       /\ records = {[attempt |-> a, value |-> 1] : a \in All(s.records)}
       /\ latest = [kind \in Kinds |-> [step |-> s.latest[kind], change |-> 0]]
    /\ going = {} /\ bytes = {} /\ committed = {} /\ givenUp = {} /\ late = FALSE /\ sent = {}

Only(a) == [attempt |-> a, value |-> 1]
Step(e, a) ==
    CASE e.op = "claim" -> claim' = e.claim /\ Claim
      [] e.op = "begin" -> MayBegin(a.kind, a.step) /\ Begin([claim |-> e.claim, a |-> a])
      [] e.op = "prepare" -> Prepare([claim |-> e.claim, a |-> a, rank |-> e.rank])
      [] e.op = "commit" -> MayCommit(a) /\ Commit([claim |-> e.claim, a |-> a, seen |-> Seen(a)])
      [] e.op = "abort" -> Abort([claim |-> e.claim, a |-> a])
      [] e.op = "delete" -> MayDelete(Only(a)) /\ Delete([a |-> a, seen |-> Seen(a)])
      [] e.op = "pin" -> Pin([a |-> a])
      [] e.op = "unpin" -> holds' = holds \ {a} /\ Unpin
      [] e.op = "clean" -> parts' = {p \in parts : p[1] # a} /\ Clean
      [] e.op = "forget" -> Forget
      [] e.op = "sweep" -> /\ a \in deleting /\ Only(a) \notin records /\ deleting' = deleting \ {a}
                           /\ UNCHANGED <<claim, begun, heads, parts, records, latest, holds, committed, givenUp, late>>

EndsAs(s) ==
    /\ heads' = All(s.heads) /\ deleting' = All(s.deleting) /\ holds' = All(s.holds)
    /\ {r.attempt : r \in records'} = All(s.records)
    /\ \A kind \in Kinds : latest'[kind].step = s.latest[kind]

TraceNext ==
    /\ l <= Len(Traces[t].lines)
    /\ LET e == Traces[t].lines[l] IN Step(e, Attempts[e.a]) /\ (e.isLast => EndsAs(e.s))
    /\ UNCHANGED <<going, bytes, sent>>
    /\ l' = l + 1 /\ t' = t
    /\ PrintT(<<"at", t, l>>)

TraceSpec == TraceInit /\ [][TraceNext]_<<vars, t, l>>
=============================================================================
