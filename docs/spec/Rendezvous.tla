----------------------------- MODULE Rendezvous -----------------------------
(* Generations of a run, their fence, and ranks that survivors compute from what has changed                           *)
(* (raftkv/training/rendezvous: arbiter, registration, participant, world).                                            *)
(*                                                                                                                     *)
(* A node's leased key says what it may be in; its process goes on when the lease has ended, and does not know. The    *)
(* arbiter sees the keys as they were at some time since it took office, and writes a generation on condition that     *)
(* round, state and arbiter are as it knows them. Such a txn may arrive late, and again.                               *)
(* Left out: faults and their causes (a generation may break at any moment), limits of nodes, closed runs, evictions   *)
(* (to the one that is evicted its lease has ended), and late writes of a node's own key: they fall with its lease,    *)
(* and before that only make the others wait. `Without` takes one rule out; Rendezvous.cfg says what that must break.  *)
EXTENDS Naturals, Sequences, FiniteSets

CONSTANTS Nodes,        \* 1..n: in the order of arrival
          GenerationsMax, LossesMax, ArbitersMax, LateMax,      \* bounds of the model
          Without

Rule(name) == Without # name

VARIABLES rounds,       \* members of each generation that began, in the order of ranks
          isRunning,    \* phase of the newest: else it is broken
          arbiter,      \* number of the holders of the key so far
          view, former, \* [node -> key] as this arbiter and the one before it see them
          key,          \* [node -> [there, want, running]]: the leased key
          born,         \* of a node: how many generations had begun when it registered
          started,      \* the last generation that a node has started
          isOn,         \* whether its workers run
          knows,        \* [node -> [generation, members]]
          losses, late, sent
vars == <<rounds, isRunning, arbiter, view, former, key, born, started, isOn, knows, losses, late, sent>>

Generation == Len(rounds)
Members == IF rounds = <<>> THEN <<>> ELSE rounds[Generation]
In(members, n) == \E k \in 1..Len(members) : members[k] = n
Nothing == [n \in Nodes |-> [there |-> FALSE, want |-> 0, running |-> 0]]
Max(a, b) == IF a > b THEN a ELSE b
RECURSIVE InOrder(_)
InOrder(S) == IF S = {} THEN <<>> ELSE LET n == CHOOSE n \in S : \A m \in S : n <= m IN <<n>> \o InOrder(S \ {n})

-----------------------------------------------------------------------------
(* Nodes *)

(* What a node registers is the truth about its process, also when its lease was lost. It learns what there is. *)
Register(n) ==
    /\ ~key[n].there
    /\ \E running \in {0, started[n]} :
         /\ (Rule("running told") /\ isOn[n]) => running = started[n]
         /\ key' = [key EXCEPT ![n] = [there |-> TRUE, running |-> running,
                                       want |-> IF running > 0 THEN running ELSE Max(@.want, 1)]]
    /\ born' = [born EXCEPT ![n] = Generation]
    /\ knows' = [knows EXCEPT ![n] = [generation |-> Generation, members |-> Members]]
    /\ UNCHANGED <<rounds, isRunning, arbiter, view, former, started, isOn, losses, late, sent>>

(* The store ends the lease. Of a node that has left its key `want` is what its process remembers. *)
Lose(n) ==
    /\ key[n].there /\ losses < LossesMax /\ losses' = losses + 1
    /\ key' = [key EXCEPT ![n] = [@ EXCEPT !.there = FALSE, !.running = 0]]
    /\ UNCHANGED <<rounds, isRunning, arbiter, view, former, born, started, isOn, knows, late, sent>>

Stop(n) == isOn[n] /\ isOn' = [isOn EXCEPT ![n] = FALSE]
           /\ UNCHANGED <<rounds, isRunning, arbiter, view, former, key, born, started, knows, losses, late, sent>>

MayStart(n, world) ==       \* one that began when it was registered: a second guard, behind "gone"
    In(world.members, n) /\ world.generation >= Max(key[n].want, started[n] + 1) /\ born[n] < world.generation

(* It says that nothing before `want` runs here any more. *)
Declare(n) ==
    LET first == IF ~In(knows[n].members, n) \/ MayStart(n, knows[n]) THEN started[n] + 1 ELSE Max(knows[n].generation, started[n]) + 1 IN
    /\ (Rule("stopped") => ~isOn[n]) /\ key[n].there /\ (key[n].want < first \/ key[n].running > 0)
    /\ key' = [key EXCEPT ![n] = [@ EXCEPT !.want = Max(@, first), !.running = 0]]
    /\ UNCHANGED <<rounds, isRunning, arbiter, view, former, born, started, isOn, knows, losses, late, sent>>

Start(n, world) ==
    /\ ~isOn[n] /\ MayStart(n, world)
    /\ isOn' = [isOn EXCEPT ![n] = TRUE] /\ started' = [started EXCEPT ![n] = world.generation]
    /\ UNCHANGED <<rounds, isRunning, arbiter, view, former, key, born, knows, losses, late, sent>>

(* A head tells what has changed since the generation that it came from. *)
Survivors(before, after) == SelectSeq(before, LAMBDA n : In(after, n))
Joined(before, after) == SelectSeq(after, LAMBDA n : ~In(before, n))
Hear(n, g) ==
    LET before == IF g = 1 THEN <<>> ELSE rounds[g - 1] IN
    /\ knows[n].generation < g
    /\ Rule("base") => knows[n].generation = g - 1      \* the digest says the same
    /\ knows' = [knows EXCEPT ![n] = [generation |-> g, members |->
                    SelectSeq(@.members, LAMBDA m : ~In(before, m) \/ In(rounds[g], m)) \o Joined(before, rounds[g])]]
    /\ UNCHANGED <<rounds, isRunning, arbiter, view, former, key, born, started, isOn, losses, late, sent>>

(* A node whose head does not lead on reads the record. *)
Read(n) ==
    /\ knows[n].generation < Generation /\ key[n].there
    /\ knows' = [knows EXCEPT ![n] = [generation |-> Generation, members |-> Members]]
    /\ UNCHANGED <<rounds, isRunning, arbiter, view, former, key, born, started, isOn, losses, late, sent>>

(* A worker, perhaps of a node that slept through the end of its generation, writes under the fence of its world. *)
Write(n) ==
    /\ started[n] > 0
    /\ Rule("round in fence") => started[n] = Generation
    /\ Rule("lease in fence") => key[n].there
    /\ late' = (late \/ started[n] # Generation \/ ~key[n].there)
    /\ UNCHANGED <<rounds, isRunning, arbiter, view, former, key, born, started, isOn, knows, losses, sent>>

-----------------------------------------------------------------------------
(* The arbiter *)

Others == <<key, born, started, isOn, knows, losses, late>>
Break == isRunning /\ isRunning' = FALSE /\ UNCHANGED <<rounds, arbiter, view, former, sent, Others>>
See == view # key /\ view' = key /\ UNCHANGED <<rounds, isRunning, arbiter, former, sent, Others>>
(* It lists all keys when it has taken office. *)
Office == arbiter < ArbitersMax /\ arbiter' = arbiter + 1 /\ view' = key
          /\ former' = (IF Rule("arbiter") THEN former ELSE view)
          /\ UNCHANGED <<rounds, isRunning, sent, Others>>

HasStopped(one) == (Rule("want") => one.want > Generation) /\ one.running = 0
Back(seen) == SelectSeq(Members, LAMBDA n : seen[n].there /\ HasStopped(seen[n]))
Newcomers(seen) == {n \in Nodes : seen[n].there /\ ~In(Members, n) /\ (Rule("running") => seen[n].running = 0)}
StillOut(seen) == {n \in Nodes : seen[n].there /\ In(Members, n) /\ ~HasStopped(seen[n])}
Gone(seen) == {n \in Nodes : In(Members, n) /\ ~seen[n].there}
(* It waits for every member that still holds its lease. *)
MayBegin(seen) == ~isRunning /\ (Rule("still out") => StillOut(seen) = {})

Begins(t) ==
    /\ Rule("as seen") => (t.generation = Generation + 1 /\ ~isRunning)
    /\ Rule("arbiter") => t.arbiter = arbiter
    /\ Rule("gone") => \A n \in t.gone : ~key[n].there        \* members that are not waited for have not come back since
    /\ rounds' = Append(SubSeq(rounds, 1, t.generation - 1), t.members) /\ isRunning' = TRUE

Decide ==
    \E who \in {arbiter, IF Rule("arbiter") THEN arbiter ELSE arbiter - 1} :
      LET seen == IF who = arbiter THEN view ELSE former IN
      \E S \in SUBSET Newcomers(seen) :
        LET members == Back(seen) \o InOrder(S)
            t == [generation |-> Generation + 1, members |-> members, arbiter |-> who, gone |-> Gone(seen)] IN
        /\ MayBegin(seen) /\ members # <<>> /\ Generation < GenerationsMax
        /\ \/ Begins(t) /\ UNCHANGED sent
           \/ Cardinality(sent) < LateMax /\ sent' = sent \cup {t} /\ UNCHANGED <<rounds, isRunning>>
        /\ UNCHANGED <<arbiter, view, former, Others>>
Arrive == \E t \in sent : Begins(t) /\ UNCHANGED <<arbiter, view, former, sent, Others>>

Init == /\ rounds = <<>> /\ isRunning = FALSE /\ arbiter = 1 /\ view = Nothing /\ former = Nothing /\ key = Nothing
        /\ born = [n \in Nodes |-> 0] /\ started = [n \in Nodes |-> 0] /\ isOn = [n \in Nodes |-> FALSE]
        /\ knows = [n \in Nodes |-> [generation |-> 0, members |-> <<>>]] /\ losses = 0 /\ late = FALSE /\ sent = {}
Next == \/ Break \/ See \/ Office \/ Decide \/ Arrive
        \/ \E n \in Nodes : Register(n) \/ Lose(n) \/ Stop(n) \/ Declare(n) \/ Start(n, knows[n]) \/ Read(n) \/ Write(n)
                            \/ \E g \in 1..Generation : Hear(n, g)
Spec == Init /\ [][Next]_vars

-----------------------------------------------------------------------------
(* A member of the newest generation runs that one or nothing; one that has held its lease all the time, too. *)
OneWorld == \A n \in Nodes : isOn[n] /\ (In(Members, n) \/ (key[n].there /\ born[n] < started[n])) => started[n] = Generation
OneMembership == [][\A g \in 1..Len(rounds) : g <= Len(rounds') /\ rounds'[g] = rounds[g]]_vars
(* Every survivor that computed its ranks has those of the full list. *)
RanksAreRight == \A n \in Nodes : knows[n].generation > 0 => knows[n].members = rounds[knows[n].generation]
NoNodeTwice == \A g \in 1..Generation : \A k, l \in 1..Len(rounds[g]) : rounds[g][k] = rounds[g][l] => k = l
NothingLate == ~late
=============================================================================
