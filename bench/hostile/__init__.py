"""Hostile requests, floods and greedy clients against three real members, beside real etcd 3.5.1 in the same run.

    python -m bench.hostile [--row sort-modify ...] [--scale 1.0] [--seconds 6]

Reading order: ``rows`` (what is asked for; the table is at its end), ``attacker`` (how), ``honest`` (the client that
suffers, a process of its own), ``stage`` (members, their figures), ``measure`` (one row with one program), ``report``
(table and bars).

The bars of a row: no turn of a member's loop above 50 ms of its own (without waits for a processor that others had), no
change of leader, no honest error, and the p99 of an honest put not above etcd's in the same row. Members, attacker and
honest client share the machine's cores: figures of one run compare, those of two machines do not.
"""
