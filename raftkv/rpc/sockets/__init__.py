"""Sockets of a server: who is watched, how bytes are moved, how connections are taken.

    poller      one epoll for all connections of a server, asked by one callback of the loop
    transport   one connection: what asyncio's transport does, for the same protocols
    acceptor    a listening socket

asyncio has the same; these exist because a request and its answer cost a tenth less with them (a read of a key with
100 clients). The loop sees one descriptor instead of one for each client, so it makes no list, no handle and no context
for each that has something to say.

Leaves out: binding of addresses (asyncio does it), connections to other servers, TLS (``encrypted``).
"""
