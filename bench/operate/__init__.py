"""What operators do to a running cluster, and how long it takes or holds up writers, beside etcd 3.5.1 in the same run.

    python -m bench.operate [--row restart-killed ...] [--rounds 3] [--scale 1.0] [--write]

Reading order: ``rows`` (what is done, one function a row), ``scene`` (members, data, the writer), ``report`` (medians,
bars, table). Each round of a row has fresh members of each program, one program after the other, the order changing
from round to round. Rows that have a writer measure what it sees: 1,000 puts a second, due at fixed times, to all
members in turn, so that a stall costs every put that should have been made meanwhile.

The bar of every figure is etcd's in the same run. Members, writer and loader share the machine's cores: figures of one
run compare, those of two machines do not.
"""
