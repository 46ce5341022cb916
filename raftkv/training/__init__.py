"""Training runs: who takes part, in which rank, and who died when and why; on raftkv or on etcd.

Read ``membership`` first (one node's part), then ``arbiter`` (the rules, pure) and ``keys`` (the layout). User code
begins with ``join``. Nothing here imports torch; ``raftkv.torch`` adapts this to it.
"""
