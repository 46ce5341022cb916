"""TLS of a member: who is let in at its ports, and whom it connects to.

    ports = Ports.of(config, hosts)                  # ConfigError: the files cannot be used
    await server.listen(host, port, ports.client.listening)
    transport = Transport(..., ports.peer.dialing, ...)
    group.create_task(ports.watch())                 # ends connections with their certificates, and warns

    ports         both kinds of ports of one member: follow their files, admit, count and log failures; open
                  connections end with their certificates
    context       OpenSSL's contexts from files; ciphers: Go's names of cipher suites
    certificates  files of certificates, keys and lists of revoked ones, and their ends
    identity      names in certificates
    issue         makes certificates: of --auto-tls, and for ``raftkv certs``

The wire protocol is in ``rpc.server.accept`` and ``rpc.client.connect``, which ask a ``rpc.tls.Security``.
"""
