"""Sockets of a server: which are watched, how bytes are moved, how connections are accepted.

    poller      one epoll for all connections of a server, asked by one callback of the loop
    transport   one connection: what asyncio's transport does, for the same protocols
    acceptor    a listening socket

asyncio has the same. These exist for two reasons. A request and its answer cost less: the loop sees one descriptor
instead of one for each client, so it makes no handle and enters no context for each that has something to say. And no
turn of the loop serves them all, however many have something to say at once, and however much.

Leaves out: binding of addresses (asyncio does it), connections to other servers, TLS (``tls``).
"""
