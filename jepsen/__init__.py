"""Fault-injection tests with real processes: a cluster under load, faults from a seed, and checkers of its answers.

The structure follows Jepsen's etcd suite:

    db.py       start, stop, kill, pause, restart members; their ports, folders and logs
    client.py   one gRPC client; every failure is definite or indefinite, by a table (outcome.py)
    nemesis.py  faults and their schedule, drawn from a seed; partitions.py for those of the network
    network.py  relays between members, and between them and clients, that can be cut, slowed and reset
    watcher.py  a client that watches and resumes; the messages it gets (watches.py) are part of the history
    history.py  the requests of all clients and their answers, one operation per line
    checkers/   the checkers; checker.py combines them
    workloads/  one workload per file: the requests of clients, and its checks beyond the common checkers
    held_write.py  is a put acknowledged before the log holds it?
    runner.py   one run: load under faults, heal, read the store, check

Members are reached only over the wire, and of raftkv only its messages (``raftkv.pb``) are imported. So the same
harness runs real etcd, which is how the harness is calibrated.
    python -m jepsen run --workload register --nemesis kill --time 30s --members 3 --seed 7
    python -m jepsen run --sut etcd --workload append --nemesis kill,pause --faults 20
    python -m jepsen check jepsen/runs/<run>/history.jsonl
"""
