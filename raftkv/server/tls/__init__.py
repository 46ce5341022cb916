"""TLS of a member: which peers are admitted at its ports, and which servers it connects to.

    ports = Ports.of(config, hosts)                  # ConfigError: the files cannot be used
    await server.listen(host, port, ports.client.listening)
    transport = Transport(..., ports.peer.dialing, ...)
    group.create_task(ports.watch())                 # ends connections when their certificates end; logs warnings

    ports         the client ports and peer ports of a member: reload files, admit peers, count and log failures;
                  open connections end with their certificates
    context       OpenSSL contexts from files; cipher suites by Go's names
    certificates  files of certificates, keys and revocation lists, and when they expire
    identity      names in certificates
    issue         creates certificates, for --auto-tls and for ``raftkv certs``

The wire protocol is in ``rpc.server.accept`` and ``rpc.client.connect``, which use a ``rpc.tls.Security``.
"""
