"""Fault-injection tests on real processes: a cluster under load, faults from a seed, and checkers of what it answered.

The cut follows Jepsen's etcd suite:

    db.py       start, stop, kill, pause, restart members; their ports, folders and logs
    client.py   one gRPC client; every failure is definite or indefinite, by a table (outcome.py)
    nemesis.py  faults and their schedule, drawn from a seed; partitions.py those of the network
    network.py  relays between members, and between them and clients, that can be cut, slowed and reset
    watcher.py  a client that watches and resumes; what it is sent (watches.py) is part of the history
    history.py  what every client asked and was answered, one operation a line
    checkers/   the checkers; checker.py puts them together
    workloads/  one workload a file: what clients ask, and what is checked beyond the common checkers
    held_write.py  is a put acknowledged before the log holds it?
    runner.py   one run: load under faults, heal, read the store, check

Members are reached over the wire only: of raftkv nothing but its messages (``raftkv.pb``) is imported, so the same
harness runs real etcd, which is how it is calibrated.

    python -m jepsen run --workload register --nemesis kill --time 30s --members 3 --seed 7
    python -m jepsen run --sut etcd --workload append --nemesis kill,pause --faults 20
    python -m jepsen check jepsen/runs/<run>/history.jsonl
"""
