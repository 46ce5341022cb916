"""The server side of the dashboard: its files, ``/ui/about``, live figures, and the list of watchers.

    dashboard = Dashboard(identity, cluster, applier, users, hub)
    Server(limits, dashboard.around(handler))

``service`` has the paths and their access checks, serves the bundle of ``raftkv.ui``, and sends one record a second to
all viewers; ``figures`` reads the record from the member's counters, and keeps recent events; ``cluster`` asks the
other members.

Invariant: without a viewer, only events are collected. Keys are not read here: pages use ``/v3``.
"""
