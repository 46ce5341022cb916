"""Hostile requests, floods and greedy clients against three real members, beside real etcd 3.5.1 in the same run.

Reading order: ``rows`` (what is asked for; the table is at its end), ``attacker`` (how), ``honest`` (the client that
suffers, a process of its own), ``measure`` (one row with one program; the bars and the table).
"""
