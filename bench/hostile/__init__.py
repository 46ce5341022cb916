"""Hostile requests, floods and greedy clients against three real members, beside real etcd 3.5.1 in the same run.

Reading order: ``rows`` (the attacks; the table is at the end), ``attacker`` (their tools), ``honest`` (the honest
client, in a separate process), ``measure`` (one row with one program; the bars and the table).
"""
