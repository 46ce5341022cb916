"""Copies of chunks: in the memory of a process, and in a directory that the processes of a machine share.

    memory      bounded by bytes, least recently used goes first
    directory   files named by digest; whoever comes first reads the store, the others wait for the file

What is cached never changes, so nothing is ever invalidated.
"""
