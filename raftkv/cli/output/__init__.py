"""The output formats of etcdctl."""
