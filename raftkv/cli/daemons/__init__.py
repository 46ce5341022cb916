"""The daemons beside a cluster."""
