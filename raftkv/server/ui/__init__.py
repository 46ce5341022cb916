"""The dashboard's side in a member: its files, what it is (``/ui/about``), live figures, who watches.

    dashboard = Dashboard(identity, everybody, applier, users, hub)
    Server(limits, dashboard.around(handler))

``files`` serves the bundle of ``raftkv.ui``; ``service`` knows the paths and who may use them; ``live`` sends one
record a second to all who look; ``figures`` reads it from the member's counters; ``others`` asks the other members.

Invariant: nothing is counted, read or asked while nobody looks. Keys are not read here: pages use ``/v3``.
"""
