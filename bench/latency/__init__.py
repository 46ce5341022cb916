"""The latency of one put by a single client, in microseconds, stage by stage, on three real members.

Contains the stamps that members record during a put (``member``), the put timed from outside (``measure``), the
computation of the stages from the stamps (``stages``, pure) and the plot (``draw``). All clocks are the kernel's
monotonic one, which the processes of a machine share.
"""
