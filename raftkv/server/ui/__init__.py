"""The dashboard's side in a member: its files, what it is (``/ui/about``), live figures, who watches.

    dashboard = Dashboard(identity, cluster, applier, users, hub)
    Server(limits, dashboard.around(handler))

``service`` knows the paths and who may use them, serves the bundle of ``raftkv.ui``, and sends one record a second to
all viewers; ``figures`` reads it from the member's counters, and notes what happened; ``cluster`` asks the other
members.

Invariant: without a viewer nothing but events is counted, read or asked. Keys are not read here: pages use ``/v3``.
"""
