"""Measurements of the manifest cache.

    manifest   the cluster, what is published, the verdicts
    client     one reader, a process of its own

Run it as `python bench/manifest.py`. It needs three members and as many processes as clients.
"""
