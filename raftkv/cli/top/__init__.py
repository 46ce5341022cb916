"""``raftkvctl top``: every member of a cluster in a live table.

``command`` asks, ``metrics`` reads ``/metrics``, ``model`` makes rows and rates, ``view`` draws. Laws: a member that
does not answer stays in the table as silent; without a terminal plain tables or JSON are printed. Example:
``raftkvctl top --once``. Leaves out: alarms over time, which a monitoring system keeps.
"""
