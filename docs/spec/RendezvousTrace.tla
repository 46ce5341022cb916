--------------------------- MODULE RendezvousTrace ---------------------------
(* Whether what the store saw of a run, and what its nodes ran, is a behaviour of Rendezvous: as RaftTrace. When the   *)
(* arbiter saw which keys is not told: it may have been at any time since it took office.                              *)
EXTENDS Rendezvous, Windows, TLC

VARIABLES t, l          \* the window, and its next line

TraceInit ==
    /\ t \in 1..Len(Traces) /\ l = 1
    /\ LET s == Traces[t].init IN
       /\ rounds = s.rounds /\ isRunning = s.isRunning /\ key = [n \in Nodes |-> s.key[n]] /\ born = [n \in Nodes |-> s.born[n]]
       /\ started = [n \in Nodes |-> s.started[n]] /\ isOn = [n \in Nodes |-> s.isOn[n]]
    /\ arbiter = 1 /\ view = key /\ former = key
    /\ knows = [n \in Nodes |-> [generation |-> 0, members |-> <<>>]] /\ losses = 0 /\ late = FALSE /\ sent = {}

(* What a process remembers is ahead of its key when the lease was lost before it was written. *)
RegisterAs(n, e) ==
    /\ ~key[n].there /\ e.running \in {0, started[n]} /\ (isOn[n] => e.running = started[n]) /\ e.want >= key[n].want
    /\ key' = [key EXCEPT ![n] = [there |-> TRUE, want |-> e.want, running |-> e.running]]
    /\ born' = [born EXCEPT ![n] = Generation]
    /\ UNCHANGED <<rounds, isRunning, arbiter, view, former, started, isOn, knows, losses, late, sent>>

DeclareAs(n, e) ==
    /\ key[n].there /\ ~isOn[n] /\ e.running = 0 /\ e.want > started[n] /\ e.want >= key[n].want
    /\ key' = [key EXCEPT ![n] = [there |-> TRUE, want |-> e.want, running |-> 0]]
    /\ UNCHANGED <<rounds, isRunning, arbiter, view, former, born, started, isOn, knows, losses, late, sent>>

IdsOf(members) == {members[k] : k \in 1..Len(members)}
BeginAs(e) ==
    LET back == IdsOf(Back(view)) IN
    /\ MayBegin(view) /\ back \subseteq IdsOf(e.members) /\ IdsOf(e.members) \subseteq back \cup Newcomers(view)
    /\ \A k, m \in 1..Len(e.members) : e.members[k] = e.members[m] => k = m
    /\ Traces[t].keepsOrder => SelectSeq(e.members, LAMBDA n : n \in back) = Back(view)
    /\ Begins([generation |-> e.generation, members |-> e.members, arbiter |-> arbiter, gone |-> Gone(view)])
    /\ UNCHANGED <<arbiter, view, former, sent, Others>>

Line(e) ==
    CASE e.op = "register" -> RegisterAs(e.n, e)
      [] e.op = "declare" -> DeclareAs(e.n, e)
      [] e.op = "lose" -> losses < LossesMax /\ key[e.n].there /\ key' = [key EXCEPT ![e.n] = [@ EXCEPT !.there = FALSE, !.running = 0]]
                          /\ UNCHANGED <<rounds, isRunning, arbiter, view, former, born, started, isOn, knows, losses, late, sent>>
      [] e.op = "start" -> e.members = rounds[e.generation] /\ Start(e.n, [generation |-> e.generation, members |-> e.members])
      [] e.op = "stop" -> Stop(e.n)
      [] e.op = "break" -> Break
      [] e.op = "office" -> Office
      [] e.op = "begin" -> BeginAs(e)
      [] e.op = "write" -> e.generation = Generation /\ key[e.n].there /\ UNCHANGED vars

TraceNext ==
    /\ l <= Len(Traces[t].lines) /\ t' = t
    /\ \/ Line(Traces[t].lines[l]) /\ l' = l + 1 /\ PrintT(<<"at", t, l>>)
       \/ See /\ l' = l

TraceSpec == TraceInit /\ [][TraceNext]_<<vars, t, l>>
=============================================================================
