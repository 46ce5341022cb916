"""The latency of one put by a single client, in microseconds, stage by stage, on three real members.

Owns the stamps that members take on the way of a put (``member``), the put that is timed from outside (``measure``),
what the stamps say of each stage (``stages``, pure) and the picture (``draw``). All clocks are the kernel's monotonic
one, which the processes of a machine share.
"""
